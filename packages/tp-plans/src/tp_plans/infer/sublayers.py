"""Recognise the sub-layers of a block, and give the rules for them.

A sub-layer is certain if all parts of a module have known names, and shapes that agree: a plan that is applied without
review is completed with certain sub-layers only.  Any other module with linear layers that read and write the hidden
states may be a sub-layer: ``suggest`` examines its code, and turns unknown parts into doubts or gathered outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tp_plans.naming as naming
from tp_plans._validate import is_integer
from tp_plans.layouts import Shard
from tp_plans.model_tree import ModelTree, join, parent
from tp_plans.naming import KV_PROJECTION, QUERY_PROJECTION, leaf
from tp_plans.planned_tree import PlannedTree, merge_per_block
from tp_plans.styles import ColwiseParallel, MLAKVProjection, NoParallel, RowwiseParallel, Style


@dataclass(frozen=True)
class Sublayer:
    """A module with linear layers that read the residual stream and write to it: attention or an MLP."""

    path: str
    input_projs: tuple[str, ...]  # the layers that are split column-wise
    output_proj: str  # the layer that writes to the residual stream, split row-wise
    inner_dim: int  # features that the output projection reads
    head_norms: tuple[str, ...] = ()  # norms of one head each, inside
    mla_kv_down: str | None = None  # the projection to the compressed keys and values of latent attention
    # its other linear layers; unless it is latent attention, they neither read nor write the residual stream
    other_linears: tuple[str, ...] = ()
    fused_sizes: tuple[int | str, ...] = ()  # the matrices of the input projections, as in ``ColwiseParallel``
    guessed_by_name: bool = False  # whether only its name distinguishes the output projection
    is_certain: bool = False  # whether all its parts have known names, and shapes that agree

    @property
    def is_named_attention(self) -> bool:
        """Whether it mixes tokens, judged by its name and its layers' names."""
        names = [naming.leaf(projection) for projection in self.input_projs]
        queries = any(naming.QUERY_PROJECTION.fullmatch(name) or "qkv" in name.lower() for name in names)
        return bool(naming.ATTENTION_MODULE.search(naming.leaf(self.path).lower())) or queries

    @property
    def is_apart(self) -> bool:
        """Whether the output projection is in another module."""
        return parent(self.output_proj) != self.path

    @property
    def is_interleaved(self) -> bool:
        """Whether a fused projection keeps each head's query, key and value together."""
        return any(naming.INTERLEAVED_QKV.search(naming.leaf(projection)) for projection in self.input_projs)


def rules_for(sublayer: Sublayer, *, multiple_of: int | str = 1) -> dict[str, Style]:
    """Return the rules that split a sub-layer as Megatron-LM does: column-wise in, row-wise out."""
    # What it does between its projections must work on single features, or single heads (``multiple_of``).
    colwise = ColwiseParallel(multiple_of=multiple_of, fused_sizes=sublayer.fused_sizes)
    latent: dict[str, Style] = {} if sublayer.mla_kv_down is None else {sublayer.mla_kv_down: MLAKVProjection()}
    return {
        **dict.fromkeys(sublayer.input_projs, colwise),
        **latent,
        **dict.fromkeys(sublayer.head_norms, NoParallel(gradient="partial")),
        sublayer.output_proj: RowwiseParallel(multiple_of=multiple_of),
    }


def split_sublayers(planned: PlannedTree, root: str) -> Mapping[str, Style]:
    """Return rules for the sub-layers with known names only."""
    # A plan that splits the output projection may lack a rule for an input projection that only some configs have (the
    # queries of latent attention without a low rank).
    return merge_per_block(_split(planned, root), planned.tree)


def _split(planned: PlannedTree, root: str) -> Iterator[tuple[str, Style]]:
    for path, _ in planned.within(root):
        names = planned.tree.children_with_parameters(path)
        if len(names) < 2 or planned.tree.own_parameters(path):
            continue
        sublayer = recognize(path, planned.tree)
        if sublayer is None or not sublayer.is_certain:
            continue
        rules, output = rules_for(sublayer), planned.style(sublayer.output_proj)
        if all(planned.style(join(path, name)) is None for name in names):
            yield from rules.items()
        elif isinstance(output, RowwiseParallel) and output.input_layouts == Shard(-1):
            missing = (path for path in sublayer.input_projs if planned.style(path) is None)
            yield from ((path, rules[path]) for path in missing)


def recognize(path: str, tree: ModelTree) -> Sublayer | None:
    """Return the sub-layer that a module is by the names of its parts, or may be by the shapes of its layers."""
    names = tree.children_with_parameters(path)
    sublayer = _attention(path, names, tree) or _latent_attention(path, names, tree) or _mlp(path, names, tree)
    if sublayer is not None and all(map(tree.is_linear, (*sublayer.input_projs, sublayer.output_proj))):
        return sublayer
    return _shaped(path, tree)


def _attention(path: str, names: set[str], tree: ModelTree) -> Sublayer | None:
    """Return attention with query, key and value in heads, norms of one head, a gate as wide as the queries."""
    output = next((name for name in naming.ATTENTION_OUTPUTS if name in names), "")
    head_dim = getattr(tree.modules[path], naming.HEAD_DIM, None)
    if not output or not set(naming.QKV) <= names or not is_integer(head_dim, least=1):
        return None
    width = {name: tree.size(join(path, name), 0) for name in names}
    gates = {name for name in naming.ATTENTION_GATES if width.get(name) == width[naming.QUERY]}
    inputs = {*naming.QKV, *(gates & names)}
    norms = {name for name in names & set(naming.HEAD_NORMS) if tree.is_scale(join(path, name), head_dim)}
    whole_heads = all((width[name] or 1) % head_dim == 0 for name in inputs)
    fits = tree.size(join(path, output), 1) == width[naming.QUERY]
    if not (whole_heads and fits) or names != inputs | norms | {output}:
        return None
    projections, norm_paths = (tuple(join(path, name) for name in sorted(parts)) for parts in (inputs, norms))
    inner = width[naming.QUERY] or 0
    return Sublayer(path, projections, join(path, output), inner, head_norms=norm_paths, is_certain=True)


