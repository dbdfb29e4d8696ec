"""Derive the sequence-parallel form of a tensor-parallel plan from the model's tree.

Between sub-layers the activations are sharded on the sequence (arXiv:2205.05198): norms compute on this rank's tokens,
a sub-layer gathers its input once, and its row-wise layer reduce-scatters its output.  Other sub-layers that need the
full sequence (a recurrence, a router with its experts) get a ``GatherSequence`` rule.  A block that computes with
several residual streams, or with direct parameters, gets that rule itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

from tp_plans import styles
from tp_plans.errors import CapabilityError, PlanError
from tp_plans.infer.bytecode import first_argument, takes_argument
from tp_plans.infer.encoder_decoder import token_streams
from tp_plans.infer.full_output import is_read_in_full, is_tied, norm_after_blocks, with_full_output
from tp_plans.layouts import Replicate, Shard
from tp_plans.model_tree import ModelTree, is_at_or_below, join, parent
from tp_plans.models.spec import SEQUENCE_DIM
from tp_plans.naming import EMBEDDINGS_ARGUMENT, FEATURES_BETWEEN_BLOCKS, MLA_NORMS, NO_SEQUENCE_PARALLELISM, leaf
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree, merge_per_block

_STREAM = Shard(SEQUENCE_DIM)

#: The styles of a module's own that may be the inner one of a ``GatherSequence``.
_WRAPPABLE_STYLES = (
    *(styles.ParallelAttention, styles.GatheredParameters, styles.ExpertsParallel, styles.AllReduceOutput),
)


def with_sequence_parallelism(plan: Plan, model: Any, *, gather_blocks: bool = False) -> Plan:
    """Return the sequence-parallel form of a plan: activations between sub-layers are sharded on the sequence."""
    # With ``gather_blocks`` the sequence is gathered for each entire block: right for any code of a block, since
    # activations are sharded between blocks only. Otherwise each sub-layer gets its form, if all of them have one.
    planned = PlannedTree(ModelTree.of(model), plan)
    tree = planned.tree
    _require_sequence_parallel_form(tree)
    if streams := token_streams(tree):
        return _of_each_stream(planned, streams, gather_blocks=gather_blocks)
    block_rules = {path: None if gather_blocks else _block_rules(path, planned) for path in _blocks(tree)}
    per_sublayer = all(rules is not None for rules in block_rules.values())
    places = (path for group in tree.by_wildcard.values() for path in group)
    rules = {path: planned.styles[path] for path in places if path in planned.styles}
    rules |= _rules_after_blocks(planned)
    if per_sublayer:
        rules |= _rules_before_blocks(planned)
    for path, inside in block_rules.items():
        rules |= inside if per_sublayer and inside is not None else {path: _gather_rule(path, planned)}
    if takes_features_between_blocks(tree):
        rules |= _rules_between_blocks(tree, per_sublayer=per_sublayer)
    derived = Plan(merge_per_block(rules.items(), tree), name=plan.name, sequence_parallel=True)
    return with_full_output(derived, tree) if is_read_in_full(tree) else derived


def _of_each_stream(planned: PlannedTree, streams: tuple[str, ...], *, gather_blocks: bool) -> Plan:
    """Return the plan of an encoder and a decoder: each shards its own tokens, and outputs full hidden states."""
    plan, tree = planned.plan, planned.tree
    rules = {path: planned.styles[path] for path in (*tree.modules, *tree.parameters) if path in planned.styles}
    for path in streams:
        inside = {place: rules.pop(place) for place in [*rules] if place != path and is_at_or_below(place, path)}
        own = Plan({place.removeprefix(f"{path}."): style for place, style in inside.items()}, name=plan.name)
        below = ModelTree.of(tree.modules[path])
        derived = with_sequence_parallelism(own, below, gather_blocks=gather_blocks)
        rules |= {join(path, place): style for place, style in PlannedTree(below, derived).styles.items()}
    return Plan(merge_per_block(rules.items(), tree), name=plan.name, sequence_parallel=True)


def _require_sequence_parallel_form(tree: ModelTree) -> None:
    names = [type(module).__name__ for module in tree.modules.values()]
    if (name := next((name for name in names if name in NO_SEQUENCE_PARALLELISM), None)) is not None:
        raise CapabilityError(
            f"{type(tree.model).__name__} has no sequence-parallel form: {NO_SEQUENCE_PARALLELISM[name]}; pass "
            "sequence_parallel=False"
        )


def _blocks(tree: ModelTree) -> tuple[str, ...]:
    """Return the blocks of the decoder's stack and of the stacks next to it, which share the activations."""
    name = type(tree.model).__name__
    if tree.decoder is None:
        raise PlanError(
            f"{name} has no list of blocks for the token embedding {tree.embedding or '(none found)'}: "
            "write the sequence-parallel plan yourself"
        )
    kinds = {type(tree.modules[block]) for block in tree.decoder_blocks}
    stacks = {path: members for path, members in tree.stacks.items() if parent(path) == parent(tree.decoder)}
    for path, members in tree.stacks.items():
        if path not in stacks and kinds & {type(tree.modules[block]) for block in members}:
            raise PlanError(
                f"{name} has blocks of one class in {tree.decoder} and {path}: sequence parallelism cannot be derived "
                "for several decoders; write the sequence-parallel plan yourself"
            )
    return tuple(block for members in stacks.values() for block in members)


