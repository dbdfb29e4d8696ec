"""Parameters of modules that no recogniser knows: stored sharded, and gathered for use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import Any

from tp_plans import styles
from tp_plans.infer.bytecode import reads_below, referenced_names
from tp_plans.infer.full_output import is_tied
from tp_plans.layouts import Replicate, Shard
from tp_plans.model_tree import ModelTree, ancestors, join, parent
from tp_plans.naming import KERNEL_ARGUMENTS, leaf
from tp_plans.patterns import wildcard
from tp_plans.planned_tree import PlannedTree, merge_per_block

#: The least share of the model, in all blocks together, for which a parameter is worth a gather.
MIN_PARAM_SHARE = 0.003

#: The least number of rows that are sharded: fewer (a router's experts) leave ranks of a large axis empty.
MIN_ROWS = 16


def shard_storage(
    planned: PlannedTree, root: str, *, read_code: bool = False, large: Collection[str] | None = None
) -> Mapping[str, styles.Style]:
    """Return rules for the large parameters that the plan leaves replicated."""
    # ``read_code`` reads the code of modules: parameters of modules below that it uses are gathered for it, and the
    # weights of other convolutions are sharded too. ``large``: the patterns of large parameters, from another model.
    large = large_patterns(planned.tree) if large is None else large
    stored = list(_shard_storage(planned, root, large, read_code=read_code))
    readers: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for path, style in stored:
        if isinstance(style, styles.GatheredParameters):  # one rule for all that a module reads
            readers[path] += style.names
    gathered = {path: styles.GatheredParameters(names=names) for path, names in readers.items()}
    return merge_per_block(((path, gathered.get(path, style)) for path, style in stored), planned.tree)


def large_patterns(tree: ModelTree) -> frozenset[str]:
    """Return the patterns of the parameters that are worth a gather."""
    sizes: dict[str, int] = defaultdict(int)
    for path, parameter in tree.parameters.items():
        sizes[wildcard(path)] += prod(parameter.shape)
    return frozenset(pattern for pattern, size in sizes.items() if size >= MIN_PARAM_SHARE * sum(sizes.values()))


def _shard_storage(
    planned: PlannedTree, root: str, large: Collection[str], *, read_code: bool
) -> Iterator[tuple[str, styles.Style]]:
    tree = planned.tree
    for path, module in planned.within(root):
        if (names := _kernel_arguments(path, planned)) and planned.style(path) is None:
            yield path, styles.GatheredParameters(names=names)
        if planned.style(path) is not None and not isinstance(planned.style(path), styles.ParallelAttention):
            continue
        own = {name: value for name, value in tree.own_parameters(path).items() if name not in names}
        own = {name: value for name, value in own.items() if planned.style(join(path, name)) is None}
        wanted = [name for name, parameter in own.items() if is_large(join(path, name), parameter.shape, large)]
        if not wanted or planned.is_gathered(join(path, wanted[0])):
            continue
        if f"{leaf(path)}.weight" in _kernel_arguments(parent(path), planned):  # about to be gathered above
            continue
        if tree.is_plain_linear(path) and wanted == ["weight"]:
            if tree.shape(path)[0] < MIN_ROWS or is_tied(path, tree):
                continue
            reader = parent(path)
            if path and reads_below(type(planned.modules[reader]), leaf(path), "weight"):
                if _can_gather(reader, planned):
                    yield reader, styles.GatheredParameters(names=(f"{leaf(path)}.weight",))
            elif _reads_full_activations(path, planned):
                yield path, styles.ColwiseParallel(output_layouts=Replicate())
        elif hasattr(module, "num_embeddings"):
            if _adds_to_embedding(module, "_forward"):  # another lookup, as of ProphetNet's decoder
                continue
            if read_code and _adds_to_embedding(module, "forward"):  # as BART's, which takes the shape of the ids
                yield join(path, "weight"), styles.ParameterStyle(gathered=True)
            else:
                yield path, styles.VocabParallelEmbedding()
        elif read_code and (above := _reader_above(path, wanted, planned)):
            names = tuple(f"{leaf(path)}.{name}" for name in wanted if own[name].shape[0] >= MIN_ROWS)
            if names:
                yield above, styles.GatheredParameters(names=names)
        elif not planned.split_children(path) and not (
            hasattr(module, "kernel_size")  # the kernels of recurrences read its weight
            and (not read_code or "weight" in referenced_names(type(planned.modules[parent(path)])))
        ):
            yield from ((join(path, name), stored_sharded(own[name].shape)) for name in wanted)


def stored_sharded(shape: Sequence[int]) -> styles.ParameterStyle:
    """Return the rule that shards the longest dim of a parameter, and gathers it for the code that reads it."""
    return styles.ParameterStyle(layout=Shard(shape.index(max(shape))), gathered=True)


def _adds_to_embedding(module: Any, method: str) -> bool:
    """Return whether the class of a table has a method that torch's embedding lacks."""
    bases = takewhile(lambda base: base.__name__ != "Embedding", type(module).__mro__)
    return any(method in vars(base) for base in bases)


