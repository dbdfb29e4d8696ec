"""Weights for verl's rollout: full tensors, adapters alone, shards, and changes since the last export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import stream_weights
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model import state_entries
from fsdp_runtime.sharded import WORDS, block_view
from fsdp_runtime.sync import ModelShards
from fsdp_runtime.trainers.verl import verl_api
from fsdp_runtime.weights import WeightExport, adapter_tensors

#: The name of the adapter that verl trains.
ADAPTER = "default"


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's factors in full, by peft's names on disk.  Collective."""
    for name, tensor in adapter_tensors(model, state_entries(model), ADAPTER).items():
        full = tensor.detach()
        yield name, full.full_tensor() if isinstance(full, DTensor) else full


def base_weights(model: Any, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under an adapter, by the names of a rollout with adapters.  Collective."""
    # A rollout with adapters wraps the adapted layers: vLLM's loader takes ``….base_layer.weight`` for these.
    config = model.peft_config[ADAPTER]
    with model.disable_adapter():
        for name, tensor in stream_weights(model, dtype=dtype):
            yield verl_api.replace_lora_wrapper(name, config), tensor


class Shards:
    """This rank's blocks of the checkpoint's tensors, and their changes since a snapshot."""

    # Blocks that several ranks hold are sent by the first of these. The gathering group of verl's checkpoint engine is
    # the world in every entry, so that all ranks pass the same entries in the same order.

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._shards = ModelShards(model, export=WeightExport(dtype=dtype or torch.bfloat16))
        self._rank = dist.get_rank()
        self._sent: dict[tuple[str, int], Tensor] = {}
        self._is_primed = False

    def blocks(self) -> Iterator[tuple[str, int, Tensor, verl_api.BlockPlacement, bool]]:
        """Yield each block's name, number, values, place and whether this rank sends it, in one order on all ranks."""
        # A tensor has as many entries as the most blocks on a rank; a rank with fewer blocks yields empty entries.
        self._shards.refresh()
        layout, local = self._shards.layout, self._shards.local
        for name, tensor in layout.tensors.items():
            shape, dtype = tuple(tensor.shape), getattr(torch, tensor.dtype)
            owner: dict[Any, int] = {}
            own, counts = [], dict[int, int]()
            for block in layout.blocks(name):
                owner[block.box] = min(block.rank, owner.get(block.box, block.rank))
                counts[block.rank] = counts.get(block.rank, 0) + 1
                if block.rank == self._rank:
                    own.append(block)
            for number in range(max(counts.values())):
                if number >= len(own):
                    nothing = verl_api.BlockPlacement((0,) * len(shape), (0,) * len(shape), shape)
                    device = next(iter(local.values())).device
                    yield name, number, torch.empty(0, dtype=dtype, device=device), nothing, False
                    continue
                block = own[number]
                values = block_view(local, name, block, block.box).to(dtype).reshape(-1)
                sizes = tuple(stop - start for start, stop in block.box)
                place = verl_api.BlockPlacement(sizes, tuple(start for start, _ in block.box), shape)
                yield name, number, values, place, owner[block.box] == self._rank

    def specs(self) -> Iterator[tuple[str, Tensor, verl_api.ShardSpec]]:
        """Yield ``(name, values, ShardSpec)``, the entries of ``get_per_tensor_param_shard``."""
        for name, _, values, place, sends in self.blocks():
            spec = verl_api.ShardSpec(place.full_shape, place=place, gather_group=dist.group.WORLD, contributes=sends)
            yield name, values, spec

    def remember(self) -> None:
        """Take the present values as the rollout's values."""
        for name, number, values, _, sends in self.blocks():
            if sends:
                self._keep(name, number, values)
        self._is_primed = True

    def changes(self) -> Iterator[tuple[Any, ...]]:
        """Yield ``(slots, dtype, counts, indices, values, group)``: changes, in the flat tensors' coordinates."""
        if not self._is_primed:  # on every rank, also where a peer sends its blocks
            raise OptionError(
                "no weights were sent in full, so that nothing says what changed: call prime_delta_snapshots() first"
            )
        for name, number, values, place, sends in self.blocks():
            index = torch.empty(0, dtype=torch.int64, device=values.device)
            if sends:
                index = _differing(values, self._sent[name, number].to(values.device))
                self._keep(name, number, values)
            where = (verl_api.translate_flat_indices(index, place) if len(index) else index).to(torch.int32)
            dtype = str(values.dtype).removeprefix("torch.")
            yield [(name, place.full_shape)], dtype, torch.tensor([len(index)]), where, values[index], dist.group.WORLD

    def _keep(self, name: str, number: int, values: Tensor) -> None:
        kept = self._sent.get((name, number))
        if kept is None:
            kept = self._sent[name, number] = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        kept.copy_(values)


def _differing(values: Tensor, before: Tensor) -> Tensor:
    """Return the indices of elements with different bits; a changed sign of zero counts, and NaN does."""
    bits = WORDS[values.element_size()]
    return (values.view(bits) != before.view(bits)).nonzero().squeeze(-1)
