"""Blocks, token embedding and head of a model, as modules: a view of ``tp_plans.model_tree.ModelTree``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from fsdp_runtime.errors import ModelError
from tp_plans.model_tree import ModelTree
from tp_plans.naming import FUSED_QKV, HEAD_DIM, KEY, KV_GROUPS, QUERY


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one block's attention."""

    query: int  # number of query heads
    key_value: int  # number of key and value heads, fewer than ``query`` under grouped-query attention
    dim: int  # features per head


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """The parts of a model, found by structure; the result of :func:`inspect_model`."""

    tree: ModelTree  # the model's modules and parameters by path

    @cached_property
    def blocks(self) -> Mapping[str, nn.Module]:
        """Every block by path, in model order; the blocks of a vision tower are included."""
        return {path: self.tree.modules[path] for path in self.tree.blocks}

    @property
    def decoder(self) -> tuple[str, ...]:
        """The block paths of the stack that the token embedding feeds; the largest stack, if it feeds several."""
        return self.tree.decoder_blocks

    @property
    def embedding(self) -> str | None:
        """The path of the token embedding."""
        return self.tree.embedding

    @property
    def lm_head(self) -> str | None:
        """The path of the linear layer from hidden states to logits."""
        return self.tree.lm_head

    @cached_property
    def heads(self) -> Mapping[str, AttentionHeads]:
        """The attention heads by block, for blocks with attention."""
        heads_by_path = {path: self.heads_below(path) for path in self.tree.blocks}
        return {path: heads for path, heads in heads_by_path.items() if heads is not None}

    def heads_below(self, module: str) -> AttentionHeads | None:
        """Return the heads of the first attention in a module, from its widths."""
        for path in (module, *self.tree.below(module)):
            dim = getattr(self.tree.modules[path], HEAD_DIM, None)
            if not isinstance(dim, int) or dim < 1:
                continue
            groups = getattr(self.tree.modules[path], KV_GROUPS, 1)
            if (keys := self.tree.size(f"{path}.{KEY}", 0)) is not None:
                return AttentionHeads(keys // dim * groups, keys // dim, dim)
            for fused in FUSED_QKV:
                if (width := self.tree.size(f"{path}.{fused}", 0)) is not None:
                    key_value = width // (dim * (groups + 2))
                    return AttentionHeads(key_value * groups, key_value, dim)
            if (queries := self.tree.size(f"{path}.{QUERY}", 0)) is not None:  # keys come from another layer
                return AttentionHeads(queries // dim, queries // dim // groups, dim)
        return None


def inspect_model(model: nn.Module) -> ModelStructure:
    """Find a model's blocks, token embedding and head by structure, on any device; class names do not matter.

    Blocks are the members of the outermost containers of modules with submodules.  A container is a ``ModuleList``,
    nested lists included, or a ``ModuleDict`` or ``Sequential`` with members of one class.

    Raises:
        ModelError: the model has no such container.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.model import inspect_model
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]), nn.Linear(4, 8))
        >>> structure = inspect_model(model)
        >>> structure.decoder, structure.embedding, structure.lm_head
        (('1.0',), '0', '2')
    """
    tree = ModelTree.of(model)
    if not tree.blocks:
        raise ModelError(
            f"{type(model).__name__} has no nn.ModuleList of blocks: blocks are the unit of sharding and "
            "checkpointing; keep the repeated layers in a ModuleList, or in a ModuleDict or Sequential of one class"
        )
    return ModelStructure(tree)
