"""Propose rules for a sub-layer: sharded inside if that is certain, else gathered.

A layer that reads and outputs full features is right for any code around it.  So no proposal trains wrongly: an unknown
sub-layer costs gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tp_plans import styles
from tp_plans._validate import is_integer
from tp_plans.infer.bytecode import counts_used, first_argument, non_elementwise_op, reads_weights
from tp_plans.infer.full_output import is_tied
from tp_plans.infer.stored_parameters import MIN_ROWS
from tp_plans.infer.sublayers import Sublayer, rules_for
from tp_plans.layouts import Replicate, Shard
from tp_plans.model_tree import ModelTree, join
from tp_plans.module_attrs import getattr_path
from tp_plans.naming import HEAD_COUNTS, HEAD_DIMS, KV_HEAD_COUNTS, KV_PROJECTION, MLA_HEADS, leaf
from tp_plans.patterns import wildcard


@dataclass(frozen=True)
class Doubt:
    """A doubt about a suggestion: the place, and the assumption to verify."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


Proposal = tuple[dict[str, styles.Style], list[Doubt]]


def propose(sub: Sublayer, tree: ModelTree) -> Proposal:
    """Return the rules for one sub-layer, by path, and the doubts about them."""
    doubts = []
    if sub.guessed_by_name:
        what = "assumed to be the output projection by its name, since the shapes are ambiguous"
        doubts.append(Doubt(sub.output_proj, what))
    if sub.is_apart:
        doubts.append(Doubt(sub.output_proj, f"assumed to read the output of {wildcard(sub.path)} only"))
    if reads_weights(type(tree.modules[sub.path])):
        what = "its code reads weights, so they are stored sharded and gathered for it: correct, but not faster"
        return stored_rules(sub.path, tree), [Doubt(sub.path, what)]
    try:
        _require_known_parts(sub, tree)
        rules, more = _rules_of_kind(sub, tree)
    except _NotUnderstoodError as reason:
        what = f"{reason}, so its layers are sharded and their outputs gathered: correct, but with more communication"
        return gathered_rules(sub), [*doubts, Doubt(sub.path, what)]
    return rules, [*doubts, *more]


class _NotUnderstoodError(Exception):
    """A sub-layer cannot be sharded inside: parts of it may meet its sharded features."""


def _rules_of_kind(sub: Sublayer, tree: ModelTree) -> Proposal:
    if sub.mla_kv_down is not None:
        return _latent_attention(sub, tree)
    module = tree.modules[sub.path]
    counts_heads = any(is_integer(getattr(module, name, None), least=1) for name in (*HEAD_DIMS, *HEAD_COUNTS))
    return _attention(sub, tree) if sub.is_named_attention or counts_heads else _mlp(sub, tree)


def gathered_rules(sub: Sublayer) -> dict[str, styles.Style]:
    """Return rules that are right for any code around the layers."""
    columns: dict[str, styles.Style] = dict.fromkeys(
        (*sub.input_projs, *sub.other_linears), styles.ColwiseParallel(output_layouts=Replicate())
    )
    return {**columns, sub.output_proj: styles.RowwiseParallel(input_layouts=Replicate())}


def stored_rules(path: str, tree: ModelTree, *, deep: bool = False) -> dict[str, styles.Style]:
    """Return a rule that stores the matrices of a module sharded and gathers them for its code."""
    # ``deep`` takes the matrices of all modules below, not only the module's and its children's.
    below = tree.below(path) if deep else tree.children[path]
    owners = [path, *(module for module in below if deep or not tree.is_expert_stack(module))]
    shapes = {join(owner, name): p.shape for owner in owners for name, p in tree.own_parameters(owner).items()}
    matrices = (name for name, shape in shapes.items() if len(shape) > 1 and shape[0] >= MIN_ROWS)
    names = tuple(name.removeprefix(f"{path}.") for name in matrices)
    return {path: styles.GatheredParameters(names=names)} if names else {}


def _require_known_parts(sub: Sublayer, tree: ModelTree) -> None:
    if sub.other_linears and sub.mla_kv_down is None:
        names = ", ".join(map(leaf, sub.other_linears))
        raise _NotUnderstoodError(f"{names} neither read nor write the hidden states")
    if own := tree.own_parameters(sub.path):
        raise _NotUnderstoodError(f"it has direct parameters ({', '.join(own)})")
    known = {*sub.input_projs, *sub.other_linears, sub.output_proj, *_head_tables(sub, tree)}
    for path in tree.below(sub.path):
        parameters = tree.own_parameters(path).values()
        if path not in known and any(len(parameter.shape) != 1 for parameter in parameters):
            raise _NotUnderstoodError(f"{leaf(path)} is unknown")


