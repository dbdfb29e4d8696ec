"""Split the parts next to the language model: vision and audio towers, and the projectors of their features.

The recognisers of sub-layers serve towers too: attention is split in heads, MLPs in features (Megatron-LM,
arXiv:1909.08053).  Other linear layers are stored sharded and their outputs gathered.  Large convolutions (patch
embeddings), position tables and bare parameters are stored sharded and gathered for use; small ones and norms stay
replicated.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tp_plans import styles
from tp_plans.checks.divisibility import Constraint, divisibility_constraints
from tp_plans.infer.bytecode import reads_below, reads_weights
from tp_plans.infer.rules import propose
from tp_plans.infer.stored_parameters import MIN_ROWS, is_large, large_patterns, stored_sharded
from tp_plans.infer.sublayers import Sublayer
from tp_plans.layouts import Replicate
from tp_plans.model_tree import ModelTree, ancestors, is_at_or_below, join, parent
from tp_plans.naming import FUSED_MLPS, FUSED_QKV, OUTPUT_PROJECTION, leaf
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree, merge_per_block

logger = logging.getLogger(__name__)

#: Names of layers that hold several matrices one after another, in the classes of this package; others may interleave
#: the heads under the same names.
_MEASURED = "transformers."
_CONCATENATED = {*FUSED_QKV, *(names[0] for names in FUSED_MLPS)}
#: Output projections of towers.
_OUTPUT = re.compile(rf"{OUTPUT_PROJECTION.pattern}|linear_?(fc)?2")
#: Activations that work on single features.
_ACTIVATIONS = ("gelu", "relu", "silu", "swish", "tanh", "sigmoid", "dropout", "identity")
#: What stays replicated as it is: its own code reads the weights of the layers inside.
_READS_WEIGHTS = {"MultiheadAttention"}


#: A module of a tower, and its rules.
_Part = tuple[str, Mapping[str, styles.Style]]


def split_towers(plan: Plan, model: Any, *, tp: int) -> Plan:
    """Return a plan with rules for replicated vision and audio towers and projectors."""
    # Its rules stay. Layers with a number of heads or features that does not divide are stored sharded, and logged.
    return with_towers(plan, ModelTree.of(model), tp=tp)[0]


def with_towers(
    plan: Plan, tree: ModelTree, *, tp: int, among: Collection[str] | None = None, large: Collection[str] | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan with rules for towers, and the patterns of the parts of towers that are split inside."""
    # Parts outside ``among`` are stored sharded. ``large``: the patterns of large parameters, from another model.
    planned = PlannedTree(tree, plan)
    paths = [path for path in _outside(tree) if planned.style(path) is None and not _is_gathered(path, planned)]
    if not paths:
        return plan, ()
    rules: dict[str, styles.Style] = {}
    split: list[str] = []
    for group in _by_wildcard(_parts(paths, planned)):
        where = wildcard(group[0][0])
        if among is not None and where not in among:
            continue
        if (misfit := _misfit(group[0], tree, tp)) is None:
            rules |= {path: style for _, inside in group for path, style in inside.items()}
            split.append(where)
        else:
            reason = misfit.finding(tp).message
            logger.warning("%s: %s, so its layers are stored sharded and their outputs gathered", where, reason)
    rules |= dict(_stored(paths, rules, planned, tp))
    plan = plan.override(merge_per_block(rules.items(), tree))
    tensors = _stored_tensors(paths, PlannedTree(tree, plan), large_patterns(tree) if large is None else large)
    return plan.override(merge_per_block(tensors, tree)), tuple(split)