def _reader_above(path: str, names: list[str], planned: PlannedTree) -> str | None:
    """Return the module above with code that reads the parameters, if it has no rule."""
    above = parent(path)
    read = referenced_names(type(planned.modules[above]))
    is_read = bool(path) and leaf(path) in read and any(name in read for name in names if name != "weight")
    return above if is_read and _can_gather(above, planned) else None


def _can_gather(path: str, planned: PlannedTree) -> bool:
    """Return whether a module may gather around its forward: it has no rule, and only its forward is called."""
    if planned.style(path) is not None or planned.tree.is_numbered(path):
        return False
    above, cls = type(planned.modules[parent(path)]), type(planned.modules[path])
    own = takewhile(lambda base: base.__name__ != "Module", cls.__mro__)
    methods = {name for base in own for name, value in vars(base).items() if callable(value)} - {"forward"}
    return not any(reads_below(above, leaf(path), name) for name in methods)


def is_large(parameter: str, shape: tuple[int, ...], large: Collection[str]) -> bool:
    """Return whether a parameter matches a pattern of large parameters and is a matrix with a dim to shard."""
    return wildcard(parameter) in large and len(shape) > 1 and max(shape) >= MIN_ROWS


def _kernel_arguments(path: str, planned: PlannedTree) -> tuple[str, ...]:
    """The weights that a module passes on: to the kernels of a recurrence with a convolution, to torch's attention."""
    kind = type(planned.modules[path])
    if kind.__name__ == "MultiheadAttention" and "in_proj_weight" in planned.tree.own_parameters(path):
        return ("in_proj_weight", "out_proj.weight")
    children = planned.children[path]
    if not any(hasattr(planned.modules[child], "kernel_size") for child in children):
        return ()
    layers = (name for name in KERNEL_ARGUMENTS if join(path, name) in children)
    return tuple(f"{name}.weight" for name in layers if planned.style(join(path, name)) is None)


def embedding_submodules(planned: PlannedTree, root: str) -> Mapping[str, styles.Style]:
    """Return rules for modules inside a sharded embedding, which see only the ids of their rank."""
    inside = (
        (path, styles.NoParallel(gradient="partial"))
        for path, _ in planned.within(root)
        if isinstance(planned.style(parent(path)), styles.VocabParallelEmbedding) and planned.tree.own_parameters(path)
    )
    return merge_per_block(inside, planned.tree)


def _reads_full_activations(path: str, planned: PlannedTree) -> bool:
    """Return whether a layer surely reads full activations: no sibling is split, or it feeds the split siblings."""
    # A column-wise layer sums the gradient of its input: a layer before it gets a full gradient.
    above = parent(path)
    if split := planned.split_children(above):
        return planned.tree.size(path, 0) in {planned.tree.size(join(above, name), 1) for name in split}
    return not any(planned.split_children(each) for each in ancestors(path) if each)
