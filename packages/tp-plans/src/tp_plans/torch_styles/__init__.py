"""Plans as ``torch.distributed.tensor.parallel`` styles; the one place of this package that imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans.styles import (
    ColwiseParallel,
    PrepareInput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
)
from tp_plans.torch_styles.embedding import LocalEmbedding
from tp_plans.torch_styles.linear import LocalColwise, LocalRowwise
from tp_plans.torch_styles.replicated import LocalReplicated, LocalSequenceParallel
from tp_plans.torch_styles.stream import PreparedInput

__all__ = ["style_to_torch", "to_torch"]


def to_torch(plan: Mapping[str, Style]) -> dict[str, ParallelStyle]:
    """A plan as the dict that ``torch.distributed.tensor.parallel.parallelize_module`` takes."""
    return {pattern: style_to_torch(style) for pattern, style in plan.items()}


def style_to_torch(style: Style) -> ParallelStyle:
    """One style as a ``ParallelStyle``, for modules whose parameters are on any device, meta included."""
    match style:
        case ColwiseParallel():
            return LocalColwise(style)
        case RowwiseParallel():
            return LocalRowwise(style)
        case VocabParallelEmbedding():
            return LocalEmbedding(style)
        case SequenceParallel():
            return LocalSequenceParallel(style)
        case Replicated():
            return LocalReplicated(style)
        case PrepareInput():
            return PreparedInput(style)
