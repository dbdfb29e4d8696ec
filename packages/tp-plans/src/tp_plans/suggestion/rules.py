"""From what is known of a sub-layer to rules for it: split inside where that is certain, gathered where not.

A layer that is handed whole features and hands on whole features is right wherever it stands, whatever the code
around it does with them.  So nothing proposed here trains wrongly: what is not understood costs gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.layouts import Replicate
from tp_plans.module_attrs import getattr_path
from tp_plans.styles import (
    ColwiseParallel,
    GatheredParameters,
    NoParallel,
    ParallelAttention,
    PrepareModuleInput,
    RowwiseParallel,
    Style,
)
from tp_plans.suggestion.anatomy import Anatomy, is_norm, matrix, parameters_of
from tp_plans.suggestion.code import counts_used, first_argument, meets_features_together, names_read
from tp_plans.suggestion.roles import SubLayer, is_key_or_value, leaf

_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "d_kv")
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "num_q_heads")
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")


@dataclass(frozen=True)
class Doubt:
    """Something that a suggestion is unsure of: where, and what to look at."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


Proposal = tuple[dict[str, Style], list[Doubt]]


def rules_of(sub: SubLayer, anatomy: Anatomy) -> Proposal:
    """Rules for one sub-layer, by paths, and what is uncertain about them."""
    doubts = []
    if sub.by_name:
        doubts.append(Doubt(sub.writer, "taken for the layer that writes to the stream: shapes do not tell"))
    if "weight" in names_read(type(anatomy.modules[sub.path])):
        names = tuple(f"{leaf(layer)}.weight" for layer in (*sub.readers, *sub.others, sub.writer))
        what = "its code reads weights itself, so they are stored split and gathered for it: right, and no faster"
        return {sub.path: GatheredParameters(names=names)}, [Doubt(sub.path, what)]
    reason = _not_understood(sub, anatomy)
    if reason is None:
        is_attention = sub.is_named_attention or _counts_heads(anatomy.modules[sub.path])
        rules, more = (_attention if is_attention else _mlp)(sub, anatomy)
        if rules:
            return rules, [*doubts, *more]
        reason = more[0].what
    what = f"{reason}, so its layers are split and their features gathered: right, but with more to send"
    return gathered_rules(sub), [*doubts, Doubt(sub.path, what)]


def _counts_heads(module: Any) -> bool:
    return any(is_integer(getattr(module, name, None), least=1) for name in (*_HEAD_SIZES, *_HEAD_COUNTS))


def gathered_rules(sub: SubLayer) -> dict[str, Style]:
    """Rules that are right whatever the code around the layers does with their features."""
    columns: dict[str, Style] = dict.fromkeys((*sub.readers, *sub.others), ColwiseParallel(output_layouts=Replicate()))
    return {**columns, sub.writer: RowwiseParallel(input_layouts=Replicate())}


def _not_understood(sub: SubLayer, anatomy: Anatomy) -> str | None:
    """What else is in a sub-layer that might meet its split features."""
    if sub.others:
        return f"{', '.join(map(leaf, sub.others))} neither read the stream nor write to it"
    if own := parameters_of(anatomy.modules[sub.path]):
        return f"it has parameters of its own ({', '.join(own)})"
    known = {*sub.readers, sub.writer}
    unknown = [
        path
        for path in anatomy.below(sub.path)
        if path not in known and parameters_of(anatomy.modules[path]) and not _is_vector(anatomy.modules[path])
    ]
    if unknown:
        return f"nothing is known of {leaf(unknown[0])}"
    return None


def _is_vector(module: Any) -> bool:
    return all(len(parameter.shape) == 1 for parameter in parameters_of(module).values())


def _mlp(sub: SubLayer, anatomy: Anatomy) -> Proposal:
    widths = [matrix(anatomy.modules[reader])[0] for reader in sub.readers]
    if vectors := list(_vectors(sub, anatomy)):
        return {}, [Doubt(sub.path, f"{leaf(vectors[0])} may meet all features at once")]
    children = set(map(leaf, anatomy.children[sub.path]))
    if unknown := meets_features_together(anatomy.modules[sub.path], children):
        return {}, [Doubt(sub.path, f"its code uses {unknown}, which may meet all features at once")]
    rules: dict[str, Style] = {sub.path: _prepared(sub, anatomy)}
    if set(widths) == {sub.inner} and len(widths) <= 2:
        rules.update(dict.fromkeys(sub.readers, ColwiseParallel()))
    elif widths == [2 * sub.inner]:
        rules[sub.readers[0]] = ColwiseParallel(fused_sizes=(1, 1))
    else:
        told = ", ".join(map(str, widths))
        return {}, [Doubt(sub.path, f"layers of {told} features come before one that reads {sub.inner}")]
    rules[sub.writer] = RowwiseParallel()
    doubts = [Doubt(sub.readers[0], "taken for gate and up one after another; if they alternate, gather its output")]
    return rules, doubts if widths == [2 * sub.inner] else []