def _outside(tree: ModelTree) -> Iterator[str]:
    """Iterate over the modules next to the language model, without the head and the parents of both."""
    if tree.embedding is None or tree.decoder is None or not tree.root:
        return
    for path in tree.modules:
        holds_root = is_at_or_below(tree.root, path)
        inside = is_at_or_below(path, tree.root) or (tree.lm_head is not None and is_at_or_below(path, tree.lm_head))
        # The rules of modules below a layer with low-rank adapters follow from the layer's rule.
        in_adapter = any(f"{above}.base_layer" in tree.modules for above in ancestors(path))
        if not (holds_root or inside or in_adapter or _in_language_model(path, tree)):
            yield path


def _is_gathered(path: str, planned: PlannedTree) -> bool:
    """Return whether a rule of a module above gathers a parameter of a module, so that its code reads it in full."""
    return any(planned.is_gathered(join(path, name)) for name in planned.tree.own_parameters(path))


def _in_language_model(path: str, tree: ModelTree) -> bool:
    """Return whether a module shares the language model's kind of blocks: another decoder, which has its own plan."""
    kinds = {type(tree.modules[block]) for block in tree.decoder_blocks}
    stack = next((blocks for list_path, blocks in tree.stacks.items() if is_at_or_below(path, list_path)), ())
    return any(type(tree.modules[block]) in kinds for block in stack)


def _parts(paths: Iterable[str], planned: PlannedTree) -> Iterator[_Part]:
    tree = planned.tree
    for path in paths:
        has_rules = any(planned.style(p) is not None or _is_gathered(p, planned) for p in tree.children[path])
        if type(tree.modules[path]).__name__ in _READS_WEIGHTS or has_rules:
            continue
        if (rules := _sequence(path, tree) or _sublayer(path, tree)) is not None:
            yield path, rules


def _sequence(path: str, tree: ModelTree) -> dict[str, styles.Style] | None:
    """Return the rules of a ``Sequential`` of a linear layer, an activation and a linear layer."""
    if type(tree.modules[path]).__name__ != "Sequential":
        return None
    children = tree.children[path]
    linear = [child for child in children if tree.is_plain_linear(child)]
    between = [child for child in children if child not in linear]
    if len(linear) != 2 or tree.shape(linear[0])[0] != tree.shape(linear[1])[1]:
        return None
    first, second = (children.index(layer) for layer in linear)
    inner = [child for child in between if first < children.index(child) < second]
    if any(tree.children[child] or tree.own_parameters(child) or not _is_activation(child, tree) for child in inner):
        return None
    return {linear[0]: styles.ColwiseParallel(), linear[1]: styles.RowwiseParallel()}


def _is_activation(path: str, tree: ModelTree) -> bool:
    name = type(tree.modules[path]).__name__.lower()
    return any(known in name for known in _ACTIVATIONS) and "glu" not in name.replace("gelu", "")


def _sublayer(path: str, tree: ModelTree) -> dict[str, styles.Style] | None:
    """Return the rules of attention or an MLP that is split inside; ``None`` if a part of it is unknown."""
    sub = _tower_sublayer(path, tree)
    if sub is None or tree.own_parameters(path):  # such as a bias for every head
        return None
    rules, _ = propose(sub, tree)
    if rules.get(sub.output_proj) in (None, styles.RowwiseParallel(input_layouts=Replicate())):
        return None
    own = rules.pop(path, None)
    if isinstance(own, styles.ParallelAttention) and own.head_count_attrs:
        rules[path] = replace(own, layout=None)  # the code around may join its input with plain tensors
    elif own is not None and not isinstance(own, (styles.ParallelAttention, styles.PrepareModuleInput)):
        return None
    return rules


def _tower_sublayer(path: str, tree: ModelTree) -> Sublayer | None:
    """Return a module as attention or an MLP, by its layers: some read features, one writes as many."""
    linear = [child for child in tree.children[path] if tree.is_plain_linear(child)]
    outputs = [layer for layer in linear if _OUTPUT.fullmatch(leaf(layer).lower())]
    if len(linear) < 2 or len(outputs) != 1:
        return None
    (output,) = outputs
    inputs = tuple(layer for layer in linear if layer != output)
    inner = tree.shape(output)[1]
    rows = [tree.shape(layer)[0] for layer in inputs]
    concatenated = rows != [inner] * len(rows) and len(inputs) == 1
    known = leaf(inputs[0]) in _CONCATENATED and type(tree.modules[path]).__module__.startswith(_MEASURED)
    if concatenated and not known:
        return None
    return Sublayer(path=path, input_projs=inputs, output_proj=output, inner_dim=inner)


