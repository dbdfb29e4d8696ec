"""The placements of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tp_plans.checks.replicated import size_of
from tp_plans.layouts import Layout, Replicate, Shard
from tp_plans.model_tree import join
from tp_plans.planned_tree import PlannedTree
from tp_plans.row_ranges import shard_ranges
from tp_plans.styles import GatheredParameters


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of a model.

    Args:
        path: where it is.
        shape: of the full tensor.
        local_shape: of what the first rank stores; later ranks store as much or less.
        layout: on the axis; ``None`` where it stays a plain tensor, replicated.
        size: bytes of the full tensor.
    """

    path: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: Layout | None
    size: int

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path.rpartition(".")[2]


def sharded_parameters(path: str, planned: PlannedTree, tp: int) -> Iterator[ShardedParameter]:
    """A parameter, or those of a module that have no rule of their own."""
    if path in planned.parameters:
        yield _sharded(path, planned, tp)
        return
    style = planned.own_style(path)
    below = style.names if isinstance(style, GatheredParameters) else ()
    for name in dict.fromkeys((*planned.tree.own_parameters(path), *below)):
        parameter = join(path, name)
        if parameter in planned.parameters and not planned.rules[parameter]:
            yield _sharded(parameter, planned, tp)


def _sharded(path: str, planned: PlannedTree, tp: int) -> ShardedParameter:
    parameter, layout = planned.parameters[path], planned.layout(path)
    shape = tuple(map(int, parameter.shape))
    local = list(shape)
    if isinstance(layout, Shard) and -len(shape) <= layout.dim < len(shape):
        local[layout.dim] = len(shard_ranges(shape[layout.dim], tp)[0])
    elif layout is not None and not isinstance(layout, Shard):
        layout = Replicate()
    return ShardedParameter(path, shape, tuple(local), layout, size_of(parameter))
