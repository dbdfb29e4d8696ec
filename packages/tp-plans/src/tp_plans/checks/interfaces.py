"""Check that the output layout of a layer fits the input layout of its neighbours.

A plain tensor carries no layout: a row-wise layer reads it as a local shard of features, a ``SequenceParallel`` norm as
the full sequence.  DTensors are redistributed as needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tp_plans import styles
from tp_plans.checks.findings import Finding
from tp_plans.layouts import Replicate, Shard
from tp_plans.model_tree import ancestors, parent
from tp_plans.naming import leaf
from tp_plans.planned_tree import PlannedTree


def check_interfaces(planned: PlannedTree) -> Iterator[Finding]:
    """Find layers with an input or output layout that differs from their neighbours'."""
    matrices = [(path, style) for path, style in planned.styled_modules() if planned.tree.weight(path) is not None]
    giving = [path for path, _ in matrices if planned.outputs_local_shard(path)]
    linear = [
        (path, style) for path, style in matrices if isinstance(style, (styles.RowwiseParallel, styles.ColwiseParallel))
    ]
    reading = [path for path, style in linear if style.input_layouts == Shard(-1)]
    yield from _missing_gather(giving, reading, planned)
    yield from _missing_shard(giving, reading, planned)
    yield from _implicit_shard(planned)
    yield from _replicated_after_blocks(planned)


def _missing_gather(giving: list[str], reading: list[str], planned: PlannedTree) -> Iterator[Finding]:
    """Find sharded features without a layer in the same block that reads sharded features."""
    readers = {scope for path in reading for scope in _scopes(path)}
    for path in giving:
        above = parent(path)
        if above in readers:
            continue
        out = planned.parameters[f"{path}.weight"]
        neighbour = next(
            (sibling for sibling in planned.children[above] if _reads_features(sibling, out.shape[0], planned)), None
        )
        if neighbour is not None:
            features = out.shape[0]
            local = f"outputs a local shard of {features} features as a plain tensor"
            problem = f"{local}, but sibling {neighbour} expects all {features}"
            fix = f"make {neighbour} RowwiseParallel()"
            if out.shape[1] == features:  # the sibling may read the input of this layer instead
                yield Finding("warning", path, f"{problem}, if it comes after it", fix)
            else:
                yield Finding("error", path, problem, fix)
        elif not any(scope in readers for scope in _scopes(path)):
            local = f"outputs a local shard of {out.shape[0]} features as a plain tensor"
            fix = "gather them with output_layouts=Replicate(), or output a DTensor with use_local_output=False"
            yield Finding("warning", path, f"{local}, but no row-wise layer nearby reads it", fix)


def _reads_features(path: str, features: int, planned: PlannedTree) -> bool:
    """Return whether a replicated layer reads so many features."""
    weight, style = planned.tree.weight(path), planned.style(path)
    return (
        weight is not None and (style is None or isinstance(style, styles.NoParallel)) and weight.shape[1] == features
    )


def _missing_shard(giving: list[str], reading: list[str], planned: PlannedTree) -> Iterator[Finding]:
    givers = {scope for path in giving for scope in _scopes(path)}
    for path in reading:
        above = parent(path)
        if above in givers:
            continue
        siblings = ((child, planned.style(child)) for child in planned.children[above])
        gathered = [
            child
            for child, style in siblings
            if isinstance(style, styles.ColwiseParallel) and style.output_layouts == Replicate()
        ]
        if gathered:
            problem = f"expects a local shard of features, but {', '.join(gathered)} output all features"
            yield Finding("error", path, problem, "use input_layouts=Replicate(), or keep Shard(-1) as their output")
        elif not any(scope in givers for scope in _scopes(path)):
            problem = "expects a local shard of features, but no column-wise layer nearby outputs one"
            yield Finding("warning", path, problem, "use input_layouts=Replicate() if its input has all features")


def _scopes(path: str) -> Iterator[str]:
    """Return the modules above a layer up to its block; outside of blocks, only the nearest."""
    inside = list(ancestors(path))
    block = max((index for index, above in enumerate(inside) if leaf(above).isdigit()), default=0)
    yield from inside[: block + 1]


def _implicit_shard(planned: PlannedTree) -> Iterator[Finding]:
    """Find plain local shards of the sequence, which ``SequenceParallel`` norms would shard again."""
    norms = any(isinstance(style, styles.SequenceParallel) for style in planned.plan.values())
    for path, style in planned.styled_modules() if norms else ():
        if isinstance(style, (styles.RowwiseParallel, styles.VocabParallelEmbedding)) and style.use_local_output:
            layout = style.output_layouts
            if isinstance(layout, Shard) and layout.dim >= 0:
                local = f"outputs a local shard of dim {layout.dim} as a plain tensor"
                problem = f"{local}, which SequenceParallel norms read as the full sequence and shard again"
                yield Finding("error", path, problem, "set use_local_output=False")


def _replicated_after_blocks(planned: PlannedTree) -> Iterator[Finding]:
    """Find replicated modules that read the output of blocks that shard it on the sequence."""
    tree = planned.tree
    norm = None if tree.final_norm is None else planned.style(tree.final_norm)
    if isinstance(norm, styles.SequenceParallel) and norm.full_output:
        return
    last = (path for block in tree.decoder_blocks[-1:] for path in (block, *tree.below(block)))
    if not any(_shards_sequence(path, planned) for path in last):
        return
    for path in tree.reads_decoder_output:
        style = planned.style(path)
        is_replicated = style is None or (isinstance(style, styles.NoParallel) and style.gradient == "full")
        if not is_replicated or not tree.own_parameters(path):
            continue
        problem = "is replicated, but the blocks output activations sharded on the sequence"
        fix = "RowwiseParallel(input_layouts=Replicate())" if tree.is_linear(path) else "SequenceParallel()"
        if path in (tree.final_norm, tree.lm_head):
            fix = "ColwiseParallel(use_local_output=False)" if path == tree.lm_head else fix
            yield Finding("error", path, problem, f"make it {fix}")
        elif tree.lm_head is not None and parent(path) == parent(tree.lm_head):  # in the trunk it may read embeddings
            yield Finding("warning", path, f"{problem}, which it may read", f"if it does, make it {fix}")


def _shards_sequence(path: str, planned: PlannedTree) -> bool:
    """Return whether a module outputs a DTensor that is sharded on the sequence."""
    style = planned.style(path)
    if isinstance(style, styles.GatherSequence):
        return True
    if not isinstance(style, (styles.ColwiseParallel, styles.RowwiseParallel)) or style.use_local_output:
        return False
    return isinstance(style.output_layouts, Shard) and style.output_layouts.dim >= 0
