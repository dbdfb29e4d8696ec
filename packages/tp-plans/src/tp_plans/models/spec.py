"""From the names of a decoder's parts to its plan: the style of each role, and its sequence-parallel form, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tp_plans import styles
from tp_plans.errors import CapabilityError
from tp_plans.layouts import Layout, Replicate, Shard
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan

#: The dim of ``[batch, seq, hidden]`` that sequence parallelism cuts.
SEQUENCE_DIM = 1


@dataclass(frozen=True, kw_only=True)
class FusedLinear:
    """A projection that is several in one matrix, one after another."""

    name: str  # the projection's name
    fused_sizes: tuple[int | str, ...]  # their relative sizes in order, as in ``ColwiseParallel``


@dataclass(frozen=True, kw_only=True)
class SublayerSpec:
    """A sub-layer of a block that goes column-wise in and row-wise out: attention or a (gated) MLP."""

    path: str  # where it sits in the block
    colwise: tuple[str | FusedLinear, ...]  # the projections that read the residual stream
    rowwise: str  # the projection that writes to it
    # the features between them are split in multiples of this: a number, or the name of an attribute of the module at
    # ``path``
    multiple_of: int | str = 1
    # norms inside that see one unit's features each (q and k norms per head): every rank sees only its own units, so
    # their gradients are partial sums
    norms: tuple[str, ...] = ()
    kv_projections: tuple[str, ...] = ()  # the columns that hold key/value heads, which ranks may share
    # the attribute for the number of key/value heads, as in ``ParallelAttention``
    kv_heads_attr: str = "config.num_key_value_heads"
    head_count_attrs: tuple[str, ...] = ()  # attributes that count heads or their features, as in ``ParallelAttention``
    replacement_linears: tuple[str, ...] = ()  # layers that replace the sub-layer's others in some blocks
    optional: tuple[str, ...] = ()  # parts of it that some models lack


@dataclass(frozen=True, kw_only=True)
class ReplicatedSublayer:
    """A sub-layer that computes the same on every rank, such as a recurrence; its large layers are stored split."""

    path: str  # where it sits in the block
    linears: tuple[str, ...]  # its linear layers; their features are gathered
    # parameters that its code reads directly from layers below, as in ``GatheredParameters``
    gathered_params: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Stacked experts in a block.

    Args:
        path: where they sit in the block.
    """

    path: str


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The names of a decoder-only language model's parts, from the class that has the head downwards."""

    sublayers: tuple[SublayerSpec | ReplicatedSublayer | ExpertsSpec, ...]  # the sub-layers of a block
    norms: tuple[str, ...]  # the norms of a block on the residual stream
    root: str = "model"  # the module that holds embedding, blocks and final norm
    embedding: str = "embed_tokens"  # the token embedding, under ``root``
    extra_embeddings: tuple[str, ...] = ()  # further embeddings under ``root``, which some models lack
    blocks: str = "layers.*"  # the pattern of a block, under ``root``
    final_norm: str = "norm"  # the norm after the last block, under ``root``
    lm_head: str = "lm_head"  # the output projection to the vocabulary, from the top
    # the embeddings are looked up and edited outside ``root`` (images are merged into the text), so that under sequence
    # parallelism ``root`` receives them in full
    merges_embeds_before_root: bool = False
    # blocks compute with more than the residual stream, so that under sequence parallelism they gather it as they begin
    # and cut it as they end
    gather_at_block_boundary: bool = False
    optional: tuple[str, ...] = ()  # norms and sub-layers, by path in the block, that some models lack


def decoder_plan(decoder: DecoderSpec, *, name: str, sequence_parallel: bool = False) -> Plan:
    """The plan of a decoder: TP of Megatron-LM (arXiv:1909.08053), with SP of arXiv:2205.05198 when asked.

    Args:
        decoder: the names of the decoder's layers.
        name: the model or class of the plan, used in messages.
        sequence_parallel: also shard the activations between blocks on the sequence.

    Example:
        >>> import tp_plans
        >>> mlp = tp_plans.models.SublayerSpec(path="mlp", colwise=("up",), rowwise="down")
        >>> spec = tp_plans.models.DecoderSpec(sublayers=(mlp,), norms=("norm",))
        >>> plan = tp_plans.models.decoder_plan(spec, name="tiny")
        >>> plan
        <Plan tiny: TP, 7 rules>
    """
    stream: Layout = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    return Plan(dict(_rules(decoder, stream)), name=name, sequence_parallel=sequence_parallel)


def optional_rules(decoder: DecoderSpec) -> Iterator[str]:
    """The patterns of a decoder's plan that need not match anything in a model."""
    yield from (f"{decoder.root}.{table}" for table in decoder.extra_embeddings)
    block = f"{decoder.root}.{decoder.blocks}"
    yield from (f"{block}.{path}" for path in decoder.optional)
    for mixer in decoder.sublayers:
        below = [pattern for pattern, _ in _sublayer(f"{block}.{mixer.path}", mixer, Replicate())]
        if mixer.path in decoder.optional:
            yield from below
        elif isinstance(mixer, SublayerSpec):
            yield from (f"{block}.{mixer.path}.{name}" for name in (*mixer.optional, *mixer.replacement_linears))


