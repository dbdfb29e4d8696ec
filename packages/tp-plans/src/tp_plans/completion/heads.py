"""Attention split in whole heads, and key/value heads shared by the ranks that need them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from tp_plans._validate import is_integer
from tp_plans.completion.tree import HEAD_NORMS, Tree, agreed, is_split, parameters_of, size_of
from tp_plans.layouts import Shard
from tp_plans.module_attrs import getattr_path
from tp_plans.styles import ColwiseParallel, ParallelAttention, ParameterStyle, RowwiseParallel, Style

KV_HEADS = ("num_key_value_heads", "config.num_key_value_heads")


def in_whole_heads(tree: Tree) -> Mapping[str, Style | None]:
    """The rules of layers whose features are heads, with the size of a head; a rule for each where sizes differ."""
    sized: dict[str, dict[str, Style]] = defaultdict(dict)
    for path in tree.modules:
        if _is_in_heads(style := tree.style(path)) and (rule := tree.rule(path)) is not None:
            unit = _unit(path, style, tree)
            sized[rule][path] = style if unit is None else replace(style, multiple_of=unit)
    rules: dict[str, Style | None] = {}
    for rule, places in sized.items():
        rules |= {rule: None, **places} if len(set(places.values())) > 1 else {rule: next(iter(places.values()))}
    return rules


def _is_in_heads(style: Style | None) -> TypeGuard[ColwiseParallel | RowwiseParallel]:
    """Whether a layer may be one whose ranks hold whole heads: what is gathered, or cut only here, need not be."""
    if isinstance(style, RowwiseParallel):
        return style.input_layouts == Shard(-1) and style.multiple_of == 1
    return is_split(style) and style.multiple_of == 1


def _unit(path: str, style: ColwiseParallel | RowwiseParallel, tree: Tree) -> int | str | None:
    parent = tree.modules.get(path.rpartition(".")[0])
    size = size_of(tree.modules[path], 1 if isinstance(style, RowwiseParallel) else 0)
    heads = getattr(parent, "num_heads", None)
    if is_integer(getattr(parent, "qk_rope_head_dim", None)) and is_integer(heads, least=1) and size is not None:
        return size // heads if size % heads == 0 else None  # queries, keys with values, and outputs differ in size
    head = getattr(parent, "head_dim", None)
    if not is_integer(head, least=1) or (size is not None and size % head):
        return None
    return "head_dim"


def with_shared_heads(tree: Tree) -> Mapping[str, Style]:
    """Rules that let the axis be larger than the number of key/value heads, and the attention know its groups."""
    changed: dict[str, Style] = {}
    attention = []
    for path, module in tree.inside():
        split = set(tree.split_children(path))
        kv_heads = next((name for name in KV_HEADS if is_integer(getattr_path(module, name), least=1)), None)
        if not {"q_proj", "k_proj", "v_proj"} <= split or kv_heads is None:
            continue
        own = tree.style(path)
        if own is not None and not isinstance(own, ParallelAttention):
            continue
        for name in ("k_proj", "v_proj"):
            rule = tree.rule(f"{path}.{name}")
            if rule is not None and isinstance(style := tree.plan[rule], ColwiseParallel) and style.multiple_of != 1:
                changed[rule] = replace(style, replicate_kv_heads=True)
        style = own if isinstance(own, ParallelAttention) else ParallelAttention(layout=_layout(path, tree))
        attention.append((path, replace(style, kv_heads_attr=kv_heads)))
    return {**changed, **agreed(attention, tree)}


def norms_of_every_head(tree: Tree) -> Mapping[str, Style]:
    """Rules for norms that have a row for each head, which is split as the heads are."""
    rows = []
    for path, module in tree.inside():
        if "q_proj" not in tree.split_children(path):
            continue
        for name in HEAD_NORMS:
            weight = parameters_of(tree.modules.get(f"{path}.{name}")).get("weight")
            in_heads = weight is not None and weight.ndim == 2 and weight.shape[1] == getattr(module, "head_dim", None)
            if in_heads and tree.style(f"{path}.{name}") is None:
                rows.append((f"{path}.{name}.weight", ParameterStyle()))
    return agreed(rows, tree)


def _layout(path: str, tree: Tree) -> Any:
    """Gather the input once for all projections where nothing else in the layer could read it."""
    if parameters_of(tree.modules[path]):  # of which its own code may use some on the input
        return None
    return ParallelAttention().layout if all(tree.style(f"{path}.{n}") for n in tree.filled(path)) else None
