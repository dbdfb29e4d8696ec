"""Check small parameters that meet sharded activations: each rank computes a partial sum of their gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from tp_plans.checks.findings import Finding
from tp_plans.model_tree import parent
from tp_plans.naming import HEAD_NORM, leaf
from tp_plans.planned_tree import PlannedTree
from tp_plans.styles import ColwiseParallel, NoParallel, SequenceParallel

_MARK = "mark it NoParallel(gradient='partial')"


def check_partial_gradients(planned: PlannedTree) -> Iterator[Finding]:
    """Find parameters without a rule next to column-wise layers (norms, scalars, per-head) or below a summed norm."""
    for path, style in planned.styled_modules():
        if isinstance(style, SequenceParallel) or (isinstance(style, NoParallel) and style.gradient == "partial"):
            yield from _below_sums(path, planned)
    split: dict[str, list[str]] = defaultdict(list)
    for path, _ in planned.styled_modules():
        if planned.outputs_local_shard(path) and planned.tree.weight(path) is not None:
            split[parent(path)].append(path)
    for above, layers in split.items():
        widths = _ActivationWidths(above, layers, planned)
        for path in (above, *_below(above, planned)):
            if path == above or _sees_what_comes(path, planned):
                for name, parameter in planned.tree.own_parameters(path).items():
                    place = f"{path}.{name}"
                    if planned.style(place) is None and parameter.ndim <= 1:
                        yield from widths.finding(path, place, prod(parameter.shape), is_norm=path != above)


def _below_sums(path: str, planned: PlannedTree) -> Iterator[Finding]:
    """Find parameters below a module with a rule that sums only the module's own gradients."""
    for child in planned.children[path]:
        if planned.style(child) is None:
            own = planned.tree.own_parameters(child)
            if any(planned.style(f"{child}.{name}") is None for name in own):
                summed = f"{type(planned.style(path)).__name__} of {path} sums gradients of its own parameters only"
                problem = f"its gradient would be a partial sum: {summed}"
                yield Finding("error", child, problem, "move the rule to the modules below that have parameters")
            yield from _below_sums(child, planned)


def _below(path: str, planned: PlannedTree) -> Iterator[str]:
    """Iterate over the modules below, without modules that have linear siblings."""
    for child in planned.children[path]:
        yield child
        if not any(planned.tree.weight(inner) is not None for inner in planned.children[child]):
            yield from _below(child, planned)


def _sees_what_comes(path: str, planned: PlannedTree) -> bool:
    """Return whether a module reads activations in any layout, with replicated parameters."""
    style = planned.style(path)
    is_replicated = style is None or (isinstance(style, NoParallel) and style.gradient == "full")
    return is_replicated and all(parameter.ndim <= 1 for parameter in planned.tree.own_parameters(path).values())


class _ActivationWidths:
    """The widths of the activations that the layers of one module output, sharded or full."""

    def __init__(self, above: str, layers: list[str], planned: PlannedTree) -> None:
        self.layer = layers[0]
        columns = {path: style for path in layers if isinstance(style := planned.style(path), ColwiseParallel)}
        units = {path: planned.number(path, style.multiple_of) or 1 for path, style in columns.items()}
        outputs = {path: planned.parameters[f"{path}.weight"].shape[0] for path in layers}
        self.heads = {unit for unit in units.values() if unit > 1}
        self.counts = {outputs[path] // unit for path, unit in units.items() if unit > 1}
        self.full = set(outputs.values())
        replicated = [
            path for path in planned.children[above] if path not in layers and planned.tree.weight(path) is not None
        ]
        inputs = {planned.parameters[f"{path}.weight"].shape[1] for path in layers}
        self.ambiguous = inputs | {planned.parameters[f"{path}.weight"].shape[0] for path in replicated}

    def finding(self, path: str, place: str, size: int, *, is_norm: bool) -> Iterator[Finding]:
        """Return the finding for a parameter of ``size`` elements."""
        if is_norm and size in self.heads:
            if size in self.ambiguous and not HEAD_NORM.match(leaf(path)):
                return  # between the two projections of a low-rank query, say
            problem = f"norm of one head ({size}): each rank sees only its heads, so the gradient is a partial sum"
            yield self._finding(path, problem, _MARK, size)
        elif is_norm and size in self.full:
            problem = f"norm of all {size} features of {self.layer}, but each rank sees only its local shard"
            yield self._finding(path, problem, f"gather them with output_layouts=Replicate(), or {_MARK}", size)
        elif not is_norm and size in self.counts and size > 1:
            problem = f"one element per head ({size}), but each rank sees only its heads"
            yield self._finding(place, problem, "give it a rule: ParameterStyle()", size)
        elif size == 1:
            meets = f"a scalar that may meet the sharded features of {self.layer}"
            fix = "if so, give it a rule: ParameterStyle(layout=Replicate(), gradient='partial')"
            yield Finding("warning", place, f"{meets}: its gradient would be a partial sum", fix)

    def _finding(self, where: str, problem: str, fix: str, size: int) -> Finding:
        if size in self.ambiguous:
            return Finding("warning", where, f"{problem}, if it comes after {self.layer}", f"if so, {fix}")
        return Finding("error", where, problem, fix)
