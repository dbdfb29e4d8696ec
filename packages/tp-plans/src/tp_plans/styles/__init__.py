"""What a plan says of one module: which parameters are cut, and how activations enter and leave.

Styles are frozen data.  Each is right by itself: an activation that arrives as a plain tensor is read in the
style's ``input`` layout, one that arrives as a DTensor says itself how it lies and is redistributed as needed.
So a plan stays correct when a rule that merely saves communication (``PrepareInput``) is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from tp_plans.errors import PlanError, UnknownStyleError
from tp_plans.layouts import Layout, Partial, Replicate, Shard, layout_from_str
from tp_plans.styles.embedding import FeatureParallelEmbedding, VocabParallelEmbedding
from tp_plans.styles.experts import DividedInput, ExpertsParallel, SumOutput
from tp_plans.styles.linear import ColwiseParallel, LatentProjection, RowwiseParallel
from tp_plans.styles.stream import ParallelAttention, PrepareInput, WholeSequence
from tp_plans.styles.whole import BareParameter, GatheredParameters, Replicated, SequenceParallel

__all__ = [
    "BareParameter",
    "ColwiseParallel",
    "DividedInput",
    "ExpertsParallel",
    "FeatureParallelEmbedding",
    "GatheredParameters",
    "LatentProjection",
    "ParallelAttention",
    "PrepareInput",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "Style",
    "SumOutput",
    "VocabParallelEmbedding",
    "WholeSequence",
    "parameter_layout",
    "style_from_dict",
    "style_to_dict",
]

Style = (
    ColwiseParallel
    | RowwiseParallel
    | LatentProjection
    | VocabParallelEmbedding
    | FeatureParallelEmbedding
    | ExpertsParallel
    | DividedInput
    | SumOutput
    | BareParameter
    | GatheredParameters
    | SequenceParallel
    | Replicated
    | PrepareInput
    | ParallelAttention
    | WholeSequence
)

_STYLES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Style)}
_LAYOUT_FIELDS = ("input", "output", "layout")
_TUPLE_FIELDS = ("pieces", "counts", "names")


def parameter_layout(style: Style | None, ndim: int) -> Layout | None:
    """How a style lays its module's parameter of ``ndim`` dims over the axis; ``None`` where it leaves it alone."""
    match style:
        case WholeSequence(around=around):
            return parameter_layout(around, ndim)
        case None | PrepareInput() | ParallelAttention():
            return None
        case GatheredParameters() | SumOutput() | DividedInput():
            return None
        case ColwiseParallel() | LatentProjection() | VocabParallelEmbedding() | ExpertsParallel():
            return Shard(0)
        case RowwiseParallel() | FeatureParallelEmbedding():
            return Shard(1) if ndim > 1 else Replicate()
        case BareParameter(layout=layout):
            return layout
        case _:
            return Replicate()


def style_to_dict(style: Style) -> dict[str, Any]:
    """A style as JSON-ready data: its name under ``"style"`` and the fields that differ from their defaults."""
    data: dict[str, Any] = {"style": type(style).__name__}
    for field in dataclasses.fields(style):
        value = getattr(style, field.name)
        if value != field.default:
            data[field.name] = _plain(value)
    return data


def _plain(value: object) -> object:
    if isinstance(value, (Replicate, Shard, Partial)):
        return str(value)
    if isinstance(value, Style):
        return style_to_dict(value)
    return list(value) if isinstance(value, tuple) else value


def style_from_dict(data: Mapping[str, Any]) -> Style:
    """The inverse of :func:`style_to_dict`.

    Raises:
        UnknownStyleError: ``data["style"]`` names no style.
        PlanError: a field is unknown to the style or holds a value of the wrong kind.
    """
    fields = dict(data)
    name = fields.pop("style", None)
    cls = _STYLES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise UnknownStyleError(f"{name!r} is not a style: known are {', '.join(sorted(_STYLES))}")
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(fields) - known):
        raise PlanError(f"{name} has no field {', '.join(unknown)}: its fields are {', '.join(sorted(known))}")
    for field in _LAYOUT_FIELDS:
        if isinstance(fields.get(field), str):
            fields[field] = layout_from_str(fields[field])
    for field in _TUPLE_FIELDS:
        if isinstance(fields.get(field), list):
            fields[field] = tuple(fields[field])
    if isinstance(around := fields.get("around"), Mapping):
        if "around" in around:  # nothing that may stand there has one, and data could go on for ever
            raise PlanError(f"{name}.around has an 'around' of its own: write a style that stands for itself")
        fields["around"] = style_from_dict(around)
    return cls(**fields)  # type: ignore[no-any-return]
