"""The collectives of a plan, derived from its layouts.

A layer that is as wide as the embedding reads the residual stream: the nearest rule above it that prepares inputs gives
the layout of its input. The input of any other layer is replicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tp_plans import styles
from tp_plans.layouts import Layout, Partial, Replicate, Shard, compute_ranges, shard_ranges
from tp_plans.model_tree import ancestors, join, parent
from tp_plans.module_attrs import resolve_int
from tp_plans.naming import leaf
from tp_plans.planned_tree import PlannedTree

Kind = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
When = Literal["forward", "backward"]

_GATHERED_ABOVE = "prepared"  # a full DTensor; the module that prepared it sums its gradient
_InputLayout = Layout | Literal["prepared"]


@dataclass(frozen=True)
class CollectiveSummary:
    """The number of collectives of one kind."""

    kind: Kind  # of the collective
    when: When  # in the forward or the backward pass
    count: int  # how often in one pass, over all places of the rule
    what: str  # the tensors that are sent

    def __str__(self) -> str:
        return f"{self.when}: {self.kind} x {self.count} ({self.what})"


_Comm = tuple[Kind, When, str]


def collectives_of(
    places: Sequence[str], style: styles.Style, planned: PlannedTree, tp: int
) -> tuple[CollectiveSummary, ...]:
    """The collectives that a rule causes at all its places together; none on a single rank."""
    if tp == 1:
        return ()
    counts = Counter(sent for path in places for sent in _comms(path, style, planned, tp))
    return tuple(CollectiveSummary(kind, when, count, what) for (kind, when, what), count in counts.items())


def _comms(path: str, style: styles.Style, planned: PlannedTree, tp: int) -> Iterator[_Comm]:
    match style:
        case styles.ColwiseParallel():
            yield from _gather_input(Shard(-1) if style.input_layouts == Shard(-1) else _input_layout(path, planned))
            yield from _row_exchange(path, style, planned, tp)
            yield from _redistribute_features(style.output_layouts)
        case styles.MLAKVProjection():
            yield from _gather_input(_input_layout(path, planned))
            yield "all_gather", "forward", "features"
            yield "all_reduce", "backward", "gradient of the rotary key"
        case styles.RowwiseParallel():
            yield from _row(path, style, planned, tp)
        case styles.VocabParallelEmbedding():
            yield from _reduce_output(style.output_layouts)
        case styles.ColwiseEmbedding(output_layouts=Replicate()) | styles.ColwiseEmbedding(output_layouts=Shard(dim=1)):
            yield from _redistribute_features(style.output_layouts)
        case styles.ExpertsParallel():
            yield from _reduce_output(style.output_layouts)
            yield "all_reduce", "backward", "gradient of the tokens"
            yield "all_reduce", "backward", "gradient of the routing weights"
        case styles.DispatchExperts():
            for sent in ("numbers of tokens", "indices", "routing weights", "tokens", "sums"):
                yield "all_to_all", "forward", sent
            for sent in ("gradient of the sums", "gradient of the tokens", "gradient of the routing weights"):
                yield "all_to_all", "backward", sent
        case styles.AllReduceOutput():
            yield from _reduce_output(style.output_layouts)
            yield "all_reduce", "backward", "gradient of the input"
        case styles.SequenceParallel() | styles.NoParallel(gradient="partial"):
            if isinstance(style, styles.SequenceParallel) and style.full_output:
                yield "all_gather", "forward", "output"
            for name in planned.tree.own_parameters(path):
                yield "all_reduce", "backward", f"gradient of {name}"
        case styles.GatheredParameters(names=names):
            for name in names:
                if join(path, name) in planned.parameters:
                    yield "all_gather", "forward", name
        case styles.ParameterStyle():
            name = leaf(path)
            if style.gathered:
                yield "all_gather", "forward", name
            if style.gradient == "partial":
                yield ("reduce_scatter" if style.gathered else "all_reduce"), "backward", f"gradient of {name}"
        case styles.PrepareModuleInput() | styles.ParallelAttention():
            yield from _prepare_input(path, style, planned)
        case styles.GatherSequence(inner=around):
            if planned.plan.sequence_parallel:
                yield "all_gather", "forward", "the sequence"
                yield "all_gather", "backward", "gradient of the sequence"
            if around is not None:
                yield from _comms(path, around, planned, tp)


def _row(path: str, style: styles.RowwiseParallel, planned: PlannedTree, tp: int) -> Iterator[_Comm]:
    if style.input_layouts == Replicate():
        if _input_layout(path, planned) == Shard(1):
            yield "all_to_all", "forward", "input"
            yield "all_to_all", "backward", "gradient of the input"
        else:
            yield "all_gather", "backward", "gradient of the input"
    yield from _row_exchange(path, style, planned, tp)
    yield from _reduce_output(style.output_layouts)


def _input_layout(path: str, planned: PlannedTree) -> _InputLayout:
    stream: Layout = Shard(1) if planned.plan.sequence_parallel else Replicate()
    weight, width = planned.tree.weight(path), planned.embedding_width
    if weight is not None and width is not None and weight.shape[1] != width:
        return Replicate()
    for above in ancestors(path):
        match planned.own_style(above):
            case styles.PrepareModuleInput(layout=Replicate()) | styles.ParallelAttention(layout=Replicate()):
                return _GATHERED_ABOVE  # type: ignore[return-value]
        if isinstance(planned.style(above), styles.GatherSequence):
            return Replicate()
    return stream


def _gather_input(arrives: _InputLayout) -> Iterator[_Comm]:
    """Return the collectives that gather an input and reduce its gradient, a partial sum on each rank."""
    if isinstance(arrives, Shard):
        yield "all_gather", "forward", "input"
        yield "reduce_scatter", "backward", "gradient of the input"
    elif isinstance(arrives, Replicate):
        yield "all_reduce", "backward", "gradient of the input"


def _reduce_output(output: Layout) -> Iterator[_Comm]:
    if isinstance(output, Replicate):
        yield "all_reduce", "forward", "output"
    elif not isinstance(output, Partial):
        yield "reduce_scatter", "forward", "output"
        yield "all_gather", "backward", "gradient of the output"


def _redistribute_features(output: Layout) -> Iterator[_Comm]:
    """Return the collectives that bring an output with sharded features to another layout."""
    if isinstance(output, Replicate):
        yield "all_gather", "forward", "output"
    elif output != Shard(-1):
        yield "all_to_all", "forward", "output"
        yield "all_to_all", "backward", "gradient of the output"


def _prepare_input(
    path: str, style: styles.PrepareModuleInput | styles.ParallelAttention, planned: PlannedTree
) -> Iterator[_Comm]:
    arrives = Replicate() if isinstance(planned.style(path), styles.GatherSequence) else _input_layout(path, planned)
    if style.layout == Replicate() and arrives != _GATHERED_ABOVE:
        yield from _gather_input(arrives)
    elif isinstance(style.layout, Shard):
        # Embeddings may be looked up in full, and sharded at the start of the language model.
        embeddings = (style for style in planned.plan.values() if isinstance(style, styles.VocabParallelEmbedding))
        if any(embedding.output_layouts == Replicate() for embedding in embeddings):
            yield "all_gather", "backward", "gradient of the input"


def _row_exchange(
    path: str, style: styles.ColwiseParallel | styles.RowwiseParallel, planned: PlannedTree, tp: int
) -> Iterator[_Comm]:
    """Return the collectives that fetch rows of a weight from other ranks and return their gradients."""
    dim, shared = (0, style.replicate_kv_heads) if isinstance(style, styles.ColwiseParallel) else (1, False)
    if not style.fused_sizes and not shared:
        return
    above = planned.modules[parent(path)]
    unit, pieces = resolve_int(above, style.multiple_of), [resolve_int(above, piece) for piece in style.fused_sizes]
    for name, parameter in planned.tree.own_parameters(path).items():
        if parameter.ndim > dim:
            size = parameter.shape[dim]
            used = compute_ranges(size, tp, unit=unit, pieces=pieces, shared=shared)
            rows = [[row for part in rank for row in part] for rank in used]
            if rows != [list(stored) for stored in shard_ranges(size, tp)]:
                yield "all_to_all", "forward", f"rows of {name}"
                yield "all_to_all", "backward", f"gradient of rows of {name}"
