"""Where a model keeps its blocks, found structurally and asked once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fsdp_runtime.errors import ModelError


@dataclass(frozen=True)
class Anatomy:
    """The repeated parts of a model.

    Args:
        blocks: every block by its path, in the order of the model: those of a vision tower too.
        decoder: the paths of the blocks of the largest stack, which runs last.
    """

    blocks: dict[str, nn.Module]
    decoder: tuple[str, ...]

    @property
    def last_block(self) -> nn.Module:
        """The block that forward runs last and backward first."""
        return self.blocks[self.decoder[-1]]


def anatomy_of(model: nn.Module) -> Anatomy:
    """Find a model's blocks: the children of its outermost module lists that are themselves made of modules.

    Raises:
        ModelError: the model has no such list.
    """
    stacks = dict(_stacks(model, ""))
    if not stacks:
        raise ModelError(
            f"{type(model).__name__} has no nn.ModuleList of blocks: blocks are the unit of sharding and "
            "checkpointing; keep the repeated layers in a ModuleList"
        )
    largest = max(stacks, key=lambda path: sum(p.numel() for p in stacks[path].parameters()))
    blocks = {f"{path}.{name}": block for path, stack in stacks.items() for name, block in stack.named_children()}
    return Anatomy(blocks, tuple(f"{largest}.{name}" for name, _ in stacks[largest].named_children()))


def _stacks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and all(any(block.children()) for block in child) and len(child):
            yield child_path, child
        else:
            yield from _stacks(child, child_path)
