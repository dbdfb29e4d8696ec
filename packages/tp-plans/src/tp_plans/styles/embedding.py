"""Embedding tables that are split."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans.layouts import Layout, Replicate
from tp_plans.styles.fields import require_flag, require_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabParallelEmbedding:
    """An embedding table split on the vocabulary: ``[vocab, hidden]`` becomes ``[vocab / tp, hidden]``.

    A rank looks up the ids that it holds, gives zeros for the others, and the ranks' outputs are summed.  Each
    rank's gradient is its own slice of the table.  Source: Megatron-LM (arXiv:1909.08053), section 3.

    Args:
        output_layouts: layout of the output: ``Replicate()``, or ``Shard(dim)`` to reduce-scatter onto a dim.
        use_local_output: output this rank's local shard as a plain tensor rather than a DTensor.
    """

    output_layouts: Layout = Replicate()
    use_local_output: bool = True

    def __post_init__(self) -> None:
        require_layout(self, "output_layouts")
        require_flag(self, "use_local_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColwiseEmbedding:
    """An embedding table split on its features: ``[entries, hidden]`` becomes ``[entries, hidden / tp]``.

    Args:
        output_layouts: layout of the output: ``Replicate()`` to gather the features, or ``Shard(-1)``.
        use_local_output: output this rank's local shard as a plain tensor rather than a DTensor.
    """

    output_layouts: Layout = Replicate()
    use_local_output: bool = True

    def __post_init__(self) -> None:
        require_layout(self, "output_layouts")
        require_flag(self, "use_local_output")