def _rules_before_blocks(planned: PlannedTree) -> dict[str, styles.Style]:
    """Return the rules that shard the embeddings on the sequence before the first block."""
    tree, embedding = planned.tree, planned.tree.embedding
    gathers = isinstance(planned.style(tree.root), styles.GatheredParameters)
    if tree.root and planned.style(tree.root) is not None and not gathers:
        return {}
    between_blocks = tree.root and takes_argument(tree.modules[tree.root], FEATURES_BETWEEN_BLOCKS[1])
    takes_embeddings = tree.root and takes_argument(tree.modules[tree.root], EMBEDDINGS_ARGUMENT)
    if gathers or not takes_embeddings or between_blocks or _adds_to_embeddings(tree):
        # Its code may add positions to the embeddings, or scale them: shard the first block's input.
        block = _blocks(tree)[0]
        return {block: styles.PrepareModuleInput(layout=_STREAM, argument=first_argument(tree.modules[block]))}
    rules: dict[str, styles.Style] = {
        tree.root: styles.PrepareModuleInput(layout=_STREAM, argument=EMBEDDINGS_ARGUMENT, position=None)
    }
    is_split = embedding is not None and isinstance(planned.style(embedding), styles.VocabParallelEmbedding)
    above = parent(tree.root)  # its other parts may write into the embeddings
    merges_above = bool(above) and tree.children_with_parameters(above) != {leaf(tree.root)}
    if embedding is not None and is_split and not merges_above:
        rules[embedding] = styles.VocabParallelEmbedding(output_layouts=_STREAM, use_local_output=False)
    return rules


def _adds_to_embeddings(tree: ModelTree) -> bool:
    """Return whether modules other than the embedding change the embeddings: positions, a norm, an image tower."""
    embedding = tree.embedding or ""
    if parent(embedding) != tree.root:
        return True
    with_parameters = tree.children_with_parameters(tree.root)
    before = takewhile(lambda path: not is_at_or_below(tree.decoder or "", path), tree.children[tree.root])
    others = (leaf(path) for path in tree.children[tree.root] if path != embedding)
    return any("embed" in name and name in with_parameters for name in others) or any(
        leaf(path) in with_parameters or (tree.has_buffers(path) and "embed" in leaf(path))
        for path in before
        if path != embedding
    )


def _rules_after_blocks(planned: PlannedTree) -> dict[str, styles.Style]:
    """Return the rules of the modules that read the output of the last block, which is sharded on the sequence."""
    tree = planned.tree
    siblings = [path for path in tree.children[tree.root] if path != tree.decoder]
    streams = (path for path in siblings if _has_streams(path, tree))
    rules: dict[str, styles.Style] = {path: _gather_rule(path, planned) for path in streams}
    for path in tree.reads_decoder_output:
        if planned.style(path) is None and tree.is_linear(path) and not is_tied(path, tree):
            rules[path] = styles.RowwiseParallel(input_layouts=Replicate())  # right for a full input too
    if (norm := norm_after_blocks(tree)) is not None:
        rules[norm] = styles.SequenceParallel(sequence_dim=SEQUENCE_DIM)
    return rules


def takes_features_between_blocks(tree: ModelTree) -> bool:
    """Return whether the language model adds vision features between its blocks (DeepStack, arXiv:2406.04334)."""
    root = tree.modules[tree.root]
    return any(takes_argument(root, name) for name in FEATURES_BETWEEN_BLOCKS)


def _rules_between_blocks(tree: ModelTree, *, per_sublayer: bool) -> dict[str, styles.Style]:
    """Return rules that give full hidden states to code between blocks that adds features to them."""
    if not per_sublayer:
        raise CapabilityError(
            f"{type(tree.model).__name__} adds vision features between blocks that need the full sequence: sequence "
            "parallelism cannot be derived for it; pass sequence_parallel=False"
        )
    blocks = tree.decoder_blocks
    root = tree.modules[tree.root]
    mergers = next((members for path, members in tree.stacks.items() if leaf(path).startswith("deepstack")), None)
    # A list of features is for the first blocks, one each; a dict may name any block, the first one too.
    is_list = takes_argument(root, FEATURES_BETWEEN_BLOCKS[0])
    count = len(mergers) if is_list and mergers is not None else len(blocks)
    return {
        block: styles.PrepareModuleInput(
            layout=_STREAM, argument=first_argument(tree.modules[block]), full_output=index < count
        )
        for index, block in enumerate(blocks[: count + 1])
    }


