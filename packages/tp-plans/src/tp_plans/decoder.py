"""From the names of a decoder's parts to its plan: the mechanics of tensor and sequence parallelism, once.

An architecture states what its modules are called and which role they play; which style a role gets, and what
sequence parallelism turns it into, is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tp_plans.layouts import Layout, Replicate, Shard
from tp_plans.plan import Plan
from tp_plans.styles import (
    ColwiseParallel,
    ExpertsParallel,
    GatheredParameters,
    ParallelAttention,
    PrepareInput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
    WholeSequence,
)

#: The dim of ``[batch, seq, hidden]`` that sequence parallelism cuts.
SEQUENCE_DIM = 1


@dataclass(frozen=True, kw_only=True)
class Fused:
    """A projection that is several in one matrix, one after another.

    Args:
        name: what it is called.
        pieces: how large they are beside one another, as in ``ColwiseParallel``.
    """

    name: str
    pieces: tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A sub-layer of a block that goes column-wise in and row-wise out: attention or a (gated) MLP.

    Args:
        path: where it sits in the block.
        columns: the projections that read the residual stream.
        row: the projection that writes to it.
        unit: the features between them are split in whole multiples of this: a number, or the name of an
            attribute of the module at ``path``.
        norms: norms inside that see one unit's features each (q and k norms per head): every rank sees only its
            own units, so their gradients are partial sums.
        shared: the columns that hold key/value heads, which ranks may share.
        kv_heads: the attribute for the number of key/value heads, as in ``ParallelAttention``.
        counts: attributes that count what is split, as in ``ParallelAttention``.
        alone: layers that are the whole sub-layer in some blocks, in place of the others.
        optional: parts of it that some models lack.
    """

    path: str
    columns: tuple[str | Fused, ...]
    row: str
    unit: int | str = 1
    norms: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    kv_heads: str = "config.num_key_value_heads"
    counts: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unsplit:
    """A sub-layer that computes the same on every rank, such as a recurrence; its large layers are stored split.

    Args:
        path: where it sits in the block.
        layers: its linear layers, whose features are gathered.
        read: parameters that its code reads from layers below by itself, as in ``GatheredParameters``.
    """

    path: str
    layers: tuple[str, ...]
    read: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Stacked experts in a block.

    Args:
        path: where they sit in the block.
    """

    path: str


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The names of a decoder-only language model's parts, from the class that has the head downwards.

    Args:
        mixers: the sub-layers of a block.
        norms: the norms of a block on the residual stream.
        root: the module that holds embedding, blocks and final norm.
        embedding: the token embedding, under ``root``.
        tables: further embeddings under ``root``, which some models lack.
        blocks: the pattern of a block, under ``root``.
        final_norm: the norm after the last block, under ``root``.
        head: the output projection to the vocabulary, from the top.
        embeds_outside: the embeddings are looked up and edited outside ``root`` (images are merged into the
            text), so that under sequence parallelism ``root`` receives them whole.
        door_at_blocks: blocks compute with more than the residual stream, so that under sequence parallelism
            they gather it as they begin and cut it as they end.
        optional: norms and sub-layers, by path in the block, that some models lack.
    """

    mixers: tuple[Mixer | Unsplit | Experts, ...]
    norms: tuple[str, ...]
    root: str = "model"
    embedding: str = "embed_tokens"
    tables: tuple[str, ...] = ()
    blocks: str = "layers.*"
    final_norm: str = "norm"
    head: str = "lm_head"
    embeds_outside: bool = False
    door_at_blocks: bool = False
    optional: tuple[str, ...] = ()


def decoder_plan(decoder: Decoder, *, name: str, sequence_parallel: bool = False) -> Plan:
    """The plan of a decoder: TP of Megatron-LM (arXiv:1909.08053), with SP of arXiv:2205.05198 when asked."""
    stream: Layout = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    return Plan(dict(_rules(decoder, stream)), name=name, sequence_parallel=sequence_parallel)


def optional_rules(decoder: Decoder) -> Iterator[str]:
    """The patterns of a decoder's plan that need not match anything in a model."""
    yield from (f"{decoder.root}.{table}" for table in decoder.tables)
    block = f"{decoder.root}.{decoder.blocks}"
    yield from (f"{block}.{path}" for path in decoder.optional)
    for mixer in decoder.mixers:
        below = [pattern for pattern, _ in _sublayer(f"{block}.{mixer.path}", mixer, Replicate())]
        if mixer.path in decoder.optional:
            yield from below
        elif isinstance(mixer, Mixer):
            yield from (f"{block}.{mixer.path}.{name}" for name in (*mixer.optional, *mixer.alone))


def _rules(decoder: Decoder, stream: Layout) -> Iterator[tuple[str, Style]]:
    block = f"{decoder.root}.{decoder.blocks}"
    inside = Replicate() if decoder.door_at_blocks else stream
    if isinstance(inside, Shard):
        yield decoder.root, PrepareInput(layout=stream, argument="inputs_embeds", position=None)
    elif isinstance(stream, Shard):
        yield block, WholeSequence(sequence_dim=stream.dim)
    yield f"{decoder.root}.{decoder.embedding}", _embedding(Replicate() if decoder.embeds_outside else inside)
    for table in decoder.tables:
        yield f"{decoder.root}.{table}", VocabParallelEmbedding()
    for path in decoder.norms:
        yield f"{block}.{path}", _norm(inside)
    for mixer in decoder.mixers:
        yield from _sublayer(f"{block}.{mixer.path}", mixer, inside)
    yield f"{decoder.root}.{decoder.final_norm}", _norm(stream)
    yield decoder.head, ColwiseParallel(use_local_output=False)


def _sublayer(path: str, mixer: Mixer | Unsplit | Experts, stream: Layout) -> Iterator[tuple[str, Style]]:
    match mixer:
        case Mixer():
            yield from _mixer_rules(path, mixer, stream)
        case Unsplit():
            own = GatheredParameters(names=mixer.read) if mixer.read else None
            if isinstance(stream, Shard):
                yield path, WholeSequence(sequence_dim=stream.dim, around=own)
            elif own is not None:
                yield path, own
            for layer in mixer.layers:
                yield f"{path}.{layer}", ColwiseParallel(output=Replicate())
        case Experts():
            yield path, ExpertsParallel()


def _mixer_rules(path: str, mixer: Mixer, stream: Layout) -> Iterator[tuple[str, Style]]:
    if mixer.shared or mixer.counts:
        yield path, ParallelAttention(counts=mixer.counts, kv_heads=mixer.kv_heads)
    else:
        yield path, PrepareInput()
    for column in mixer.columns:
        name, pieces = (column.name, column.pieces) if isinstance(column, Fused) else (column, ())
        yield f"{path}.{name}", ColwiseParallel(unit=mixer.unit, pieces=pieces, shared=name in mixer.shared)
    for norm in mixer.norms:
        yield f"{path}.{norm}", Replicated(gradient="partial")
    local = not isinstance(stream, Shard)
    yield f"{path}.{mixer.row}", RowwiseParallel(output=stream, use_local_output=local, unit=mixer.unit)
    for layer in mixer.alone:
        yield f"{path}.{layer}", ColwiseParallel(output=stream, use_local_output=local)


def _norm(stream: Layout) -> Style:
    return SequenceParallel(sequence_dim=stream.dim) if isinstance(stream, Shard) else Replicated()


def _embedding(output: Layout) -> Style:
    return VocabParallelEmbedding(output=output, use_local_output=not isinstance(output, Shard))
