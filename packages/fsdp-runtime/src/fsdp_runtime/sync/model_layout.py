"""The layout of a model's shards under its checkpoint's names, and the shards' local tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import BASE
from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime._transformers_compat.dtypes import kept_dtypes
from fsdp_runtime.errors import ConversionError, OptionError
from fsdp_runtime.sharded import BoxOwners, ModelState, all_gather_objects, identity_chunk, own_rank, stored_part
from fsdp_runtime.sync.quantized_shards import QuantizedShards
from fsdp_runtime.weights import ExportedTensor, ExportGroup, HeldTensors, MergedShards, WeightExport, saved_tensors
from tp_plans.transfer import CheckpointTensor, StoredBlock, TransferLayout


class ModelShards:
    """A model's shards as one side of a transfer: the layout of all ranks, and this rank's local tensors.

    ``layout`` has the blocks of checkpoint tensors on each rank of the world.  It is equal on every rank of the model's
    mesh, without communication.  Exception: pipeline stages exchange their blocks, so every rank builds the object.
    The local tensors are the model's own storage: training changes their values, and a transfer into them changes the
    model.

    With ``quantize``, and for weights with active adapters, the local tensors are copies of this rank's shards, in low
    precision or with the adapters merged.  :meth:`refresh` updates the copies.  Pass the object as ``source`` to
    :func:`execute_transfer`, :class:`WeightSync` or :func:`verify_transfer`: they refresh it.

    Args:
        model: plain, sharded over ``tp`` or ``ep``, sharded by FSDP2, or several of these.
        export: names, dtype and precision of the weights; with ``quantize``, shards of the quantized full weights.
            ``bucket_bytes`` has no effect, as nothing is gathered.
        adapter: send only this adapter of a ``PeftModel``: the tensors that peft saves, under the names in
            ``adapter_model.safetensors``; ``names`` then has no effect.  Without it, active adapters are merged.

    Raises:
        ConversionError: an exported tensor is computed from the model's tensors, not rearranged from their blocks.
        OptionError: active adapters cannot be merged, or the model has no such adapter; ``dtype`` is not a
            floating-point dtype, ``names`` is unknown, or shards cannot be quantized.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.sync import ModelShards
        >>> shards = ModelShards(nn.Linear(2, 3))
        >>> shards.layout.blocks("weight")[0].box, shards.local["weight"].shape
        (((0, 3), (0, 2)), torch.Size([3, 2]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        export: WeightExport = WeightExport(),
        adapter: str | None = None,
    ) -> None:
        state = ModelState(model)
        quantize = export.quantize
        if adapter is None:
            prepared = export.prepare(state)
            groups, quantize = prepared.groups, prepared.options.quantize
        else:
            groups = _adapter_groups(state, adapter, export.exported_dtype)
        self._held = HeldTensors(model, state.entries)
        own, stages = own_rank(), state.stages
        everyone = [own] if state.mesh is None else state.mesh.mesh.flatten().tolist()
        members = everyone if stages is None else stages.own
        tensors: dict[str, CheckpointTensor] = {}
        blocks: dict[str, list[StoredBlock]] = {}
        local: dict[str, Tensor] = {}
        owners = BoxOwners(members)
        for group in groups:
            if converted := next((item.name for item in group.tensors if item.chunks is None), None):
                raise ConversionError(
                    f"{converted} is computed from the model's tensors, not a rearrangement of blocks of them: send it "
                    'with stream_weights, or use names="model"'
                )
            for item in group.tensors:
                tensors[item.name] = CheckpointTensor(item.shape, str(item.dtype).removeprefix("torch."))
                blocks[item.name] = []
            if group.ranks is not None and own not in group.ranks:
                continue
            local |= {name: local_tensor(group.sources[name]).detach() for name in group.dtypes}  # without factors
            for item in group.tensors:
                blocks[item.name] = [
                    replace(block, rank=rank)
                    for chunk in item.chunks or ()
                    for held, ranks in owners.near(group.sources[chunk.source], chunk.source_box)
                    for block in stored_part(chunk, ranks[0], held)
                    for rank in ranks
                    if stages is None or rank in members
                ]
        if stages is not None:
            of_stages = all_gather_objects(stages.line, blocks).values()
            blocks = {name: [block for stage in of_stages for block in stage[name]] for name in tensors}
        merged = MergedShards(
            [group for group in groups if group.ranks is None or own in group.ranks], exact=quantize is not None
        )
        self.layout = TransferLayout(tensors, blocks)
        self.storage = {**local, **merged.local}  # ``local``; merged and quantized copies may lack values
        self._derived: list[MergedShards | QuantizedShards] = [merged] if merged.local else []
        if quantize is not None:
            quantized = QuantizedShards(self.layout, self.storage, quantize, own, state.ranks.groups)
            self.layout, self.storage = quantized.layout, quantized.local
            self._derived.append(quantized)
        self._is_fresh = not self._derived

    @property
    def local(self) -> dict[str, Tensor]:
        """This rank's local tensors; the layout's blocks name them.

        Raises:
            OptionError: copies lack values before :meth:`refresh`, or the model's tensors or adapters were replaced.
        """
        self._require_same_tensors()
        if not self._is_fresh:
            raise OptionError(
                "the merged or quantized shards hold no values yet: call refresh() on every rank of the model, and "
                "again after each step, or give the ModelShards itself as source"
            )
        return self.storage

    def refresh(self) -> None:
        """Update the merged and quantized copies from the current weights.  Collective over the model's ranks.

        Raises:
            OptionError: the model's tensors or adapters were replaced.
        """
        self._require_same_tensors()
        for copies in self._derived:
            copies.refresh()
        self._is_fresh = True

    def _require_same_tensors(self) -> None:
        difference = self._held.difference()
        if difference is not None:
            raise OptionError(
                f"{difference} since these shards were listed, as by load_state_dict(assign=True), .to() or "
                "disable_adapter(): make a new ModelShards, and plan the transfer with it"
            )


def present_tensors(side: Mapping[str, Tensor] | ModelShards | None) -> Mapping[str, Tensor]:
    """Return the local tensors of one side of a transfer, with a model's current values."""
    if isinstance(side, ModelShards):
        side.refresh()
        return side.local
    return side or {}


def _adapter_groups(state: ModelState, adapter: str, dtype: torch.dtype | None) -> list[ExportGroup]:
    """Return one export group per adapter tensor, under the tensor's name."""
    tensors = saved_tensors(state.model, state.whole, adapter, embeddings=False)
    groups, copies = [], {name: name.removeprefix(f"{BASE}.") for name in tensors if ".lora_" not in name}
    kept = {} if dtype is None else kept_dtypes(state.base.module, copies.values(), dtype)
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        rounded = kept.get(copies.get(name, ""), dtype)
        exported = rounded if rounded and tensor.is_floating_point() else tensor.dtype
        item = ExportedTensor(name, exported, shape, [identity_chunk(name, shape)])
        groups.append(ExportGroup({name: tensor}, [item], None, {}, {name: exported}, state.holders[id(tensor)]))
    return groups
