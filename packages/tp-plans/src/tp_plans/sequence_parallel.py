"""The sequence-parallel form of any tensor-parallel plan, derived from the model's tree.

Between sub-layers the residual stream is cut on the sequence (arXiv:2205.05198): norms work on this rank's tokens,
a sub-layer gathers its input once, and its row-wise layer reduce-scatters its output.  A sub-layer that needs
whole tensors for another reason (a recurrence, a router with its experts) has a door: gathered in, cut out.  Where
a block computes with more than one stream, or with parameters of its own, the door is the block's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tp_plans._torch_compat import own_buffers
from tp_plans.completion.tree import Tree, agreed, join, parameters_of
from tp_plans.errors import PlanError
from tp_plans.layouts import Replicate, Shard
from tp_plans.models.spec import SEQUENCE_DIM
from tp_plans.plan import Plan
from tp_plans.styles import (
    AllReduceOutput,
    ExpertsParallel,
    GatheredParameters,
    GatherSequence,
    ParallelAttention,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
)

_STREAM = Shard(SEQUENCE_DIM)

#: Own rules of a sub-layer that work behind its door.
_BEHIND_DOORS = (ParallelAttention, GatheredParameters, ExpertsParallel, AllReduceOutput)

#: Norms of latent attention, which work on whole latents inside the sub-layer.
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


def with_sequence_parallelism(plan: Plan, modules: Mapping[str, Any], *, embedding: str) -> Plan:
    """The sequence-parallel form of a plan.

    Args:
        plan: a tensor-parallel plan.
        modules: path to module of the model that it is for, as ``dict(model.named_modules())``.
        embedding: where the token embedding sits; the blocks are beside it.

    Raises:
        PlanError: no blocks are found beside the embedding.
    """
    root = embedding.rpartition(".")[0]
    tree = Tree(plan, modules, root)
    blocks = list(_blocks(root, tree))
    if not blocks:
        raise PlanError(
            f"no blocks are found beside {embedding or 'the embedding'}: a list of modules under {root or 'the model'} "
            "is looked for; write the sequence-parallel plan yourself"
        )
    inside = {path: _inside_block(path, tree) for path in blocks}
    fine = all(rules is not None for rules in inside.values())
    told = {path: style for path in tree.paths() if (style := tree.style(path)) is not None}
    told |= _around(root, embedding, tree, fine=fine)
    for path, rules in inside.items():
        told |= rules if fine and rules is not None else {path: _door(path, tree)}
    return Plan(agreed(told.items(), tree), name=plan.name, sequence_parallel=True)


def _blocks(root: str, tree: Tree) -> Iterator[str]:
    """The members of the lists of modules right under the root that hold more than one layer each."""
    for name in tree.children[root]:
        container = join(root, name)
        if _is_list(container, tree):
            paths = [f"{container}.{member}" for member in tree.children[container]]
            if all(len(tree.filled(path)) > 1 for path in paths):
                yield from paths


def _around(root: str, embedding: str, tree: Tree, *, fine: bool) -> dict[str, Style]:
    """Rules for what is not in a block: the stream's beginning and end."""
    after = _after_blocks(root, tree)
    norm = next((path for path in after if _is_norm(path, tree)), None)
    rules: dict[str, Style] = {path: _door(path, tree) for path in after if _has_streams(path, tree)}
    if norm is not None:
        rules[norm] = SequenceParallel(sequence_dim=SEQUENCE_DIM)
    if not fine or not root or tree.style(root) is not None:
        return rules
    rules[root] = PrepareModuleInput(layout=_STREAM, argument="inputs_embeds", position=None)
    if isinstance(tree.style(embedding), VocabParallelEmbedding) and not _edited_outside(root, tree):
        rules[embedding] = VocabParallelEmbedding(output_layouts=_STREAM, use_local_output=False)
    return rules


def _after_blocks(root: str, tree: Tree) -> list[str]:
    """The modules beside the blocks, those behind them first."""
    names = tree.children[root]
    first = next((place for place, name in enumerate(names) if _is_list(join(root, name), tree)), 0)
    return [join(root, name) for name in (*names[first + 1 :], *names[:first])]