def _block_rules(path: str, planned: PlannedTree) -> dict[str, styles.Style] | None:
    """Return the rules inside one block; ``None`` if the sequence has to be gathered for the entire block."""
    tree = planned.tree
    if planned.style(path) is not None or tree.own_parameters(path) or tree.has_buffers(path):
        return None
    rules: dict[str, styles.Style] = {}
    for child in (join(path, name) for name in sorted(tree.children_with_parameters(path))):
        own = planned.style(child)
        if tree.is_norm(child):
            rules[child] = styles.SequenceParallel(sequence_dim=SEQUENCE_DIM)
        elif (inside := _rules_apart(child, planned)) is not None:
            rules |= inside
        elif (only := _only_rowwise(child, planned)) is not None:
            row, style = only
            prepared = (
                own
                if isinstance(own, (styles.ParallelAttention, styles.PrepareModuleInput))
                else styles.PrepareModuleInput()
            )
            rules[child] = replace(prepared, layout=Replicate())
            rules[row] = replace(style, output_layouts=_STREAM, use_local_output=False)
        elif (
            not tree.children_with_parameters(child)
            or isinstance(own, styles.ExpertsParallel)
            or tree.is_numbered(child)
        ):
            return None  # the block's own code feeds it
        elif _has_streams(child, tree):
            return None
        else:
            rules[child] = _gather_rule(child, planned)
    return rules


def _rules_apart(path: str, planned: PlannedTree) -> dict[str, styles.Style] | None:
    """Return the rules of a part of a sub-layer with layers in several modules; ``None`` for other modules."""
    # The part that outputs local features gathers the tokens.  The part that reads them scatters its sums and ends in
    # a norm.
    tree, own = planned.tree, planned.style(path)
    owners = [join(path, name) for name in sorted(tree.children_with_parameters(path))]
    if tree.own_parameters(path) or not owners or not (own is None or isinstance(own, styles.PrepareModuleInput)):
        return None
    if own is not None:
        return {path: replace(own, layout=Replicate())} if all(map(planned.outputs_local_shard, owners)) else None
    rows = _rowwise(owners, planned)
    if [style.input_layouts for style in rows.values()] == [Shard(-1)] and not planned.split_children(path):
        if not all(tree.is_norm(owner) for owner in owners if owner not in rows):
            return None
        norms = {owner: styles.SequenceParallel(sequence_dim=SEQUENCE_DIM) for owner in owners if owner not in rows}
        scattered = {p: replace(row, output_layouts=_STREAM, use_local_output=False) for p, row in rows.items()}
        return {**scattered, **norms}
    parts = [_rules_apart(owner, planned) for owner in owners] if not rows else [None]
    return None if None in parts else {place: style for owner in parts for place, style in (owner or {}).items()}


def _only_rowwise(path: str, planned: PlannedTree) -> tuple[str, styles.RowwiseParallel] | None:
    """Return the row-wise layer that outputs the sub-layer's result, if the other layers read any layout."""
    own, tree = planned.style(path), planned.tree
    if not (own is None or isinstance(own, (styles.PrepareModuleInput, styles.ParallelAttention))):
        return None
    if any(planned.style(join(path, name)) is None for name in tree.own_parameters(path)):
        return None
    names = tree.children_with_parameters(path)
    rows = _rowwise([join(path, name) for name in sorted(names)], planned)
    known = all(planned.style(join(path, name)) is not None or name in MLA_NORMS for name in names)
    if len(rows) != 1 or not known or not planned.split_children(path):
        return None
    ((row, style),) = rows.items()
    return (row, style) if style.output_layouts == Replicate() and style.input_layouts == Shard(-1) else None


def _rowwise(paths: list[str], planned: PlannedTree) -> dict[str, styles.RowwiseParallel]:
    return {path: style for path in paths if isinstance(style := planned.style(path), styles.RowwiseParallel)}


def _gather_rule(path: str, planned: PlannedTree) -> styles.GatherSequence:
    """The rule that gathers the sequence for a sub-layer or block, with its own rule inside."""
    own = planned.style(path)
    if own is None or isinstance(own, (styles.PrepareModuleInput, styles.GatherSequence)):
        return styles.GatherSequence(sequence_dim=SEQUENCE_DIM)
    if isinstance(own, _WRAPPABLE_STYLES):
        return styles.GatherSequence(sequence_dim=SEQUENCE_DIM, inner=own)
    raise PlanError(
        f"{path} is {type(own).__name__}, and sits where the activations are sharded on the sequence: sequence "
        "parallelism cannot be derived for it; write the sequence-parallel plan yourself"
    )


def _has_streams(path: str, tree: ModelTree) -> bool:
    """Return whether a module joins or splits several residual streams (hyper-connections, arXiv:2409.19606)."""
    name = f"{path} {type(tree.modules[path]).__name__}".lower()
    return "hyper" in name and leaf(path) in tree.children_with_parameters(parent(path))