def _rules(decoder: DecoderSpec, stream: Layout) -> Iterator[tuple[str, styles.Style]]:
    block = f"{decoder.root}.{decoder.blocks}"
    inside = Replicate() if decoder.gather_at_block_boundary else stream
    if isinstance(inside, Shard):
        yield decoder.root, styles.PrepareModuleInput(layout=stream, argument="inputs_embeds", position=None)
    elif isinstance(stream, Shard):
        yield block, styles.GatherSequence(sequence_dim=stream.dim)
    lookup = Replicate() if decoder.merges_embeds_before_root else inside
    embedding = styles.VocabParallelEmbedding(output_layouts=lookup, use_local_output=not isinstance(lookup, Shard))
    yield f"{decoder.root}.{decoder.embedding}", embedding
    for table in decoder.extra_embeddings:
        yield f"{decoder.root}.{table}", styles.VocabParallelEmbedding()
    for path in decoder.norms:
        yield f"{block}.{path}", _norm(inside)
    for mixer in decoder.sublayers:
        yield from _sublayer(f"{block}.{mixer.path}", mixer, inside)
    yield f"{decoder.root}.{decoder.final_norm}", _norm(stream)
    yield decoder.lm_head, styles.ColwiseParallel(use_local_output=False)


def _sublayer(
    path: str, mixer: SublayerSpec | ReplicatedSublayer | ExpertsSpec, stream: Layout
) -> Iterator[tuple[str, styles.Style]]:
    match mixer:
        case SublayerSpec():
            yield from _mixer_rules(path, mixer, stream)
        case ReplicatedSublayer():
            own = styles.GatheredParameters(names=mixer.gathered_params) if mixer.gathered_params else None
            if isinstance(stream, Shard):
                yield path, styles.GatherSequence(sequence_dim=stream.dim, inner=own)
            elif own is not None:
                yield path, own
            for layer in mixer.linears:
                yield f"{path}.{layer}", styles.ColwiseParallel(output_layouts=Replicate())
        case ExpertsSpec():
            yield path, styles.ExpertsParallel()


def _mixer_rules(path: str, mixer: SublayerSpec, stream: Layout) -> Iterator[tuple[str, styles.Style]]:
    if mixer.kv_projections or mixer.head_count_attrs:
        yield path, styles.ParallelAttention(head_count_attrs=mixer.head_count_attrs, kv_heads_attr=mixer.kv_heads_attr)
    else:
        yield path, styles.PrepareModuleInput()
    for column in mixer.colwise:
        name, pieces = (column.name, column.fused_sizes) if isinstance(column, FusedLinear) else (column, ())
        shared = name in mixer.kv_projections
        style = styles.ColwiseParallel(multiple_of=mixer.multiple_of, fused_sizes=pieces, replicate_kv_heads=shared)
        yield f"{path}.{name}", style
    for norm in mixer.norms:
        yield f"{path}.{norm}", styles.NoParallel(gradient="partial")
    local = not isinstance(stream, Shard)
    row = styles.RowwiseParallel(output_layouts=stream, use_local_output=local, multiple_of=mixer.multiple_of)
    yield f"{path}.{mixer.rowwise}", row
    for layer in mixer.replacement_linears:
        yield f"{path}.{layer}", styles.ColwiseParallel(output_layouts=stream, use_local_output=local)


def _norm(stream: Layout) -> styles.Style:
    return styles.SequenceParallel(sequence_dim=stream.dim) if isinstance(stream, Shard) else styles.NoParallel()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model class, the names of its parts, and its capabilities."""

    class_name: str  # the class as a config's ``architectures`` names it
    model_type: str  # the config's ``model_type``
    decoder: DecoderSpec  # the names of its parts
    notes: str = ""  # the parts that are not split, with the reason
    sequence_parallel: bool = True  # whether it has a sequence-parallel form; ``notes`` says why not
    aliases: tuple[str, ...] = ()  # further names of the class
    # adapts the plan to a model's config, if names do not tell all
    adapt_plan: Callable[[Plan, Any], Plan] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the architecture."""
        return (self.class_name, self.model_type, *self.aliases)

    @property
    def has_experts(self) -> bool:
        """Whether its experts are sharded over the axis."""
        return any(isinstance(sublayer, ExpertsSpec) for sublayer in self.decoder.sublayers)

    def plan(self, *, sequence_parallel: bool = False) -> Plan:
        """The architecture's plan, with sequence parallelism when asked.

        Raises:
            CapabilityError: the architecture has no sequence-parallel form.
        """
        if sequence_parallel and not self.sequence_parallel:
            raise CapabilityError(
                f"{self.class_name} has no sequence-parallel form ({self.notes}): pass sequence_parallel=False"
            )
        return decoder_plan(self.decoder, name=self.class_name, sequence_parallel=sequence_parallel)

    def for_model(self, plan: Plan, tree: ModelTree) -> Plan:
        """The plan for one model: adjusted to its config, without rules for optional parts that this model lacks."""
        if self.adapt_plan is not None:
            plan = self.adapt_plan(plan, getattr(tree.model, "config", None))
        present = {pattern for path in tree.modules for pattern in plan.match(path)}
        lacking = {p: None for p in optional_rules(self.decoder) if p in plan and p not in present}
        return plan.override(lacking)
