"""A plan proposed from the module tree of a decoder that nobody knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tp_plans._validate import require_model
from tp_plans.checks.tree import ancestors
from tp_plans.layouts import Replicate
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.sequence_parallel import with_sequence_parallelism
from tp_plans.styles import (
    ColwiseParallel,
    ExpertsParallel,
    GatheredParameters,
    NoParallel,
    RowwiseParallel,
    Style,
    VocabParallelEmbedding,
)
from tp_plans.suggestion.anatomy import Anatomy, anatomy_of, is_linear, is_norm, matrix, parameters_of
from tp_plans.suggestion.roles import SubLayer, sublayer_at
from tp_plans.suggestion.rules import Doubt, Proposal, gathered_rules, rules_of

#: Right whatever the code of the experts makes of an index that stands for none of them.
_STACK = ExpertsParallel(skips_sentinel_index=False)
_STACK_DOUBT = (
    "taken for experts that are given tokens, indices and weights; if they pass over an index that stands for none, "
    "skips_absent=True spares work"
)
_STORED = (ExpertsParallel, GatheredParameters)

__all__ = ["Doubt", "Suggestion", "suggest"]


@dataclass(frozen=True)
class Suggestion:
    """A plan for a model, and what it is unsure of."""

    plan: Plan
    doubts: tuple[Doubt, ...]

    def __str__(self) -> str:
        if not self.doubts:
            return f"{self.plan!r}, unsure of nothing"
        return "\n".join([f"{self.plan!r}, unsure of", *(f"  {doubt}" for doubt in self.doubts)])


def suggest(model: Any, *, sequence_parallel: bool = False) -> Suggestion:
    """Propose a tensor-parallel plan for a decoder from its modules' shapes and names.

    Embedding, blocks, norms and head are found by their places and shapes; so are, in each block, the sub-layers
    whose linear layers read the residual stream and write to it.  Queries, keys and values (apart or fused), gated
    and fused feed-forwards and stacked experts are split inside.  The layers of what is not understood are split
    too, but their features gathered, so that the plan is right all the same.

    Args:
        model: a ``torch.nn.Module`` on any device (meta is enough).
        sequence_parallel: give the plan's sequence-parallel form (``tp_plans.sequence_parallel``).

    Returns:
        The plan, to be checked as any other, and what to look at before it is trusted.

    Raises:
        PlanError: the model has no token embedding, or no list of blocks.
        ModelError: it is no model.
    """
    require_model(model)
    anatomy = anatomy_of(model)
    rules: dict[str, Style] = {}
    doubts: list[Doubt] = [*_add_embedding(rules, anatomy)]
    for block in anatomy.blocks:
        for path in anatomy.children[block]:
            if is_norm(anatomy.modules[path], anatomy.width):
                rules[path] = NoParallel()
        rules.update(dict.fromkeys(_stacks(block, anatomy), _STACK))
    for found, more in _sublayers(anatomy, rules):
        rules.update(found)
        doubts += more
    doubts += [Doubt(wildcard(path), _STACK_DOUBT) for path, style in rules.items() if style == _STACK]
    if anatomy.final_norm is not None:
        rules[anatomy.final_norm] = NoParallel()
    doubts += _add_head(rules, anatomy)
    doubts += _left_whole(rules, anatomy)
    plan = Plan(_by_pattern(rules, anatomy), name=f"suggested for {type(model).__name__}")
    if sequence_parallel:
        plan = with_sequence_parallelism(plan, anatomy.modules, embedding=anatomy.embedding)
    return Suggestion(plan, tuple(dict.fromkeys(doubts)))


def _add_embedding(rules: dict[str, Style], anatomy: Anatomy) -> Iterator[Doubt]:
    inside = [path for path in anatomy.below(anatomy.embedding) if parameters_of(anatomy.modules[path])]
    if inside:
        yield Doubt(anatomy.embedding, f"what {inside[0]} in it does is not known: the embedding stays whole")
    else:
        rules[anatomy.embedding] = VocabParallelEmbedding()


def _stacks(block: str, anatomy: Anatomy) -> list[str]:
    """The modules of a block that hold stacked experts."""
    return [path for path in anatomy.below(block) if _is_stack(path, anatomy)]


def _sublayers(anatomy: Anatomy, rules: Mapping[str, Style]) -> Iterator[Proposal]:
    """Rules for every sub-layer of every block; layers of one name are split inside in all blocks or in none.

    Blocks may hand one another what they computed (keys and values that several attentions share).
    """
    found = [sub for block in anatomy.blocks for sub in _of_block(block, anatomy, rules)]
    proposals = {sub.path: rules_of(sub, anatomy) for sub in found}
    split = {sub.path: not _is_gathered(sub, proposals[sub.path][0]) for sub in found}
    whole = {wildcard(path) for path, is_split in split.items() if not is_split}
    for sub in found:
        proposed, doubts = proposals[sub.path]
        if split[sub.path] and wildcard(sub.path) in whole:
            proposed = gathered_rules(sub)
        yield proposed, [Doubt(wildcard(doubt.where), doubt.what) for doubt in doubts]


def _of_block(block: str, anatomy: Anatomy, rules: Mapping[str, Style]) -> Iterator[SubLayer]:
    """The sub-layers of a block, but for what is inside stacked experts."""
    for path in (block, *anatomy.below(block)):
        inside = any(rules.get(above) == _STACK for above in (path, *ancestors(path)))
        sub = None if inside else sublayer_at(path, anatomy)
        if sub is not None:
            yield sub


def _is_gathered(sub: SubLayer, proposed: Mapping[str, Style]) -> bool:
    return proposed.get(sub.writer) == RowwiseParallel(input_layouts=Replicate())


def _is_stack(path: str, anatomy: Anatomy) -> bool:
    """Whether a module holds experts stacked in parameters ``[experts, in, out]``."""
    shapes = [tuple(parameter.shape) for parameter in parameters_of(anatomy.modules[path]).values()]
    stacked = [shape for shape in shapes if len(shape) == 3]
    firsts = {shape[0] if shape else 1 for shape in shapes}
    return len(stacked) >= 2 and len(firsts) == 1 and firsts != {1}


def _add_head(rules: dict[str, Style], anatomy: Anatomy) -> Iterator[Doubt]:
    if anatomy.head is None:
        yield Doubt("", "no layer has a row for every id of the embedding: the head, if there is one, stays whole")
    elif is_linear(anatomy.modules[anatomy.head]):
        rules[anatomy.head] = ColwiseParallel(use_local_output=False)
    else:
        kind = type(anatomy.modules[anatomy.head]).__name__
        yield Doubt(anatomy.head, f"a head of class {kind}, which is no linear layer, stays whole")


def _left_whole(rules: dict[str, Style], anatomy: Anatomy) -> Iterator[Doubt]:
    """Matrices of the blocks for which there is no rule."""
    for block in anatomy.blocks:
        for path in anatomy.below(block):
            inside = any(isinstance(rules.get(above), _STORED) for above in ancestors(path))
            if len(matrix(anatomy.modules[path])) >= 2 and path not in rules and not inside:
                kind = type(anatomy.modules[path]).__name__
                yield Doubt(wildcard(path), f"its place among the others is not clear: this {kind} stays whole")


def _by_pattern(rules: dict[str, Style], anatomy: Anatomy) -> dict[str, Style]:
    """Rules for all blocks at once, where all blocks that have the module agree; for single ones where not."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in anatomy.modules:
        places[wildcard(path)].append(path)
    found: dict[str, Style] = {}
    for path, style in rules.items():
        pattern = wildcard(path)
        alike = all(rules.get(place) == style for place in places[pattern])
        found[pattern if alike else path] = style
    return found
