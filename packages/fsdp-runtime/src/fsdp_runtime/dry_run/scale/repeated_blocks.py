"""Find the identical blocks of a model, and copy the model with fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_runtime.model import ModelStructure, inspect_model
from fsdp_runtime.swaps import swapped

#: Attributes that hold a block's index and do not change its computation.
_INDEX_ATTRS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
_COUNT_ATTRS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")

#: Repeated blocks in the smaller trace: the first and the last block have other neighbours that FSDP2 gathers at
#: the same time than inner blocks, so at least one inner block is needed.
_MIN_BLOCKS = 3


@dataclass(frozen=True)
class RepeatedBlocks:
    """The part of a stack of blocks in which a group of blocks repeats."""

    blocks: int  # number of blocks of the stack
    start: int  # index of the first repeated block
    period: int  # number of blocks of a group
    count: int  # number of consecutive groups
    margin: int = 0  # further blocks at each end with other neighbours: activations leave the device a block late

    @property
    def min_count(self) -> int:
        """Number of groups that the smaller trace keeps."""
        return max(2, -(-(_MIN_BLOCKS + 2 * self.margin) // self.period))

    @property
    def inner(self) -> int:
        """Index of a group that all others between the ends equal."""
        return 1 + self.margin // self.period

    @property
    def saves_work(self) -> bool:
        """Whether two traces run fewer blocks than the model has."""
        return self.num_blocks(self.min_count) + self.num_blocks(self.min_count + 1) < self.blocks

    def num_blocks(self, count: int) -> int:
        """Return the number of blocks of the stack with ``count`` groups."""
        return self.blocks - (self.count - count) * self.period

    def block_indices(self, count: int) -> list[int]:
        """Return the indices of the blocks in ``count`` groups."""
        end = self.start + count * self.period
        return [*range(end), *range(end + (self.count - count) * self.period, self.blocks)]


@dataclass(frozen=True)
class TracedModel:
    """A model and its structure."""

    model: nn.Module
    structure: ModelStructure

    def copy(self) -> TracedModel:
        """Return a copy of the model with the structure of the copy."""
        model = copy.deepcopy(self.model)
        return TracedModel(model, inspect_model(model))

    def with_blocks(self, indices: Sequence[int]) -> TracedModel:
        """Return a copy (on the meta device) with some of the decoder's blocks; per-layer lists of configs follow."""
        structure = self.structure
        parent_path, _, _ = structure.decoder[0].rpartition(".")
        owner_path, _, name = parent_path.rpartition(".")
        blocks = nn.ModuleList([structure.blocks[structure.decoder[index]] for index in indices])
        with swapped(self.model.get_submodule(owner_path), **{name: blocks}):
            model = copy.deepcopy(self.model)
        _renumber(model.get_submodule(parent_path), indices)
        for config in _configs(model):
            _shorten(config, indices, len(structure.decoder))
        return TracedModel(model, inspect_model(model))


def find_repeated_blocks(structure: ModelStructure, margin: int = 0) -> RepeatedBlocks | None:
    """Return the longest repetition among the decoder's blocks; ``None`` if there is none, or several containers."""
    if len({path.rpartition(".")[0] for path in structure.decoder}) != 1:
        return None
    kinds_by_signature: dict[Any, int] = {}
    kinds = [
        kinds_by_signature.setdefault(block_signature(structure.blocks[path]), len(kinds_by_signature))
        for path in structure.decoder
    ]
    repetitions = [
        _repetition_at(kinds, start, period, margin)
        for period in range(1, len(kinds) // 2 + 1)
        for start in range(len(kinds) - 2 * period + 1)
    ]
    return max(
        (item for item in repetitions if item is not None),
        key=lambda item: (item.count * item.period, -item.period, -item.start),
        default=None,
    )


def block_signature(block: nn.Module) -> Any:
    """Return the classes, shapes, dtypes and plain attributes of a block's modules, which define its computation."""
    return tuple(
        (
            path,
            type(module),
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
            tuple((n, tuple(b.shape), b.dtype) for n, b in module.named_buffers(recurse=False)),
            tuple(sorted((n, repr(v)) for n, v in vars(module).items() if n not in _INDEX_ATTRS and _is_plain(v))),
        )
        for path, module in block.named_modules()
    )


def _repetition_at(kinds: Sequence[int], start: int, period: int, margin: int) -> RepeatedBlocks | None:
    end = start + period
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    count = (end - start) // period
    return RepeatedBlocks(len(kinds), start, period, count, margin) if count > 1 else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _renumber(blocks: nn.Module, indices: Sequence[int]) -> None:
    for new, (old, block) in enumerate(zip(indices, blocks.children(), strict=True)):
        for module in block.modules():
            for name in _INDEX_ATTRS:
                if getattr(module, name, None) == old:
                    setattr(module, name, new)


def _configs(model: nn.Module) -> list[Any]:
    """Return every config of the modules, and the configs inside those, once."""
    configs: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "__dict__"):
            configs[id(config)] = config
            waiting += [inner for inner in vars(config).values() if hasattr(inner, "num_hidden_layers")]
    return list(configs.values())


def _shorten(config: Any, indices: Sequence[int], blocks: int) -> None:
    values: Mapping[str, Any] = dict(vars(config))
    if not any(values.get(name) == blocks for name in _COUNT_ATTRS):
        return
    for name, value in values.items():
        if isinstance(value, list) and len(value) == blocks:
            vars(config)[name] = [value[index] for index in indices]
        elif name in _COUNT_ATTRS and value == blocks:
            vars(config)[name] = len(indices)