def _is_list(path: str, tree: Tree) -> bool:
    """Whether a module is a list of others, which has no forward of its own."""
    return bool(tree.children[path]) and all(name.isdigit() for name in tree.children[path])


def _edited_outside(root: str, tree: Tree) -> bool:
    """Whether the module above the language model has parts of its own, which write into its token embeddings."""
    above, _, own = root.rpartition(".")
    return bool(above) and tree.filled(above) != {own}


def _inside_block(path: str, tree: Tree) -> dict[str, Style] | None:
    """Rules inside one block; ``None`` where the door has to be the block's."""
    module = tree.modules[path]
    if tree.style(path) is not None or parameters_of(module) or own_buffers(module):
        return None
    rules: dict[str, Style] = {}
    for name in sorted(tree.filled(path)):
        child = join(path, name)
        own = tree.style(child)
        if _is_norm(child, tree):
            rules[child] = SequenceParallel(sequence_dim=SEQUENCE_DIM)
        elif (row := _only_row(child, tree)) is not None:
            prepared = own if isinstance(own, (ParallelAttention, PrepareModuleInput)) else PrepareModuleInput()
            rules[child] = replace(prepared, layout=Replicate())
            rules[row] = replace(_row(row, tree), output_layouts=_STREAM, use_local_output=False)
        elif not tree.filled(child) or isinstance(own, ExpertsParallel) or _is_list(child, tree):
            return None  # the block's own code feeds it
        elif _has_streams(child, tree):
            return None
        else:
            rules[child] = _door(child, tree)
    return rules


def _only_row(path: str, tree: Tree) -> str | None:
    """The row-wise layer whose output is the sub-layer's, where everything in it takes the stream as it comes."""
    own = tree.style(path)
    if not (own is None or isinstance(own, (PrepareModuleInput, ParallelAttention))):
        return None
    if any(tree.style(f"{path}.{name}") is None for name in parameters_of(tree.modules[path])):
        return None
    names = tree.filled(path)
    rows = [name for name in names if isinstance(tree.style(f"{path}.{name}"), RowwiseParallel)]
    known = all(tree.style(f"{path}.{name}") is not None or name in LATENT_NORMS for name in names)
    if len(rows) != 1 or not known or not tree.split_children(path):
        return None
    row = f"{path}.{rows[0]}"
    return row if _row(row, tree).output_layouts == Replicate() and _row(row, tree).input_layouts == Shard(-1) else None


def _row(path: str, tree: Tree) -> RowwiseParallel:
    style = tree.style(path)
    if not isinstance(style, RowwiseParallel):
        raise PlanError(f"{path} is {style}, not row-wise")
    return style


def _door(path: str, tree: Tree) -> GatherSequence:
    """The door of a sub-layer or block, with its own rule behind it."""
    own = tree.style(path)
    if own is None or isinstance(own, (PrepareModuleInput, GatherSequence)):
        return GatherSequence(sequence_dim=SEQUENCE_DIM)
    if isinstance(own, _BEHIND_DOORS):
        return GatherSequence(sequence_dim=SEQUENCE_DIM, inner=own)
    raise PlanError(
        f"{path} is {type(own).__name__}, and sits where the stream is cut on the sequence: sequence parallelism "
        "cannot be derived for it; write the sequence-parallel plan yourself"
    )


def _has_streams(path: str, tree: Tree) -> bool:
    """Whether a module joins several residual streams or parts them (hyper-connections, arXiv:2409.19606)."""
    name = f"{path} {type(tree.modules[path]).__name__}".lower()
    return "hyper" in name and bool(tree.filled(path.rpartition(".")[0]) & {path.rpartition(".")[2]})


def _is_norm(path: str, tree: Tree) -> bool:
    """Whether a module is a norm on the stream, judged by its class's name and its vectors."""
    module = tree.modules[path]
    vectors = all(parameter.ndim <= 1 for parameter in parameters_of(module).values())
    return "norm" in type(module).__name__.lower() and not tree.children[path] and vectors
