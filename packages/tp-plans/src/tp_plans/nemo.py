"""The functions of NeMo RL's ``nemo_rl.models.dtensor.parallelize`` that make plans, by their names and signatures.

A user changes one import line.  Every word of transformers' plans is known, what the shipped plans get wrong is
with_overrides, and errors name the fix where the originals assert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_plans.hugging_face import from_hugging_face, style_from_name
from tp_plans.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def get_hf_tp_plan(model: Any) -> dict[str, ParallelStyle]:
    """The plan that transformers ships for a model, as styles of torch; the logits stay split on the vocabulary.

    Args:
        model: a transformers model.

    Raises:
        PlanError: transformers ships none, or it cannot be read.
    """
    return dict(from_hugging_face(model).to_torch())


def translate_parallel_style(style: str) -> ParallelStyle:
    """The style of torch that a word of transformers' plans means, as ``"colwise"``.

    Raises:
        UnknownStyleError: the word is in no table.
    """
    return Plan({"module": style_from_name(style)}).to_torch()["module"]
