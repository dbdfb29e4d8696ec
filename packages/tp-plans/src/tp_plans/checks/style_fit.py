"""Check that styles fit the modules and parameters that their rules match: shapes, stacked experts, ties."""

from __future__ import annotations

from collections.abc import Iterator

from tp_plans import styles
from tp_plans._torch_compat import own_parameters
from tp_plans.checks.findings import Finding
from tp_plans.layouts import Shard
from tp_plans.model_tree import join, parent
from tp_plans.planned_tree import PlannedTree

_OF_LINEAR_LAYERS = (styles.ColwiseParallel, styles.RowwiseParallel, styles.MLAKVProjection)
_OF_MATRICES = (*_OF_LINEAR_LAYERS, styles.VocabParallelEmbedding, styles.ColwiseEmbedding)

#: Options of ``nn.Embedding`` that need the ids or features that other ranks hold.
_WHOLE_TABLE_OPTIONS = {
    "max_norm": "renormalises rows in place, on one rank only",
    "scale_grad_by_freq": "counts ids, but each rank sees only ids of its rows",
    "sparse": "gives sparse gradients, which DTensor does not lay out",
}


def check_style_fit(planned: PlannedTree) -> Iterator[Finding]:
    """Find modules and parameters that their style cannot split."""
    for path, _ in planned.styled_modules():
        style = planned.own_style(path)
        if isinstance(style, _OF_MATRICES):
            yield from _matrix(path, type(style).__name__, planned)
        if isinstance(style, (styles.VocabParallelEmbedding, styles.ColwiseEmbedding)):
            yield from _table_options(path, planned)
        elif isinstance(style, styles.ExpertsParallel):
            yield from _expert_stack(path, planned)
        elif isinstance(style, styles.ScaleInput) and (names := planned.tree.own_parameters(path)):
            problem = f"ScaleInput is for a module without parameters, and this one has {', '.join(names)}"
            fix = "let the rule match a module that only passes tokens on, or use AllReduceOutput"
            yield Finding("error", path, problem, fix)
        elif isinstance(style, styles.GatheredParameters):
            yield from _gathered_names(path, style.names, planned)
    for path, parameter in planned.parameters.items():
        rule = planned.style(path)
        if isinstance(rule, styles.ParameterStyle) and isinstance(rule.layout, Shard):
            dim, ndim = rule.layout.dim, parameter.ndim
            if not -ndim <= dim < ndim:
                problem = f"a parameter of shape {list(parameter.shape)} has no dim {dim} to shard"
                fix = "use a dim that it has" if ndim else "a scalar cannot be sharded: use layout=Replicate()"
                yield Finding("error", path, problem, fix)


def _matrix(path: str, style: str, planned: PlannedTree) -> Iterator[Finding]:
    module = planned.modules[path]
    kind, weight = type(module).__name__, own_parameters(module).get("weight")
    if planned.tree.weight(path) is None:
        shape = "no weight" if weight is None else f"a weight of shape {list(weight.shape)}"
        needs = f"{kind} has {shape}, and {style} splits a matrix"
        yield Finding("error", path, needs, "let the rule match a linear or embedding layer")
    elif weight is not None and (getattr(module, "nx", None), getattr(module, "nf", None)) == tuple(weight.shape):
        problem = f"{kind} keeps its weight transposed, [in, out] = {list(weight.shape)}, and {style} reads [out, in]"
        fix = "replace it with nn.Linear before the plan is applied, or leave it replicated"
        yield Finding("error", path, problem, fix)


def _table_options(path: str, planned: PlannedTree) -> Iterator[Finding]:
    counts_everything = isinstance(planned.style(path), styles.ColwiseEmbedding)
    for option, effect in _WHOLE_TABLE_OPTIONS.items():
        if option == "scale_grad_by_freq" and counts_everything:
            continue
        if getattr(planned.modules[path], option, None) not in (None, False):
            yield Finding("error", path, f"{option} {effect}", f"build the embedding without {option}")


def _gathered_names(path: str, names: tuple[str, ...], planned: PlannedTree) -> Iterator[Finding]:
    missing = [name for name in names if join(path, name) not in planned.parameters]
    if missing:
        problem = f"{type(planned.modules[path]).__name__} has no parameter {', '.join(missing)} to gather"
        yield Finding("error", path, problem, "name the parameters below it, as 'out_proj.weight'")
    for layer in dict.fromkeys(parent(join(path, name)) for name in names):
        if isinstance(style := planned.own_style(layer), _OF_LINEAR_LAYERS):
            problem = f"{type(style).__name__} computes with a shard of a weight that a rule of"
            fix = "take the layer out of one of the two rules"
            yield Finding("error", layer, f"{problem} {path or 'the model'} gathers", fix)


def _expert_stack(path: str, planned: PlannedTree) -> Iterator[Finding]:
    parameters = planned.tree.own_parameters(path)
    kind = type(planned.modules[path]).__name__
    if not parameters:
        problem = f"{kind} has no own parameters, but ExpertsParallel shards parameters [experts, ...]"
        yield Finding("error", path, problem, "write rules for the experts' own layers")
    elif len({tuple(parameter.shape[:1]) for parameter in parameters.values()}) > 1 or not all(
        parameter.ndim for parameter in parameters.values()
    ):
        shapes = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in parameters.items())
        problem = f"its parameters do not all have the experts as their first dim: {shapes}"
        yield Finding("error", path, problem, "let the rule match a module that holds stacked experts only")


def check_dispatched(planned: PlannedTree, ep: int) -> Iterator[Finding]:
    """Find modules that cannot be dispatched: without stacked experts, tied, or with experts that do not divide."""
    tied = {path for group in planned.tree.tied for path in group}
    for path, style in planned.styled_modules():
        if not isinstance(style, styles.DispatchExperts):
            continue
        parameters = planned.tree.own_parameters(path)
        stacks = {name: int(parameter.shape[0]) for name, parameter in parameters.items() if parameter.ndim == 3}
        if not stacks:
            shapes = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in parameters.items()) or "none"
            kind = type(planned.modules[path]).__name__
            problem = f"{kind} has no stacked experts [experts, in, out]; its parameters: {shapes}"
            yield Finding("error", path, problem, "let DispatchExperts match a module that holds stacked experts")
            continue
        if shared := [name for name in parameters if f"{path}.{name}" in tied]:
            problem = f"{', '.join(shared)} is tied to another module, and only this one's tokens would be sent to it"
            yield Finding("error", path, problem, "untie it, or leave it out of the rules of the axis ep")
        experts = min(stacks.values())
        if experts % ep:
            legal = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
            problem = f"{experts} experts cannot be divided over ep={ep}"
            yield Finding("error", path, problem, f"use an ep out of {legal}")


def check_tied_weights(planned: PlannedTree) -> Iterator[Finding]:
    """Find shared parameters with different layouts in the plan."""
    for paths in planned.tree.tied:
        if len({planned.layout(path) for path in paths}) > 1:
            layouts = ", ".join(f"{path}: {planned.layout(path) or 'not in the plan'}" for path in paths)
            yield Finding("error", paths[0], f"tied weights laid out differently ({layouts})", "give them one layout")
