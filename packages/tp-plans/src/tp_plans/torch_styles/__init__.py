"""Plans as ``torch.distributed.tensor.parallel`` styles; the one place of this package that imports torch."""

from __future__ import annotations

from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans.plan import Plan
from tp_plans.torch_styles.fold import folded
from tp_plans.torch_styles.owner import style_to_torch

__all__ = ["style_to_torch", "to_torch"]


def to_torch(plan: Plan) -> dict[str, ParallelStyle]:
    """A plan as the dict that ``torch.distributed.tensor.parallel.parallelize_module`` takes."""
    return {pattern: style_to_torch(style, owned) for pattern, (style, owned) in folded(plan).items()}
