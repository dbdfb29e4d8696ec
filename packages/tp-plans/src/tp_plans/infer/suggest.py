"""Propose a plan from the module tree of an unknown decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_plans import styles
from tp_plans.errors import PlanError
from tp_plans.infer.bytecode import reads_below
from tp_plans.infer.complete import require_no_adapters
from tp_plans.infer.encoder_decoder import token_blocks, token_streams, token_tables
from tp_plans.infer.rules import Doubt, Proposal, gathered_rules, propose, stored_rules
from tp_plans.infer.sequence_parallel import with_sequence_parallelism
from tp_plans.infer.stored_parameters import shard_storage
from tp_plans.infer.sublayers import Sublayer, recognize, sublayers_apart
from tp_plans.layouts import Replicate, Shard
from tp_plans.model_tree import ModelTree, ancestors, join, parent
from tp_plans.naming import leaf
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree, merge_per_block

#: Right whether or not the experts skip the sentinel index.
_STACK = styles.ExpertsParallel(skips_sentinel_index=False)
_STACK_DOUBT = (
    "assumed to be experts that take tokens, indices and weights; if they skip the sentinel index num_experts, "
    "skips_sentinel_index=True saves work"
)
_STORED = (styles.ExpertsParallel, styles.GatheredParameters)


@dataclass(frozen=True)
class Suggestion:
    """A plan for a model, and the doubts about it."""

    plan: Plan
    doubts: tuple[Doubt, ...]

    def __str__(self) -> str:
        if not self.doubts:
            return f"{self.plan!r}, no doubts"
        return "\n".join([f"{self.plan!r}, doubts:", *(f"  {doubt}" for doubt in self.doubts)])


def suggest(model: Any, *, sequence_parallel: bool = False, gathered: Sequence[str] = ()) -> Suggestion:
    """Propose a tensor-parallel plan for a decoder from its modules' shapes and names.

    Embedding, blocks, norms and head are found by their places and shapes.  So are the sub-layers of each block: their
    linear layers read and write the hidden states.  Attention (separate or fused projections), gated and fused
    MLPs and stacked experts are sharded inside.  The layers of other sub-layers are sharded too, and their outputs
    gathered, so that the plan stays correct.

    Args:
        model: a ``torch.nn.Module`` on any device (meta is enough).
        sequence_parallel: give the plan's sequence-parallel form (arXiv:2205.05198).
        gathered: patterns of modules in the blocks.  Their matrices are stored sharded and gathered for any code;
            the head, for logits that are not sharded.

    Returns:
        The plan, to be checked as any other, and the doubts to resolve before it is used.

    Raises:
        PlanError: the model has no token embedding, or no list of blocks.
        CapabilityError: sequence parallelism is asked of a model that has no such form.
        ModelError: ``model`` is not a model.

    Example:
        >>> import torch, tp_plans
        >>> from collections import OrderedDict
        >>> mlp = torch.nn.Sequential(OrderedDict(up=torch.nn.Linear(8, 32), down=torch.nn.Linear(32, 8)))
        >>> block = torch.nn.Sequential(OrderedDict(mlp=mlp))
        >>> parts = {"embed": torch.nn.Embedding(16, 8), "layers": torch.nn.ModuleList([block])}
        >>> tp_plans.infer.suggest(torch.nn.ModuleDict(parts)).plan["embed"]
        VocabParallelEmbedding(output_layouts=Replicate(), use_local_output=True)
    """
    return suggestion(ModelTree.of(model), sequence_parallel=sequence_parallel, gathered=gathered)


def suggestion(
    tree: ModelTree, *, sequence_parallel: bool, gathered: Sequence[str], large: Collection[str] | None = None
) -> Suggestion:
    """See :func:`suggest`; ``large``: the patterns of large parameters, from another model."""
    require_no_adapters(tree)
    name = type(tree.model).__name__
    embedding = tree.embedding
    if embedding is None or not tree.decoder_blocks:
        missing = "embedding" if embedding is None else "list of blocks (children named 0, 1, 2)"
        raise PlanError(f"{name} has no {missing}: suggest proposes plans for models of tokens")
    rules: dict[str, styles.Style] = {}
    doubts: list[Doubt] = [doubt for table in token_tables(tree) for doubt in _add_embedding(rules, table, tree)]
    if streams := token_streams(tree):
        doubts.append(Doubt("", f"assumed that {', '.join(streams)} pass on full hidden states"))
    for block in token_blocks(tree):
        leaves = (path for path in tree.children[block] if not tree.children_with_parameters(path))
        scales = (path for path in leaves if tree.is_scale(path, tree.size(embedding, 1)))
        rules.update(dict.fromkeys(scales, styles.NoParallel()))
        stacks = (path for path in tree.below(block) if tree.is_expert_stack(path))
        rules.update({path: _STACK for path in stacks if not tree.children_with_parameters(path)})
    for path in (pattern for pattern in _gathered(gathered, tree) if pattern != tree.lm_head):
        rules.update(stored_rules(path, tree, deep=path not in token_blocks(tree)))
    for new_rules, more in _sublayers(tree, rules):
        rules.update(new_rules)
        doubts += more
    doubts += [Doubt(wildcard(path), _STACK_DOUBT) for path, style in rules.items() if style == _STACK]
    if tree.final_norm is not None and tree.own_parameters(tree.final_norm):
        rules[tree.final_norm] = styles.NoParallel()
    doubts += _add_head(rules, tree, is_gathered=tree.lm_head in gathered)
    plan = Plan(merge_per_block(rules.items(), tree), name=f"suggested for {name}")
    plan = plan.override(shard_storage(PlannedTree(tree, plan), tree.root, read_code=True, large=large))
    doubts += _of_unknown_role(rules, PlannedTree(tree, plan))
    if sequence_parallel:
        plan = with_sequence_parallelism(plan, tree)
    return Suggestion(plan, tuple(dict.fromkeys(doubts)))


def _add_embedding(rules: dict[str, styles.Style], embedding: str, tree: ModelTree) -> Iterator[Doubt]:
    inside = [path for path in tree.below(embedding) if tree.own_parameters(path)]
    if inside:
        yield Doubt(embedding, f"the function of {inside[0]} in it is unknown: the embedding stays replicated")
    elif tree.lm_head is None and reads_below(type(tree.modules[parent(embedding)]), leaf(embedding), "weight"):
        rules[parent(embedding)] = styles.GatheredParameters(names=(f"{leaf(embedding)}.weight",))
    else:
        rules[embedding] = styles.VocabParallelEmbedding()


def _sublayers(tree: ModelTree, rules: Mapping[str, styles.Style]) -> Iterator[Proposal]:
    """Return rules for all sub-layers of all blocks; sub-layers of one name are all sharded inside, or none is."""
    # Blocks may pass results to each other (keys and values that several attention layers share).
    sublayers = [sub for block in token_blocks(tree) for sub in _of_block(block, tree, rules)]
    proposals = {sub.path: propose(sub, tree) for sub in sublayers}
    row = styles.RowwiseParallel(input_layouts=Replicate())
    gathered = {wildcard(sub.path) for sub in sublayers if proposals[sub.path][0].get(sub.output_proj) == row}
    for sub in sublayers:
        proposed, doubts = proposals[sub.path]
        if proposed.get(sub.output_proj) != row and wildcard(sub.path) in gathered:
            proposed = gathered_rules(sub)
        yield proposed, [Doubt(wildcard(doubt.where), doubt.what) for doubt in doubts]


def _of_block(block: str, tree: ModelTree, rules: Mapping[str, styles.Style]) -> Iterator[Sublayer]:
    """Iterate over the sub-layers of a block, without those inside modules that have a rule."""

    def is_stored(path: str) -> bool:
        above = (path, *(module for module in ancestors(path) if module != block))
        return any(isinstance(rules.get(module), _STORED) for module in above)

    separate = [sub for sub in sublayers_apart(block, tree) if not (is_stored(sub.path) or is_stored(sub.output_proj))]
    yield from separate
    known = {path for sub in separate for path in (sub.path, parent(sub.output_proj))}
    for path in (block, *tree.below(block)):
        sub = None if path in known or is_stored(path) else recognize(path, tree)
        if sub is not None:
            yield sub


def _gathered(patterns: Sequence[str], tree: ModelTree) -> list[str]:
    """Return the modules of the decoder's blocks that patterns name."""
    matched, _ = tree.match(patterns)
    if missing := [pattern for pattern in patterns if pattern not in matched]:
        raise PlanError(f"gathered={missing[0]!r} is no module of {type(tree.model).__name__}")
    return [path for paths in matched.values() for path in paths if path]