def _attention(sub: SubLayer, anatomy: Anatomy) -> Proposal:
    head = _head(sub, anatomy)
    if head is None:
        return {}, [Doubt(sub.path, "the size of its heads is not found")]
    unit, size = head
    widths = {reader: matrix(anatomy.modules[reader])[0] for reader in sub.readers}
    columns = _columns(sub, anatomy, unit, size, widths)
    if columns is None:
        told = ", ".join(map(str, widths.values()))
        return {}, [Doubt(sub.path, f"layers of {told} features, in heads of {size}, are not queries, keys and values")]
    norms: dict[str, Style] = {}
    for path in _vectors(sub, anatomy):
        if not is_norm(anatomy.modules[path], size):
            return {}, [Doubt(sub.path, f"{leaf(path)} is not over one head")]
        norms[path] = NoParallel(gradient="partial")
    counts = counts_used(anatomy.modules[sub.path], _countable(sub, widths, size))
    shared = _shared(sub, anatomy, columns)
    rules: dict[str, Style] = {
        sub.path: _prepared(sub, anatomy, counts, has_groups=bool(shared)),
        **columns,
        **shared,
        **norms,
        sub.writer: RowwiseParallel(multiple_of=unit),
    }
    doubts = [Doubt(sub.path, f"{', '.join(counts)} taken for what its ranks have parts of")] if counts else []
    if len(sub.readers) == 1:
        doubts.append(Doubt(sub.readers[0], "taken for queries, keys and values one after another; gather it if not"))
    return rules, doubts


def _columns(
    sub: SubLayer, anatomy: Anatomy, unit: int | str, size: int, widths: Mapping[str, int]
) -> dict[str, Style] | None:
    """The rules of queries, keys and values, apart or fused."""
    if any(width % size for width in (*widths.values(), sub.inner)):
        return None
    if len(widths) == 1:
        return _fused(sub, anatomy, unit, size, *widths.values())
    narrow = [width for width in widths.values() if width != sub.inner]
    if len(widths) < 3 or len(narrow) not in (0, 2) or len(set(narrow)) > 1 or max(widths.values()) > sub.inner:
        return None
    return dict.fromkeys(widths, ColwiseParallel(multiple_of=unit))


def _shared(sub: SubLayer, anatomy: Anatomy, columns: Mapping[str, Style]) -> dict[str, Style]:
    """The rules of keys and values whose heads ranks may share, where the module tells how they are grouped."""
    module = anatomy.modules[sub.path]
    defaults = ParallelAttention()
    if any(
        not is_integer(getattr_path(module, name), least=1)
        for name in (defaults.kv_groups_attr, defaults.kv_heads_attr)
    ):
        return {}
    return {
        path: replace(style, replicate_kv_heads=True)
        for path, style in columns.items()
        if isinstance(style, ColwiseParallel) and is_key_or_value(path) and not style.fused_sizes
    }


def _fused(sub: SubLayer, anatomy: Anatomy, unit: int | str, size: int, width: int) -> dict[str, Style] | None:
    kv, rest = divmod(width - sub.inner, 2)
    if kv <= 0 or rest or kv % size or sub.is_head_first:
        return None
    heads, kv_heads = sub.inner // size, kv // size
    module = anatomy.modules[sub.path]
    pieces = (_named(module, _HEAD_COUNTS, heads), *(_named(module, _KV_COUNTS, kv_heads),) * 2)
    return {sub.readers[0]: ColwiseParallel(multiple_of=unit, fused_sizes=(1, 1, 1) if heads == kv_heads else pieces)}


def _named(module: Any, names: tuple[str, ...], value: int) -> int | str:
    """The attribute of a module or its config that holds a number, or the number."""
    paths = (path for name in names for path in (name, f"config.{name}"))
    return next((path for path in paths if getattr_path(module, path) == value), value)


def _head(sub: SubLayer, anatomy: Anatomy) -> tuple[int | str, int] | None:
    """The size of a head, as a rule's unit and as a number."""
    module = anatomy.modules[sub.path]
    for name in _HEAD_SIZES:
        for path in (name, f"config.{name}"):
            size = getattr_path(module, path)
            if is_integer(size, least=1) and sub.inner % size == 0:
                return (path if "." not in path else size), size
    counts = (getattr_path(module, path) for name in _HEAD_COUNTS for path in (name, f"config.{name}"))
    heads = next((count for count in counts if is_integer(count, least=1) and sub.inner % count == 0), None)
    return None if heads is None else (sub.inner // heads, sub.inner // heads)


def _countable(sub: SubLayer, widths: Mapping[str, int], size: int) -> set[int]:
    """Numbers of what ranks get parts of: features and heads of queries, and of keys and values."""
    fused = [(width - sub.inner) // 2 for width in widths.values() if width > sub.inner]
    features = {sub.inner, *fused, *(width for width in widths.values() if width < sub.inner)}
    return features | {width // size for width in features}


def _vectors(sub: SubLayer, anatomy: Anatomy) -> Iterator[str]:
    known = {*sub.readers, sub.writer}
    for path in anatomy.below(sub.path):
        if path not in known and parameters_of(anatomy.modules[path]):
            yield path


def _prepared(
    sub: SubLayer, anatomy: Anatomy, counts: tuple[str, ...] = (), *, has_groups: bool = False
) -> PrepareModuleInput | ParallelAttention:
    argument = first_argument(anatomy.modules[sub.path])
    if counts or has_groups:
        return ParallelAttention(argument=argument, head_count_attrs=counts)
    return PrepareModuleInput(argument=argument)
