"""What a plan says of one module: which parameters are cut, and how activations enter and leave.

Styles are frozen data.  Each is right by itself: an activation that arrives as a plain tensor is read in the
style's ``input`` layout, one that arrives as a DTensor says itself how it lies and is redistributed as needed.
So a plan stays correct when a rule that merely saves communication (``PrepareInput``) is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tp_plans.errors import PlanError, UnknownStyleError
from tp_plans.fields import is_integer, is_name, require, require_flag, require_layout, require_unit
from tp_plans.layouts import Layout, Partial, Replicate, Shard, layout_from_str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColwiseParallel:
    """A linear layer whose output features (and bias) are split: ``[out, in]`` becomes ``[out / tp, in]``.

    The input is gathered where it is not whole; its gradient is summed over the axis.

    Args:
        output: layout of the output: ``Shard(-1)``, or ``Replicate()`` to gather the features.
        use_local_output: hand on this rank's plain tensor rather than a DTensor.
        unit: the features are split in whole multiples of this many: a number, or the name of an integer
            attribute of the parent module, as ``"head_dim"`` for a query projection.
    """

    output: Layout = Shard(-1)
    use_local_output: bool = True
    unit: int | str = 1

    def __post_init__(self) -> None:
        require_layout(self, "output")
        require_flag(self, "use_local_output")
        require_unit(self, "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowwiseParallel:
    """A linear layer whose input features are split: ``[out, in]`` becomes ``[out, in / tp]``.

    The ranks' partial outputs are summed.  A bias stays whole and is added once.

    Args:
        input: how a plain input tensor is read: ``Shard(-1)``, or ``Replicate()`` to cut it first.
        output: layout of the output: ``Replicate()``, ``Shard(dim)`` to reduce-scatter onto a dim, or
            ``Partial()`` to leave the sum to whoever adds more to it.
        use_local_output: hand on this rank's plain tensor rather than a DTensor.
        unit: the features are split in whole multiples of this many, as in ``ColwiseParallel``.
    """

    input: Layout = Shard(-1)
    output: Layout = Replicate()
    use_local_output: bool = True
    unit: int | str = 1

    def __post_init__(self) -> None:
        # A plain tensor tells nothing of the other ranks' sizes, so a cut of any other dim could not be read.
        require(self, "input", self.input in (Shard(-1), Replicate()), "Shard(-1) or Replicate()")
        require_layout(self, "output", Replicate, Shard, Partial)
        require_flag(self, "use_local_output")
        require_unit(self, "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabParallelEmbedding:
    """An embedding table split on the vocabulary: ``[vocab, hidden]`` becomes ``[vocab / tp, hidden]``.

    A rank looks up the ids that it holds, gives zeros for the others, and the ranks' outputs are summed.  Each
    rank's gradient is its own slice of the table.  Source: Megatron-LM (arXiv:1909.08053), section 3.

    Args:
        output: layout of the output: ``Replicate()``, or ``Shard(dim)`` to reduce-scatter onto a dim.
        use_local_output: hand on this rank's plain tensor rather than a DTensor.
    """

    output: Layout = Replicate()
    use_local_output: bool = True

    def __post_init__(self) -> None:
        require_layout(self, "output")
        require_flag(self, "use_local_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """A norm (or other map of single tokens) that runs on this rank's part of the sequence.

    Parameters stay whole on every rank and their gradients are summed over the axis.  A plain input is read as
    the whole sequence and cut; the output is a DTensor, so that model code sees the full length.  Source:
    Korthikanti et al., arXiv:2205.05198.

    Args:
        sequence_dim: the dim of ``[batch, seq, hidden]`` that is cut.
    """

    sequence_dim: int = 1

    def __post_init__(self) -> None:
        require(self, "sequence_dim", is_integer(self.sequence_dim), "an integer, as 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A module that every rank holds whole.

    Args:
        gradient: ``"full"`` where each rank sees the whole activation and so computes the whole gradient;
            ``"partial"`` where it sees only its part (a norm over this rank's attention heads), so that the
            ranks' gradients must be summed.
    """

    gradient: Literal["full", "partial"] = "full"

    def __post_init__(self) -> None:
        require(self, "gradient", self.gradient in ("full", "partial"), "'full' or 'partial'")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareInput:
    """Brings one argument of a module to ``layout`` as a DTensor, once for all the layers inside.

    Before column-wise layers it merges communication: one gather forward and one gradient reduction backward
    instead of one per projection.

    Args:
        layout: the layout wanted.
        argument: the keyword under which the tensor may be passed; an argument that is absent or ``None`` is
            left alone.
        position: its place where it is passed by position, or ``None`` for a keyword-only argument.
    """

    layout: Layout = Replicate()
    argument: str = "hidden_states"
    position: int | None = 0

    def __post_init__(self) -> None:
        require_layout(self, "layout")
        require(self, "argument", is_name(self.argument), "the keyword's name, as 'hidden_states'")
        require(self, "position", self.position is None or is_integer(self.position, least=0), "0 or more, or None")


Style = ColwiseParallel | RowwiseParallel | VocabParallelEmbedding | SequenceParallel | Replicated | PrepareInput

_STYLES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Style)}
_LAYOUT_FIELDS = ("input", "output", "layout")


def parameter_layout(style: Style | None, ndim: int) -> Layout | None:
    """How a style lays its module's parameter of ``ndim`` dims over the axis; ``None`` where it leaves it alone."""
    match style:
        case None | PrepareInput():
            return None
        case ColwiseParallel() | VocabParallelEmbedding():
            return Shard(0)
        case RowwiseParallel():
            return Shard(1) if ndim > 1 else Replicate()
        case _:
            return Replicate()


def style_to_dict(style: Style) -> dict[str, Any]:
    """A style as JSON-ready data: its name under ``"style"`` and the fields that differ from their defaults."""
    data: dict[str, Any] = {"style": type(style).__name__}
    for field in dataclasses.fields(style):
        value = getattr(style, field.name)
        if value != field.default:
            data[field.name] = str(value) if isinstance(value, (Replicate, Shard, Partial)) else value
    return data


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
    return cls(**fields)  # type: ignore[no-any-return]