def _latent_attention(path: str, names: set[str], tree: ModelTree) -> Sublayer | None:
    """Return multi-head latent attention with DeepSeek's names."""
    module, queries = tree.modules[path], set(naming.MLA_QUERIES) & names
    counted = all(is_integer(getattr(module, name, None), least=1) for name in (naming.MLA_HEADS, naming.MLA_ROPE_DIM))
    required = {naming.MLA_KV_DOWN, naming.MLA_KV_UP, naming.MLA_OUTPUT}
    if not (required <= names <= set(naming.MLA_LAYERS) and len(queries) == 1 and counted):
        return None
    inputs, output = (join(path, queries.pop()), join(path, naming.MLA_KV_UP)), join(path, naming.MLA_OUTPUT)
    down = tuple(join(path, name) for name in (naming.MLA_QUERIES_DOWN, naming.MLA_KV_DOWN) if name in names)
    inner = tree.size(output, 1) or 0
    return Sublayer(path, inputs, output, inner, mla_kv_down=down[-1], other_linears=down, is_certain=True)


def _mlp(path: str, names: set[str], tree: ModelTree) -> Sublayer | None:
    """Return a gated, fused or plain MLP: its other modules work on single features."""
    for *inputs, output in naming.MLPS:
        if names != {*inputs, output}:
            continue
        widths = {tree.size(join(path, name), 0) for name in inputs}
        inner = tree.size(join(path, output), 1)
        if inner is None:
            continue
        is_fused = widths == {2 * inner}
        if widths == {inner} or is_fused:
            projections, fused_sizes = tuple(join(path, name) for name in inputs), (1, 1) if is_fused else ()
            return Sublayer(path, projections, join(path, output), inner, fused_sizes=fused_sizes, is_certain=True)
    return None


def _shaped(path: str, tree: ModelTree) -> Sublayer | None:
    """Return the sub-layer of a module with direct layers that read the residual stream and one that writes to it."""
    # Names decide only where shapes are ambiguous.
    width = tree.size(tree.embedding or "", 1)
    linear = [child for child in tree.children[path] if tree.is_linear(child)]
    shapes = {layer: tree.shape(layer) for layer in linear}
    writing = [layer for layer in linear if shapes[layer][0] == width]
    if len(linear) < 2 or not writing:
        return None
    certain = [layer for layer in writing if shapes[layer][1] != width]
    named = [layer for layer in writing if naming.OUTPUT_PROJECTION.fullmatch(naming.leaf(layer).lower())]
    output = (certain or named or writing)[-1]
    inputs = tuple(layer for layer in linear if layer != output and shapes[layer][1] == width)
    if not inputs:
        return None
    others = tuple(layer for layer in linear if layer != output and layer not in inputs)
    guessed, inner = not certain and len(writing) > 1, shapes[output][1]
    return Sublayer(path, inputs, output, inner, other_linears=others, guessed_by_name=guessed)


#: The prefixes of the names of an MLP's two modules; the suffixes are the same.
_INTERMEDIATE, _OUTPUT = "intermediate", "output"


def sublayers_apart(block: str, tree: ModelTree) -> Iterator[Sublayer]:
    """Iterate over the sub-layers of a block with an output projection in another module than their inputs."""
    for path in (block, *tree.below(block)):
        for child in tree.children[path]:
            name = leaf(child)
            suffix = name.removeprefix(_INTERMEDIATE) if name.startswith(_INTERMEDIATE) else ""
            output = join(path, f"{_OUTPUT}{suffix}")
            inputs = _inputs_apart(child, tree)
            row = _row(output, tree) if inputs and output in tree.modules else None
            if row is not None and {tree.shape(layer) for layer in inputs} == {tree.shape(row)[::-1]}:
                yield Sublayer(path=child, input_projs=inputs, output_proj=row, inner_dim=tree.shape(row)[1])


def _inputs_apart(path: str, tree: ModelTree) -> tuple[str, ...]:
    """Return the linear layers of a module that owns queries, keys and values alone, or the first of an MLP."""
    layers = tuple(join(path, name) for name in sorted(tree.children_with_parameters(path)))
    if tree.own_parameters(path) or not all(map(tree.is_linear, layers)):
        return ()
    queries = [layer for layer in layers if QUERY_PROJECTION.fullmatch(leaf(layer))]
    others = [layer for layer in layers if KV_PROJECTION.fullmatch(leaf(layer))]
    is_attention = len(queries) == 1 and len(others) == 2 and len(layers) == 3
    return layers if is_attention or (leaf(path).startswith(_INTERMEDIATE) and len(layers) == 1) else ()


def _row(path: str, tree: ModelTree) -> str | None:
    """Return the one linear layer of a module that has a norm besides, or ``None``."""
    owners = [join(path, name) for name in tree.children_with_parameters(path)]
    layers = [owner for owner in owners if tree.is_linear(owner)]
    rest = [owner for owner in owners if owner not in layers]
    known = not tree.own_parameters(path) and all(map(tree.is_norm, rest))
    return layers[0] if known and len(layers) == 1 else None
