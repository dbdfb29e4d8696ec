"""Weights for verl's rollout: full tensors, adapters alone, shards, and changes since the last export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_runtime import stream_weights
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model import state_entries
from fsdp_runtime.sharded import block_view
from fsdp_runtime.sync import ModelShards
from fsdp_runtime.trainers.logits import full
from fsdp_runtime.trainers.verl import verl_api
from fsdp_runtime.weights import WeightExport, adapter_tensors

#: The name of the adapter that verl trains.
ADAPTER = "default"


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's factors in full, by peft's names on disk.  Collective."""
    for name, tensor in adapter_tensors(model, state_entries(model), ADAPTER).items():
        yield name, full(tensor.detach())


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
        self._snapshots: dict[tuple[str, int], Tensor] = {}

    def specs(self) -> Iterator[tuple[str, Tensor, verl_api.ShardSpec]]:
        """Yield ``(name, values, ShardSpec)``, the entries of ``get_per_tensor_param_shard``."""
        return ((name, values, spec) for (name, _), values, spec in self._blocks())

    def remember(self) -> None:
        """Take the present values as the rollout's values."""
        verl_api.prime_delta_snapshots(self._sent(), self._snapshots, pin=torch.cuda.is_available())

    def changes(self) -> Iterator[tuple[Any, ...]]:
        """Yield ``(slots, dtype, counts, indices, values, group)``: changes, in the flat tensors' coordinates."""
        if not self._snapshots:
            raise OptionError(
                "no weights were sent in full, so that nothing says what changed: call prime_delta_snapshots() first"
            )
        return verl_api.hf_delta_export(self._sent(), self._snapshots, _change)

    def _sent(self) -> Iterator[tuple[tuple[str, int], Tensor, verl_api.ShardSpec]]:
        """Yield all blocks; a block that a peer sends is empty."""
        return ((key, values if spec.contributes else values[:0], spec) for key, values, spec in self._blocks())

    def _blocks(self) -> Iterator[tuple[tuple[str, int], Tensor, verl_api.ShardSpec]]:
        """Yield each block's name and number, its values and ``ShardSpec``, in one order on all ranks."""
        # A tensor has as many entries as the most blocks on a rank; a rank with fewer blocks yields empty entries.
        self._shards.refresh()
        layout, local = self._shards.layout, self._shards.local
        device = next(iter(local.values())).device
        for name, tensor in layout.tensors.items():
            shape, dtype = tuple(tensor.shape), getattr(torch, tensor.dtype)
            blocks = layout.blocks(name)
            own = [block for block in blocks if block.rank == self._rank]
            for number in range(max(Counter(block.rank for block in blocks).values())):
                values, sends = torch.empty(0, dtype=dtype, device=device), False
                place = verl_api.BlockPlacement((0,) * len(shape), (0,) * len(shape), shape)
                if number < len(own):
                    block = own[number]
                    values = block_view(local, name, block, block.box).to(dtype).reshape(-1)
                    sizes = tuple(stop - start for start, stop in block.box)
                    place = verl_api.BlockPlacement(sizes, tuple(start for start, _ in block.box), shape)
                    sends = self._rank == min(other.rank for other in blocks if other.box == block.box)
                spec = verl_api.ShardSpec(shape, place=place, gather_group=dist.group.WORLD, contributes=sends)
                yield (name, number), values, spec


def _change(
    key: tuple[str, int], spec: verl_api.ShardSpec, place: verl_api.BlockPlacement, indices: Tensor, values: Tensor
) -> tuple[Any, ...]:
    """Return the changes of one block as verl's checkpoint engine takes them."""
    where = (verl_api.translate_flat_indices(indices, place) if len(indices) else indices).to(torch.int32)
    dtype = str(values.dtype).removeprefix("torch.")
    return [(key[0], spec.full_shape)], dtype, torch.tensor([len(indices)]), where, values