def _mlp(sub: Sublayer, tree: ModelTree) -> Proposal:
    widths = [tree.shape(reader)[0] for reader in sub.input_projs]
    if vectors := list(_other_parameters(sub, tree)):
        raise _NotUnderstoodError(f"{leaf(vectors[0])} may need all features")
    children = set(map(leaf, tree.children[sub.path]))
    if unknown := non_elementwise_op(tree.modules[sub.path], children):
        raise _NotUnderstoodError(f"its code uses {unknown}, which may need all features")
    is_fused = widths == [2 * sub.inner_dim]
    if not is_fused and (set(widths) != {sub.inner_dim} or len(widths) > 2):
        features = ", ".join(map(str, widths))
        raise _NotUnderstoodError(f"input projections of {features} features precede one that reads {sub.inner_dim}")
    rules = {sub.path: _input_style(sub, tree), **rules_for(replace(sub, fused_sizes=(1, 1) if is_fused else ()))}
    what = "assumed to be gate and up, concatenated; if they are interleaved, gather its output"
    return rules, [Doubt(sub.input_projs[0], what)] if is_fused else []


def _attention(sub: Sublayer, tree: ModelTree) -> Proposal:
    head = _head(sub, tree)
    if head is None:
        raise _NotUnderstoodError("its head size is unknown")
    unit, size = head
    if sub.is_apart:  # the module with the output projection has no attribute of that name
        unit = size
    widths = {reader: tree.shape(reader)[0] for reader in sub.input_projs}
    fused_sizes = _fused_sizes(sub, tree, size, widths)
    if fused_sizes is None:
        features = ", ".join(map(str, widths.values()))
        raise _NotUnderstoodError(
            f"projections of {features} features, in heads of {size}, are not queries, keys and values"
        )
    tables = _head_tables(sub, tree)
    norms = tuple(path for path in _other_parameters(sub, tree) if path not in tables)
    if other := next((path for path in norms if not tree.is_scale(path, size)), None):
        raise _NotUnderstoodError(f"{leaf(other)} is not over one head")
    split = rules_for(replace(sub, head_norms=norms, fused_sizes=fused_sizes), multiple_of=unit)
    counts = counts_used(tree.modules[sub.path], _per_rank_sizes(sub, widths, size))
    replicated = _replicated_kv(sub, tree, split)
    rules: dict[str, styles.Style] = {
        sub.path: _input_style(sub, tree, counts, has_groups=bool(replicated)),
        **split,
        **replicated,
        **dict.fromkeys(tables, styles.ColwiseEmbedding(output_layouts=Shard(-1))),
    }
    doubts = [Doubt(sub.path, f"treating {', '.join(counts)} as per-rank counts")] if counts else []
    if len(sub.input_projs) == 1:
        what = "assumed to be queries, keys and values, concatenated; if not, gather its output"
        doubts.append(Doubt(sub.input_projs[0], what))
    return rules, doubts