def _by_wildcard(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Group the parts that differ only in block numbers: all of a group are split, or none."""
    groups: dict[str, list[_Part]] = defaultdict(list)
    for path, rules in parts:
        groups[wildcard(path)].append((path, rules))
    return list(groups.values())


def _misfit(part: _Part, tree: ModelTree, tp: int) -> Constraint | None:
    """Return a description of the sizes of one part that cannot be split over the axis, or ``None``."""
    root, rules = part
    below = {path: tree.modules[path] for path in (root, *tree.below(root))}
    parameters = {path: value for path, value in tree.parameters.items() if is_at_or_below(parent(path), root)}
    alone = ModelTree(below, parameters, {path: tree.children[path] for path in below})
    cuts, _ = divisibility_constraints(PlannedTree(alone, Plan(rules)))
    return next((cut for cut in cuts if not cut.fits(tp)), None)


def _stored(
    paths: Iterable[str], rules: Mapping[str, styles.Style], planned: PlannedTree, tp: int
) -> Iterator[tuple[str, styles.Style]]:
    """Iterate over rules that store the other linear layers sharded."""
    tree = planned.tree
    for path in _outside_split_modules(paths, rules):
        reader = type(tree.modules[parent(path)])
        if path in rules or not tree.is_plain_linear(path) or reads_weights(reader):
            continue
        rows = tree.shape(path)[0]
        if rows >= MIN_ROWS and Constraint(path, rows).fits(tp):
            yield path, styles.ColwiseParallel(output_layouts=Replicate())


def _stored_tensors(
    paths: Iterable[str], planned: PlannedTree, large: Collection[str]
) -> Iterator[tuple[str, styles.Style]]:
    """Iterate over rules that store large convolutions, tables and bare parameters sharded, and gather them for use."""
    # A module's rule gathers all parameters that its code reads, its own and those below; a parameter's rule only it.
    tree = planned.tree
    tensors = {
        join(path, name): _reader(path, name, tree)
        for path in _outside_split_modules(paths, planned.styles)
        if planned.style(path) is None
        for name, parameter in tree.own_parameters(path).items()
        if is_large(join(path, name), parameter.shape, large)
    }
    readers: dict[str, list[str]] = {reader: [] for reader in tensors.values() if reader is not None}
    for tensor, reader in tensors.items():
        shape = tuple(tree.parameters[tensor].shape)
        above = parent(tensor) if reader is None and parent(tensor) in readers else reader
        if any(tensor in group for group in tree.tied):
            continue
        if above is None:
            yield tensor, stored_sharded(shape)
        elif shape[0] >= MIN_ROWS and planned.style(above) is None:
            readers[above].append(tensor.removeprefix(f"{above}."))
    yield from ((reader, styles.GatheredParameters(names=tuple(names))) for reader, names in readers.items() if names)


def _outside_split_modules(paths: Iterable[str], rules: Mapping[str, styles.Style]) -> Iterator[str]:
    """Iterate over the paths outside of modules with split computations (a row-wise layer)."""
    split = {parent(path) for path, style in rules.items() if isinstance(style, styles.RowwiseParallel)}
    return (path for path in paths if not any(above in split for above in ancestors(path)))


def _reader(path: str, name: str, tree: ModelTree) -> str | None:
    """Return the outermost module with code that reads a tensor of a module below it."""
    above = (module for module in ancestors(path) if reads_below(type(tree.modules[module]), leaf(path), name))
    return next(iter(reversed([*above])), None)
