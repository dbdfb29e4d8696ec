"""The functions of NeMo RL's ``nemo_rl.models.dtensor.parallelize`` that make plans, by their names and signatures.

A user changes one import line.  Every word of transformers' plans is known, errors of the shipped plans are
corrected, and errors name the fix where the originals assert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_plans.hugging_face.translate import from_hugging_face
from tp_plans.plan import Plan
from tp_plans.styles.words import style_from_name

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def get_hf_tp_plan(model: Any) -> dict[str, ParallelStyle]:
    """The plan that transformers ships for a model, as styles of torch; the logits stay split on the vocabulary.

    Raises:
        PlanError: transformers ships none, or it cannot be read.

    Example:
        >>> import torch
        >>> from tp_plans.nemo import get_hf_tp_plan
        >>> class Model(torch.nn.Module):
        ...     _tp_plan = {"head": "colwise"}
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(8, 32)
        >>> list(get_hf_tp_plan(Model()))
        ['head']
    """
    return dict(from_hugging_face(model).to_torch())


def translate_parallel_style(style: str) -> ParallelStyle:
    """The style of torch that a word of transformers' plans means, as ``"colwise"``.

    Raises:
        UnknownStyleError: the word is in no table.

    Example:
        >>> from tp_plans.nemo import translate_parallel_style
        >>> type(translate_parallel_style("colwise")).__name__
        'ColwiseParallelImpl'
    """
    return Plan({"module": style_from_name(style)}).to_torch()["module"]