def _add_head(rules: dict[str, styles.Style], tree: ModelTree, *, is_gathered: bool) -> Iterator[Doubt]:
    tables = token_tables(tree)
    head = tree.lm_head or next((path for path in reversed(tree.shaped_as_embedding) if path not in tables), None)
    kind = "" if head is None else type(tree.modules[head]).__name__
    if head is None:
        yield Doubt("", "no layer has the shape of the embedding: a head, if there is one, stays replicated")
    elif tree.is_linear(head) and (is_gathered or _adds_to_logits(parent(head), head, tree)):
        rules[head] = styles.ColwiseParallel(output_layouts=Replicate())
    elif tree.is_linear(head):
        rules[head] = styles.ColwiseParallel(use_local_output=False)
    elif tree.computes_by_row(head):
        rules[head] = styles.ColwiseParallel(use_local_output=False)
        yield Doubt(head, f"{kind} has a custom forward: assumed that it computes each row separately")
    else:
        yield Doubt(head, f"a head of class {kind}, which is not a linear layer, stays replicated")
    bias = join(head or "", "bias")
    tied = next((group for group in tree.tied if head in rules and bias in group), ())
    rules.update(
        {path: styles.ParameterStyle() for path in tied if path != bias}
    )  # BERT keeps the bias above the head too


def _adds_to_logits(path: str, head: str, tree: ModelTree) -> bool:
    """Return whether the module with the head may add buffers or parameters to the logits: the biases of BART, ESM."""
    tied = next((group for group in tree.tied if join(head, "bias") in group), ())
    return tree.has_buffers(path) or any(join(path, name) not in tied for name in tree.own_parameters(path))


def _of_unknown_role(rules: Mapping[str, styles.Style], planned: PlannedTree) -> Iterator[Doubt]:
    """Find the matrices of the blocks that have no rule, or only a rule for their storage."""
    tree = planned.tree
    for block in token_blocks(tree):
        for path in tree.below(block):
            inside = any(isinstance(rules.get(above), _STORED) for above in ancestors(path))
            if len(tree.shape(path)) >= 2 and path not in rules and not inside:
                kind = type(tree.modules[path]).__name__
                layout = planned.layout(join(path, "weight"))
                what = "stays replicated"
                if isinstance(layout, Shard):
                    what = "is stored sharded and gathered for its code, which is right unless other code reads it"
                yield Doubt(wildcard(path), f"its role is unknown: this {kind} {what}")
