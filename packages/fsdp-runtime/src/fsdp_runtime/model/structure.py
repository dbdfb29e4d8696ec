"""Where a model keeps its blocks, embedding, head, other towers and heads, found structurally and asked once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_runtime._torch_compat import own_parameters
from fsdp_runtime.errors import ModelError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one block's attention.

    Args:
        query: query heads.
        key_value: key and value heads, fewer than ``query`` under grouped-query attention.
        dim: features a head.
    """

    query: int
    key_value: int
    dim: int


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a model, by their paths in it.

    Args:
        blocks: every block in the order of the model: those of a vision tower too.
        decoder: the blocks of the stack that the token embedding feeds; of several, the largest.
        towers: the branches that hold the other stacks: vision and audio towers, an encoder beside a decoder.
        embedding: the token embedding.
        head: the linear layer from hidden states to logits.
        heads: by block, for blocks with attention.
    """

    blocks: Mapping[str, nn.Module]
    decoder: tuple[str, ...]
    towers: tuple[str, ...] = ()
    embedding: str | None = None
    head: str | None = None
    heads: Mapping[str, AttentionHeads] = field(default_factory=dict)

    @property
    def last_block(self) -> nn.Module:
        """The block that forward runs last and backward first."""
        return self.blocks[self.decoder[-1]]


def inspect_model(model: nn.Module) -> ModelStructure:
    """Find a model's parts by structure; names and classes do not matter.

    Blocks are the members of the outermost containers whose members are themselves made of modules: of a
    ``ModuleList``, lists in a list included, and of a ``ModuleDict`` or ``Sequential`` whose members are all of one
    class.

    Raises:
        ModelError: the model has no such container.
    """
    stacks = dict(_stacks(model, ""))
    if not stacks:
        raise ModelError(
            f"{type(model).__name__} has no nn.ModuleList of blocks: blocks are the unit of sharding and "
            "checkpointing; keep the repeated layers in a ModuleList, or in a ModuleDict or Sequential of one class"
        )
    blocks = {path: block for stack in stacks.values() for path, block in stack.items()}
    embedding, head = _ends(model, blocks)
    # A tower can be the larger one; the decoder's stack lies beside the token embedding.
    decoder = max(stacks, key=lambda path: (_shared(path, embedding or ""), _size(stacks[path].values())))
    return ModelStructure(
        blocks=blocks,
        decoder=tuple(stacks[decoder]),
        towers=tuple(dict.fromkeys(_branch(path, decoder) for path in stacks if path != decoder)),
        embedding=embedding,
        head=head,
        heads={path: heads for path, block in blocks.items() if (heads := heads_of(block)) is not None},
    )


def heads_of(block: nn.Module) -> AttentionHeads | None:
    """The heads of the first attention in a block, from its widths; ``None`` where there is none to be seen."""
    for module in block.modules():
        dim = getattr(module, "head_dim", None)
        if not isinstance(dim, int) or dim < 1:
            continue
        groups = getattr(module, "num_key_value_groups", 1)
        if (keys := _width(module, "k_proj")) is not None:
            return AttentionHeads(keys // dim * groups, keys // dim, dim)
        for fused in ("qkv_proj", "qkv", "query_key_value"):
            if (width := _width(module, fused)) is not None:
                key_value = width // (dim * (groups + 2))
                return AttentionHeads(key_value * groups, key_value, dim)
        if (queries := _width(module, "q_proj")) is not None:  # keys come from another layer
            return AttentionHeads(queries // dim, queries // dim // groups, dim)
    return None


def _width(module: nn.Module, name: str) -> int | None:
    child = getattr(module, name, None)
    shape = _shape(child) if isinstance(child, nn.Module) else ()
    return shape[0] if len(shape) == 2 else None


def _stacks(module: nn.Module, path: str) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if members := _members(child, child_path):
            yield child_path, members
        else:
            yield from _stacks(child, child_path)


def _members(container: nn.Module, path: str) -> dict[str, nn.Module]:
    """The blocks in a container, those of containers inside it in their place; none where it holds other things."""
    found: dict[str, nn.Module] = {}
    children = list(container.named_children())
    if not isinstance(container, _CONTAINERS):
        return found
    for name, child in children:
        if type(child) in (nn.ModuleList, nn.ModuleDict):
            inner = _members(child, f"{path}.{name}")
            if not inner:
                return {}
            found.update(inner)
        elif any(child.children()):
            found[f"{path}.{name}"] = child
        else:
            return {}
    # What else keeps its parts in a dict or in sequence is a model, not a stack.
    alike = len({type(block) for block in found.values()}) == 1 and len(found) > 1
    return found if isinstance(container, nn.ModuleList) or alike else {}


def _ends(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[str | None, str | None]:
    """The token embedding and the head: what the model says, else the largest table and a layer of its shape."""
    inside = {module for block in blocks.values() for module in block.modules()}
    outside = {path: module for path, module in model.named_modules() if module not in inside}
    shapes = {path: shape for path, module in outside.items() if len(shape := _shape(module)) == 2}
    embedding = _told(model, outside, "get_input_embeddings")
    if embedding not in shapes:  # a vision model calls its patch projection so
        tables = [path for path in shapes if isinstance(outside[path], nn.Embedding)]
        embedding = max(tables, key=lambda path: shapes[path].numel(), default=None)
    head = _told(model, outside, "get_output_embeddings")
    if head is None and embedding is not None:
        like = [path for path in shapes if isinstance(outside[path], nn.Linear) and shapes[path] == shapes[embedding]]
        head = like[-1] if like else None
    return embedding, head


def _shape(module: nn.Module) -> torch.Size:
    weight = own_parameters(module).get("weight")
    return torch.Size() if weight is None else weight.shape


def _told(model: Any, modules: Mapping[str, nn.Module], getter: str) -> str | None:
    try:
        wanted = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return next((path for path, module in modules.items() if module is wanted), None)


def _branch(path: str, trunk: str) -> str:
    """The topmost part of ``path`` that does not hold ``trunk`` too."""
    return ".".join(path.split(".")[: _shared(path, trunk) + 1])


def _shared(one: str, other: str) -> int:
    """How many leading parts two paths have in common."""
    parts = zip(one.split("."), other.split("."), strict=False)
    return next((index for index, (left, right) in enumerate(parts) if left != right), 0)


def _size(modules: Any) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
