"""Which blocks of a model are identical, and the model with fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_runtime._torch_compat import children
from fsdp_runtime.model.structure import inspect_model

#: Attributes that say where a block stands, not what it computes.
_INDICES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")

#: Repetitions of a period that the smaller trace has: the first and the last block differ from those between them in
#: what FSDP2 gathers beside them, so that some of each kind must stand between.
_KEPT_BLOCKS = 3


@dataclass(frozen=True)
class Repetition:
    """The stretch of a stack of blocks in which a group of blocks repeats.

    Args:
        blocks: how many blocks the stack has.
        start: the place of the first one that repeats.
        period: how many blocks make a group.
        times: how often the group comes, one after the other.
    """

    blocks: int
    start: int
    period: int
    times: int

    @property
    def least(self) -> int:
        """How many groups the smaller trace keeps."""
        return max(2, -(-_KEPT_BLOCKS // self.period))

    @property
    def worthwhile(self) -> bool:
        """Whether two traces run fewer blocks than the model has."""
        return self.traced(self.least) + self.traced(self.least + 1) < self.blocks

    def traced(self, times: int) -> int:
        """How many blocks are left with so many groups."""
        return self.blocks - (self.times - times) * self.period

    def kept(self, times: int) -> list[int]:
        """The places of those blocks."""
        cut = self.start + times * self.period
        return [*range(cut), *range(cut + (self.times - times) * self.period, self.blocks)]


def repetition(model: nn.Module) -> Repetition | None:
    """The longest repetition among the decoder's blocks, by structure; ``None`` where they are not one list's."""
    anatomy = inspect_model(model)
    if len({path.rpartition(".")[0] for path in anatomy.decoder}) != 1:
        return None
    names: dict[Any, int] = {}
    kinds = [names.setdefault(signature(anatomy.blocks[path]), len(names)) for path in anatomy.decoder]
    found = [
        _from(kinds, start, period)
        for period in range(1, len(kinds) // 2 + 1)
        for start in range(len(kinds) - 2 * period + 1)
    ]
    return max(
        (item for item in found if item is not None),
        key=lambda item: (item.times * item.period, -item.period, -item.start),
        default=None,
    )


def signature(block: nn.Module) -> Any:
    """All that tells what a block computes: classes, shapes, dtypes and plain attributes of its modules."""
    return tuple(
        (
            path,
            type(module),
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
            tuple((n, tuple(b.shape), b.dtype) for n, b in module.named_buffers(recurse=False)),
            tuple(sorted((n, repr(v)) for n, v in vars(module).items() if n not in _INDICES and _plain(v))),
        )
        for path, module in block.named_modules()
    )


def with_blocks(model: nn.Module, kept: Sequence[int]) -> nn.Module:
    """A copy of a model (on the meta device) with some of its decoder's blocks; per-layer lists of configs follow."""
    anatomy = inspect_model(model)
    parent_path, _, _ = anatomy.decoder[0].rpartition(".")
    owner_path, _, name = parent_path.rpartition(".")
    owner = model.get_submodule(owner_path)
    everything = children(owner)[name]
    children(owner)[name] = nn.ModuleList([anatomy.blocks[anatomy.decoder[index]] for index in kept])
    try:
        fewer = copy.deepcopy(model)
    finally:
        children(owner)[name] = everything
    _renumber(fewer.get_submodule(parent_path), kept)
    for config in _configs(fewer):
        _shorten(config, kept, len(anatomy.decoder))
    return fewer


def _from(kinds: Sequence[int], start: int, period: int) -> Repetition | None:
    end = start + period
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    times = (end - start) // period
    return Repetition(len(kinds), start, period, times) if times > 1 else None


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _renumber(blocks: nn.Module, kept: Sequence[int]) -> None:
    for new, (old, block) in enumerate(zip(kept, blocks.children(), strict=True)):
        for module in block.modules():
            for name in _INDICES:
                if getattr(module, name, None) == old:
                    setattr(module, name, new)


def _configs(model: nn.Module) -> list[Any]:
    """Every config that modules hold, and those inside them, once."""
    found: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__"):
            found[id(config)] = config
            waiting += [inner for inner in vars(config).values() if hasattr(inner, "num_hidden_layers")]
    return list(found.values())


def _shorten(config: Any, kept: Sequence[int], blocks: int) -> None:
    values: Mapping[str, Any] = dict(vars(config))
    if not any(values.get(name) == blocks for name in _COUNTS):
        return
    for name, value in values.items():
        if isinstance(value, list) and len(value) == blocks:
            vars(config)[name] = [value[index] for index in kept]
        elif name in _COUNTS and value == blocks:
            vars(config)[name] = len(kept)
