"""Shard attention by heads, and replicate key/value heads on the ranks that share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import tp_plans.naming as naming
from tp_plans._validate import is_integer
from tp_plans.layouts import Layout, Shard
from tp_plans.model_tree import ModelTree, join, parent
from tp_plans.module_attrs import getattr_path
from tp_plans.planned_tree import PlannedTree, merge_per_block
from tp_plans.styles import ColwiseParallel, NoParallel, ParallelAttention, ParameterStyle, RowwiseParallel, Style

#: The attributes that give the number of key/value heads.
_KV_HEADS = (naming.KV_HEAD_COUNTS[0], f"config.{naming.KV_HEAD_COUNTS[0]}")


def split_in_heads(planned: PlannedTree, root: str) -> Mapping[str, Style | None]:
    """Return the rules of layers with heads as features, with the size of a head; one per path if sizes differ."""
    sized: dict[str, dict[str, Style]] = defaultdict(dict)
    for path, style in planned.styled_modules():
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)) or style.multiple_of != 1:
            continue
        is_row = isinstance(style, RowwiseParallel)
        if style.input_layouts == Shard(-1) if is_row else planned.outputs_local_shard(path):  # else it is gathered
            head = _head_features(path, style, planned)
            sized[planned.rules[path][0]][path] = style if head is None else replace(style, multiple_of=head)
    rules: dict[str, Style | None] = {}
    for rule, places in sized.items():
        rules |= {rule: None, **places} if len(set(places.values())) > 1 else {rule: next(iter(places.values()))}
    return rules


def _head_features(path: str, style: ColwiseParallel | RowwiseParallel, planned: PlannedTree) -> int | str | None:
    above = planned.modules.get(parent(path))
    features = planned.tree.size(path, 1 if isinstance(style, RowwiseParallel) else 0)
    heads = getattr(above, naming.MLA_HEADS, None)
    if is_integer(getattr(above, naming.MLA_ROPE_DIM, None)) and is_integer(heads, least=1) and features is not None:
        return features // heads if features % heads == 0 else None  # queries, keys with values, outputs differ in size
    head_dim = getattr(above, naming.HEAD_DIM, None)
    if not is_integer(head_dim, least=1):
        return _interleaved_features(path, style, features, planned)
    size = head_dim
    if naming.leaf(path) in (naming.VALUE, *naming.ATTENTION_OUTPUTS):
        size = _value_features(parent(path), head_dim, planned.tree) or head_dim
    if features is not None and features % size:
        return None
    return naming.HEAD_DIM if size == head_dim else size


def _interleaved_features(
    path: str, style: ColwiseParallel | RowwiseParallel, features: int | None, planned: PlannedTree
) -> int | None:
    """Return the features of a head in a fused projection with interleaved query, key and value (GPT-NeoX)."""
    above = parent(path)
    sizes = (getattr(planned.modules.get(above), name, None) for name in naming.HEAD_DIMS)
    size = next(filter(is_integer, sizes), None)
    fused = any(naming.INTERLEAVED_QKV.search(naming.leaf(child)) for child in planned.children.get(above, ()))
    if size is None or features is None or not fused:
        return None
    unit: int = size if isinstance(style, RowwiseParallel) else 3 * size
    return unit if unit and features % unit == 0 else None


def _value_features(attention: str, head_dim: int, tree: ModelTree) -> int | None:
    """Return the features of one head of the values, if keys and values have one number of heads."""
    keys, values = (tree.size(join(attention, name), 0) for name in (naming.KEY, naming.VALUE))
    if not keys or not values or keys % head_dim or values % (keys // head_dim):
        return None
    return values // (keys // head_dim)


def with_replicated_kv_heads(planned: PlannedTree, root: str) -> Mapping[str, Style]:
    """Return rules that let the axis be larger than the number of key/value heads, and set the groups."""
    changed: dict[str, Style] = {}
    attention: list[tuple[str, Style]] = []
    for path, kv_heads in _attention_in_heads(planned, root):
        own = planned.style(path)
        if own is not None and not isinstance(own, ParallelAttention):
            continue
        for rule in (planned.rule(join(path, name)) for name in (naming.KEY, naming.VALUE)):
            if rule is not None and isinstance(style := planned.plan[rule], ColwiseParallel) and style.multiple_of != 1:
                changed[rule] = replace(style, replicate_kv_heads=True)
        prepared = own if isinstance(own, ParallelAttention) else ParallelAttention(layout=_layout(path, planned))
        attention.append((path, replace(prepared, kv_heads_attr=kv_heads)))
    return {**changed, **merge_per_block(attention, planned.tree)}


def _attention_in_heads(planned: PlannedTree, root: str) -> Iterator[tuple[str, str]]:
    """Yield the layers with split queries, keys and values, and the attribute that counts their key heads."""
    # Layers of these classes without keys and values read another layer's, and ranks may share them.
    without: list[tuple[str, str]] = []
    classes: set[type] = set()
    for path, module in planned.within(root):
        kv_heads = next((name for name in _KV_HEADS if is_integer(getattr_path(module, name), least=1)), None)
        split = set(planned.split_children(path))
        if kv_heads is None or naming.QUERY not in split:
            continue
        if set(naming.QKV) <= split:
            classes.add(type(module))
            yield path, kv_heads
        elif planned.modules.keys().isdisjoint((join(path, naming.KEY), join(path, naming.VALUE))):
            without.append((path, kv_heads))
    yield from ((path, kv_heads) for path, kv_heads in without if type(planned.modules[path]) in classes)


def per_head_norms(planned: PlannedTree, root: str) -> Mapping[str, Style]:
    """Return rules for norms of single heads: a norm with a row for each head is sharded as the heads are."""
    rows: list[tuple[str, Style]] = []
    for path, module in planned.within(root):
        if naming.QUERY not in planned.split_children(path):
            continue
        for norm in (join(path, name) for name in naming.HEAD_NORMS):
            head_dim = getattr(module, naming.HEAD_DIM, None)
            if norm not in planned.modules or planned.style(norm) is not None:
                continue
            if planned.tree.size(norm, 1) == head_dim is not None:
                rows.append((f"{norm}.weight", ParameterStyle()))
            elif planned.tree.is_scale(norm, head_dim):
                rows.append((norm, NoParallel(gradient="partial")))
    return merge_per_block(rows, planned.tree)


def _layout(path: str, planned: PlannedTree) -> Layout | None:
    """Return the layout that gathers the input once for all projections, if nothing else in the layer could read it."""
    if planned.tree.own_parameters(path):  # its own code may use them on the input
        return None
    names = planned.tree.children_with_parameters(path)
    return ParallelAttention().layout if all(planned.style(join(path, name)) for name in names) else None
