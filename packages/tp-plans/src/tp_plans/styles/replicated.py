"""Styles for replicated modules and for bare parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tp_plans._validate import is_integer
from tp_plans.layouts import Layout, Shard
from tp_plans.styles.fields import require, require_attributes, require_flag, require_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class NoParallel:
    """A replicated module.

    Args:
        gradient: ``"full"`` where each rank sees the full activation and so computes the full gradient;
            ``"partial"`` where it sees only its part (a norm over this rank's attention heads), so that the
            ranks' gradients must be summed.
    """

    gradient: Literal["full", "partial"] = "full"

    def __post_init__(self) -> None:
        require(self, "gradient", self.gradient in ("full", "partial"), "'full' or 'partial'")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """A norm (or other map of single tokens) that runs on this rank's part of the sequence.

    Parameters are replicated and their gradients are summed over the axis.  A plain input is read as
    the full sequence and sharded; the output is a DTensor, so that model code sees the full length.  Source:
    Korthikanti et al., arXiv:2205.05198.

    Args:
        sequence_dim: the dim of ``[batch, seq, hidden]`` that is sharded; -2 shards ``[tokens, hidden]`` too.
        full_output: output the full tensor, plain, for heads and other code that works on all tokens.
    """

    sequence_dim: int = 1
    full_output: bool = False

    def __post_init__(self) -> None:
        require(self, "sequence_dim", is_integer(self.sequence_dim), "an integer, as 1")
        require_flag(self, "full_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredParameters:
    """A module below which some parameters are stored split, and gathered for the time of its forward.

    For code that reads another module's weight, as kernels for recurrences do, and so for any module with
    parameters can be stored split though its work cannot.  The module must see full activations.

    Args:
        names: the parameters, by their dotted names below the module, as ``"out_proj.weight"``.
    """

    names: tuple[str, ...] = ("weight",)

    def __post_init__(self) -> None:
        require_attributes(self, "names")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStyle:
    """A parameter other than a layer's ``weight``: attention sinks, a gate's scalars.  Its pattern ends in its name.

    It is a plain tensor during the forward of the module that owns it.

    Args:
        layout: its layout: ``Shard(dim)`` or ``Replicate()``.
        gathered: it is stored sharded, and its owner computes with the full parameter.
        gradient: the gradient that a rank computes for a full parameter: ``"full"``, or ``"partial"`` where
            it meets this rank's heads only.
    """

    layout: Layout = Shard(0)
    gathered: bool = False
    gradient: Literal["full", "partial"] = "full"

    def __post_init__(self) -> None:
        require_layout(self, "layout")
        require_flag(self, "gathered")
        require(self, "gradient", self.gradient in ("full", "partial"), "'full' or 'partial'")
        cut = isinstance(self.layout, Shard)
        require(self, "gathered", cut or not self.gathered, "False: a replicated parameter is already full")
        local = cut and not self.gathered
        require(self, "gradient", not local or self.gradient == "full", "'full': a shard is this rank's alone")
