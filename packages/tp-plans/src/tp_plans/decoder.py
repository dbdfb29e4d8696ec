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
    PrepareInput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
)

#: The dim of ``[batch, seq, hidden]`` that sequence parallelism cuts.
SEQUENCE_DIM = 1


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
    """

    path: str
    columns: tuple[str, ...]
    row: str
    unit: int | str = 1
    norms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The names of a decoder-only language model's parts, from the class that has the head downwards.

    Args:
        mixers: the sub-layers of a block that are split.
        norms: the norms of a block on the residual stream.
        root: the module that holds embedding, blocks and final norm.
        embedding: the token embedding, under ``root``.
        blocks: the pattern of a block, under ``root``.
        final_norm: the norm after the last block, under ``root``.
        head: the output projection to the vocabulary, from the top.
        embeds_outside: the embeddings are looked up and edited outside ``root`` (images are merged into the
            text), so that under sequence parallelism ``root`` receives them whole.
    """

    mixers: tuple[Mixer, ...]
    norms: tuple[str, ...]
    root: str = "model"
    embedding: str = "embed_tokens"
    blocks: str = "layers.*"
    final_norm: str = "norm"
    head: str = "lm_head"
    embeds_outside: bool = False


def decoder_plan(decoder: Decoder, *, name: str, sequence_parallel: bool = False) -> Plan:
    """The plan of a decoder: TP of Megatron-LM (arXiv:1909.08053), with SP of arXiv:2205.05198 when asked."""
    stream: Layout = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    rules = dict(_rules(decoder, stream))
    return Plan(rules, name=name, sequence_parallel=sequence_parallel)


def _rules(decoder: Decoder, stream: Layout) -> Iterator[tuple[str, Style]]:
    block = f"{decoder.root}.{decoder.blocks}"
    norm = _norm(stream)
    if isinstance(stream, Shard):
        yield decoder.root, PrepareInput(layout=stream, argument="inputs_embeds", position=None)
    yield f"{decoder.root}.{decoder.embedding}", _embedding(Replicate() if decoder.embeds_outside else stream)
    for path in decoder.norms:
        yield f"{block}.{path}", norm
    for mixer in decoder.mixers:
        yield from _mixer_rules(f"{block}.{mixer.path}", mixer, stream)
    yield f"{decoder.root}.{decoder.final_norm}", norm
    yield decoder.head, ColwiseParallel(use_local_output=False)


def _mixer_rules(path: str, mixer: Mixer, stream: Layout) -> Iterator[tuple[str, Style]]:
    yield path, PrepareInput()
    for column in mixer.columns:
        yield f"{path}.{column}", ColwiseParallel(unit=mixer.unit)
    for norm in mixer.norms:
        yield f"{path}.{norm}", Replicated(gradient="partial")
    yield (
        f"{path}.{mixer.row}",
        RowwiseParallel(output=stream, use_local_output=not isinstance(stream, Shard), unit=mixer.unit),
    )


def _norm(stream: Layout) -> Style:
    return SequenceParallel(sequence_dim=stream.dim) if isinstance(stream, Shard) else Replicated()


def _embedding(output: Layout) -> Style:
    return VocabParallelEmbedding(output=output, use_local_output=not isinstance(output, Shard))