def _latent_attention(sub: Sublayer, tree: ModelTree) -> Proposal:
    """Return the rules of latent attention: one number of heads, and three sizes of head."""
    heads = int(getattr(tree.modules[sub.path], MLA_HEADS))
    features: dict[str, int] = {path: tree.shape(path)[0] for path in sub.input_projs}
    features[sub.output_proj] = sub.inner_dim
    if odd := next((path for path, width in features.items() if width % heads), None):
        raise _NotUnderstoodError(f"{leaf(odd)} has {features[odd]} features for {heads} heads")
    split = rules_for(sub)
    for path, style in split.items():
        if isinstance(style, (styles.ColwiseParallel, styles.RowwiseParallel)):
            split[path] = replace(style, multiple_of=features[path] // heads)
    counts = counts_used(tree.modules[sub.path], {heads, *features.values()})
    doubts = [Doubt(sub.path, f"treating {', '.join(counts)} as per-rank counts")] if counts else []
    own: dict[str, styles.Style] = {sub.path: _input_style(sub, tree, counts)} if counts else {}
    latents = dict.fromkeys(sub.other_linears, styles.ColwiseParallel(output_layouts=Replicate()))
    return {**own, **latents, **split}, doubts


def _fused_sizes(sub: Sublayer, tree: ModelTree, size: int, widths: Mapping[str, int]) -> tuple[int | str, ...] | None:
    """Return the sizes of fused queries, keys and values; ``()`` for separate ones, else ``None``."""
    if any(width % size for width in (*widths.values(), sub.inner_dim)):
        return None
    if len(widths) == 1:
        return _sizes_of_one(sub, tree, size, *widths.values())
    narrow = [width for width in widths.values() if width != sub.inner_dim]
    if len(widths) < 3 or len(narrow) not in (0, 2) or len(set(narrow)) > 1 or max(widths.values()) > sub.inner_dim:
        return None
    return ()


def _replicated_kv(sub: Sublayer, tree: ModelTree, rules: Mapping[str, styles.Style]) -> dict[str, styles.Style]:
    """Return the rules of keys and values with heads that ranks may share, if the module has its group counts."""
    module = tree.modules[sub.path]
    attention = styles.ParallelAttention()
    for name in (attention.kv_groups_attr, attention.kv_heads_attr):
        if not is_integer(getattr_path(module, name), least=1):
            return {}
    return {
        path: replace(style, replicate_kv_heads=True)
        for path, style in rules.items()
        if isinstance(style, styles.ColwiseParallel) and KV_PROJECTION.fullmatch(leaf(path)) and not style.fused_sizes
    }


def _sizes_of_one(sub: Sublayer, tree: ModelTree, size: int, width: int) -> tuple[int | str, ...] | None:
    kv, rest = divmod(width - sub.inner_dim, 2)
    if kv <= 0 or rest or kv % size or sub.is_interleaved:
        return None
    heads, kv_heads = sub.inner_dim // size, kv // size
    if heads == kv_heads:
        return (1, 1, 1)
    module = tree.modules[sub.path]
    return (_named(module, HEAD_COUNTS, heads), *(_named(module, KV_HEAD_COUNTS, kv_heads),) * 2)


def _named(module: Any, names: tuple[str, ...], value: int) -> int | str:
    """Return the attribute of a module or its config that holds a number, or the number."""
    paths = (path for name in names for path in (name, f"config.{name}"))
    return next((path for path in paths if getattr_path(module, path) == value), value)


def _head(sub: Sublayer, tree: ModelTree) -> tuple[int | str, int] | None:
    """Return the size of a head, as a rule's ``multiple_of`` and as a number."""
    module = tree.modules[sub.path]
    for name in HEAD_DIMS:
        for path in (name, f"config.{name}"):
            size = getattr_path(module, path)
            if is_integer(size, least=1) and sub.inner_dim % size == 0:
                return (path if "." not in path else size), size
    counts = (getattr_path(module, path) for name in HEAD_COUNTS for path in (name, f"config.{name}"))
    heads = next((count for count in counts if is_integer(count, least=1) and sub.inner_dim % count == 0), None)
    return (sub.inner_dim // heads, sub.inner_dim // heads) if heads and sub.inner_dim else None


def _head_tables(sub: Sublayer, tree: ModelTree) -> tuple[str, ...]:
    """Return the tables with one feature a head: the relative position biases of T5 (arXiv:1910.10683)."""
    head = _head(sub, tree)
    heads = 0 if head is None else sub.inner_dim // head[1]
    tables = (path for path in tree.children[sub.path] if tree.is_embedding(path) and not is_tied(path, tree))
    return tuple(path for path in tables if tree.size(path, 1) == heads > 1)


def _per_rank_sizes(sub: Sublayer, widths: Mapping[str, int], size: int) -> set[int]:
    """Return the sizes that are sharded over ranks: features and heads of queries, and of keys and values."""
    fused = [(width - sub.inner_dim) // 2 for width in widths.values() if width > sub.inner_dim]
    features = {sub.inner_dim, *fused, *(width for width in widths.values() if width < sub.inner_dim)}
    return features | {width // size for width in features}


def _other_parameters(sub: Sublayer, tree: ModelTree) -> Iterator[str]:
    known = {*sub.input_projs, sub.output_proj}
    for path in tree.below(sub.path):
        if path not in known and tree.own_parameters(path):
            yield path


def _input_style(
    sub: Sublayer, tree: ModelTree, counts: tuple[str, ...] = (), *, has_groups: bool = False
) -> styles.PrepareModuleInput | styles.ParallelAttention:
    argument = first_argument(tree.modules[sub.path])
    if counts or has_groups:
        return styles.ParallelAttention(argument=argument, head_count_attrs=counts)
    return styles.PrepareModuleInput(argument=argument)
