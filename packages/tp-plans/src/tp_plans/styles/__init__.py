"""The styles of modules: how parameters are sharded, and the layouts of inputs and outputs.

Styles are frozen data.  Each is correct on its own: a plain tensor is read in the style's ``input_layouts``, and a
DTensor is redistributed from its own placements as needed.  So a plan stays correct without a rule that only saves
communication (``PrepareModuleInput``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from tp_plans.errors import PlanError, UnknownStyleError
from tp_plans.layouts import Layout, Partial, Replicate, Shard, layout_from_str
from tp_plans.styles.activations import GatherSequence, ParallelAttention, PrepareModuleInput
from tp_plans.styles.embedding import ColwiseEmbedding, VocabParallelEmbedding
from tp_plans.styles.experts import AllReduceOutput, DispatchExperts, ExpertsParallel, ScaleInput
from tp_plans.styles.linear import ColwiseParallel, MLAKVProjection, RowwiseParallel
from tp_plans.styles.replicated import GatheredParameters, NoParallel, ParameterStyle, SequenceParallel

__all__ = ["AllReduceOutput", "ColwiseEmbedding", "ColwiseParallel", "DispatchExperts", "ExpertsParallel"]
__all__ += ["GatherSequence", "GatheredParameters", "MLAKVProjection", "NoParallel", "ParallelAttention"]
__all__ += ["ParameterStyle", "PrepareModuleInput", "RowwiseParallel", "ScaleInput", "SequenceParallel"]
__all__ += ["Style", "VocabParallelEmbedding", "parameter_layout", "style_from_dict", "style_to_dict"]

_Sharded = ColwiseParallel | RowwiseParallel | MLAKVProjection | VocabParallelEmbedding | ColwiseEmbedding
_Experts = ExpertsParallel | DispatchExperts | ScaleInput | AllReduceOutput
_Replicated = ParameterStyle | GatheredParameters | SequenceParallel | NoParallel
Style = _Sharded | _Experts | _Replicated | PrepareModuleInput | ParallelAttention | GatherSequence

_STYLES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Style)}
_LAYOUT_FIELDS = ("input_layouts", "output_layouts", "layout")
_TUPLE_FIELDS = ("fused_sizes", "head_count_attrs", "names")


def parameter_layout(style: Style | None, ndim: int) -> Layout | None:
    """Return the layout that a style gives its module's parameter of ``ndim`` dims; ``None`` if it leaves it alone."""
    match style:
        case GatherSequence(inner=inner):
            return parameter_layout(inner, ndim)
        case None | PrepareModuleInput() | ParallelAttention():
            return None
        case GatheredParameters() | AllReduceOutput() | ScaleInput():
            return None
        case ColwiseParallel() | MLAKVProjection() | VocabParallelEmbedding() | ExpertsParallel() | DispatchExperts():
            return Shard(0)
        case RowwiseParallel() | ColwiseEmbedding():
            return Shard(1) if ndim > 1 else Replicate()
        case ParameterStyle(layout=layout):
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
    if isinstance(inner := fields.get("inner"), Mapping):
        if "inner" in inner:  # nothing that may stand there has one, and data could go on for ever
            raise PlanError(f"{name}.inner has an 'inner' too: write a style without one")
        fields["inner"] = style_from_dict(inner)
    return cls(**fields)  # type: ignore[no-any-return]
