"""Styles for the inputs and outputs of a sub-layer."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans._validate import is_integer
from tp_plans.layouts import Layout, Replicate
from tp_plans.styles.experts import AllReduceOutput, ExpertsParallel
from tp_plans.styles.fields import (
    is_attribute,
    require,
    require_argument,
    require_attributes,
    require_flag,
    require_layout,
)
from tp_plans.styles.replicated import GatheredParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareModuleInput:
    """Brings one argument of a module to ``layout`` as a DTensor, once for all the layers inside.

    Before column-wise layers it merges communication: one gather forward and one gradient reduction backward
    instead of one per projection.

    Args:
        layout: the layout wanted.
        argument: the keyword for the tensor, if the caller may pass it by keyword; an absent argument or ``None`` is
            left alone.
        position: its place where it is passed by position, or ``None`` for a keyword-only argument.
        full_output: output the full tensor, plain, for code that works on all tokens.
    """

    layout: Layout = Replicate()
    argument: str = "hidden_states"
    position: int | None = 0
    full_output: bool = False

    def __post_init__(self) -> None:
        require_layout(self, "layout")
        require_flag(self, "full_output")
        require_argument(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAttention:
    """An attention layer with heads that are sharded over the axis: prepares its input and its head counts.

    Args:
        layout: as in ``PrepareModuleInput``, or ``None`` to leave the input as it comes.
        argument: as in ``PrepareModuleInput``.
        position: as in ``PrepareModuleInput``.
        head_count_attrs: integer attributes that count heads, or features of all heads, as
            ``"num_heads"`` or ``"config.num_attention_heads"``: the layer sees this rank's count, at least 1.
            Attributes that it lacks are passed over.
        kv_groups_attr: the attribute for query heads per key/value head; it shrinks where ranks share such heads.
        kv_heads_attr: the attribute for the number of key/value heads.
    """

    layout: Layout | None = Replicate()
    argument: str = "hidden_states"
    position: int | None = 0
    head_count_attrs: tuple[str, ...] = ()
    kv_groups_attr: str = "num_key_value_groups"
    kv_heads_attr: str = "config.num_key_value_heads"

    def __post_init__(self) -> None:
        if self.layout is not None:
            require_layout(self, "layout")
        require_argument(self)
        require_attributes(self, "head_count_attrs")
        for field in ("kv_groups_attr", "kv_heads_attr"):
            require(self, field, is_attribute(getattr(self, field)), "an attribute's name, as 'num_key_value_groups'")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSequence:
    """Gather the sequence for a module between activations that are sharded on it, and shard its output again.

    For a module that mixes tokens and is not sharded (a recurrence), or with styles that read full plain tensors (a
    router and its experts).  Inside, tensors are plain and full on every rank.  If the module flattens batch and
    sequence, its output gets the shape of its input: the caller has to view it so before it adds it.

    Args:
        sequence_dim: the sharded dim of the activations.
        inner: the module's own rule, if it has one, which works inside.
        full_output: leave the output full and plain, for heads and other code that works on all tokens.
    """

    sequence_dim: int = 1
    inner: ParallelAttention | GatheredParameters | ExpertsParallel | AllReduceOutput | None = None
    full_output: bool = False

    def __post_init__(self) -> None:
        require(self, "sequence_dim", is_integer(self.sequence_dim, least=0), "0 or more")
        require_flag(self, "full_output")
        inner = (ParallelAttention, GatheredParameters, ExpertsParallel, AllReduceOutput)
        kinds = f"None or one of {', '.join(kind.__name__ for kind in inner)}"
        require(self, "inner", self.inner is None or isinstance(self.inner, inner), kinds)
