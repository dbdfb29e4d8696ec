"""A sharded model's weights for vLLM's trainer engines: full tensors, or local shards with placements.

vLLM 0.32 calls ``metadata()`` and iterates over the source; 0.33 reads ``metadata`` and calls ``iter_full()`` or
``iter_local()``.  One class serves both.  Without vLLM, or with an older one, the class has no base class.
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor, nn

from fsdp_runtime.errors import ConversionError, OptionError
from fsdp_runtime.model import without_inference_mode
from fsdp_runtime.sharded import WeightInfo, block_view, own_rank
from fsdp_runtime.sync.model_layout import ModelShards
from fsdp_runtime.weights import HeldTensors, WeightExport
from tp_plans import Replicate, Shard
from tp_plans.boxes import box_shape, mesh_boxes, volume
from tp_plans.transfer import TransferLayout

_base: Any = None
with suppress(ImportError):
    _base = import_module("vllm.distributed.weight_transfer.base")
if not hasattr(_base, "WeightSource"):  # a vLLM before 0.32
    _base = None

_Base: Any = object if _base is None else _base.WeightSource


#: The fields of vLLM's ``ParamMeta``, for use without vLLM.
_ParamMeta = namedtuple("_ParamMeta", "name dtype shape owners mesh_shape placements", defaults=(None, None, None))


class _Metadata(list[Any]):
    """A list that returns itself when called: an attribute for vLLM 0.33, and a method for 0.32."""

    def __call__(self) -> _Metadata:
        return self


class WeightSource(_Base):
    """A model's weights under its checkpoint's names, for vLLM's ``WeightTransferTrainerFactory.trainer_init``.

    vLLM's own ``ModuleSource`` sends ``named_parameters()``.  This source also renames, divides and merges tensors to
    the checkpoint's form (experts one by one, fused matrices split), sends a tied weight once, casts before it gathers,
    and gathers a bucket at a time.  Every rank of the model creates a source and iterates in the same order; rank
    numbers refer to the default process group.  Each pass reads the model's current tensors and adapters.

    A tensor is declared as shards (``iter_local``) if its blocks, in the order of the ranks, match one or two mesh
    axes; any other tensor is gathered and declared replicated.

    Args:
        model: plain, or sharded by ``parallelize``.
        export: options of the export; vLLM expects the names of the checkpoint.  With
            ``quantize``, only full tensors are available.

    Raises:
        ConversionError, OptionError: as :class:`WeightExport`.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.sync import WeightSource
        >>> source = WeightSource(nn.Linear(2, 3))
        >>> [(meta.name, meta.shape) for meta in source.metadata] == [(m.name, m.shape) for m in source.metadata()]
        True
        >>> [name for name, tensor in source.iter_full()]
        ['weight', 'bias']
    """

    #: Whether all ranks of the model iterate together; ``False`` if this rank alone holds all weights.
    is_collective = True

    def __init__(self, model: nn.Module, *, export: WeightExport = WeightExport()) -> None:
        self._model, self._options, self._held = model, export, HeldTensors(model)
        self._export = export.prepare(model)
        self._shards, self._declared = _shards(model, export), self._export.metadata()

    @property
    def weights(self) -> list[WeightInfo]:
        """Names, dtypes and full shapes in the order of the iterations."""
        return self._declared

    def _prepare(self) -> None:
        """Prepare again if the model's tensors or adapters were replaced since the last pass."""
        if self._held.difference() is None:
            return
        held = HeldTensors(self._model)
        export = self._options.prepare(self._model)
        for declared, exported in itertools.zip_longest(self._declared, export.metadata()):
            if declared != exported:
                was, now = (
                    f"{each.name} {each.dtype} {each.shape}" if each else "nothing" for each in (declared, exported)
                )
                raise OptionError(f"{was} was declared, and the model has {now}: make a new WeightSource of it")
        self._export, self._shards, self._held = export, _shards(self._model, self._options), held

    @cached_property
    def metadata(self) -> _Metadata:
        """One vLLM ``ParamMeta`` per weight, equal on every rank; also callable, as vLLM 0.32 does."""
        return _Metadata(self._meta(weight) for weight in self.weights)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.iter_full()

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as a full tensor, on every rank; collective over the model's ranks."""
        self._prepare()
        return self._export.stream()

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every weight, as ``metadata`` declares it; collective if a weight is gathered."""
        self._prepare()
        return without_inference_mode(self._iter_local())

    def implements_iter_full(self) -> bool:
        """Whether full tensors are available."""
        return True

    def implements_iter_local(self) -> bool:
        """Whether shards are available: not for quantized weights, nor for computed outputs of a conversion."""
        return self._shards is not None

    def _iter_local(self) -> Iterator[tuple[str, Tensor]]:
        if self._shards is None:
            raise OptionError("these weights are computed from full tensors: iterate with iter_full()")
        self._shards.refresh()
        rank = own_rank()
        for group in self._export.groups:
            gathered: dict[str, Tensor] = {}
            if any(item.name not in self._placed for item in group.tensors):
                gathered = {item.name: tensor for item, tensor in self._export.gather([group])}
            for item in group.tensors:
                if item.name in self._placed:
                    (block,) = self._shards.layout.stored(rank, item.name)
                    local = block_view(self._shards.local, item.name, block, block.box)
                    yield item.name, local.to(item.dtype).contiguous()
                else:
                    yield item.name, gathered.pop(item.name)

    @cached_property
    def _placed(self) -> dict[str, MeshPlacement]:
        """Placements by weight name; weights that placements cannot express are absent."""
        if self._shards is None:
            return {}
        world = dist.get_world_size() if dist.is_initialized() else 1
        layout = self._shards.layout
        placements = {name: mesh_placement(layout, name, world) for name in layout.tensors}
        return {name: placement for name, placement in placements.items() if placement is not None}

    def _meta(self, weight: WeightInfo) -> Any:
        make: Any = _ParamMeta if _base is None else _base.ParamMeta
        placement = self._placed.get(weight.name)
        if placement is None or (_base is not None and not hasattr(_base, "Shard")):  # 0.32 has no placements
            return make(weight.name, weight.dtype, weight.shape)
        kinds: Any = torch.distributed.tensor if _base is None else _base
        return make(
            weight.name,
            weight.dtype,
            weight.shape,
            owners=tuple(range(math.prod(placement.mesh_shape))),
            mesh_shape=placement.mesh_shape,
            placements=tuple(kinds.Replicate() if dim is None else kinds.Shard(dim) for dim in placement.dims),
        )


def _shards(model: nn.Module, export: WeightExport) -> ModelShards | None:
    """The shards of the weights; ``None`` if weights are computed from full tensors."""
    if export.quantize is not None:
        return None
    try:
        return ModelShards(model, export=export)
    except (ConversionError, OptionError):
        return None


@dataclass(frozen=True)
class MeshPlacement:
    """One placement per axis of a row-major mesh over ranks from 0 on."""

    mesh_shape: tuple[int, ...]
    dims: tuple[int | None, ...]  # the dim that each axis shards in equal parts, ``None`` for a replicating axis


def mesh_placement(layout: TransferLayout, tensor: str, world_size: int) -> MeshPlacement | None:
    """Return the placement of a tensor's parts on all ranks; ``None`` if no mesh of two axes expresses them."""
    blocks = {block.rank: block.box for block in layout.blocks(tensor)}
    if world_size < 2 or len(layout.blocks(tensor)) != world_size or sorted(blocks) != list(range(world_size)):
        return None
    shape = layout.tensors[tensor].shape
    boxes = [blocks[rank] for rank in range(world_size)]
    if len({box_shape(box) for box in boxes}) > 1 or not volume(boxes[0]):  # vLLM's placements cut equal parts
        return None
    outer_sizes = (outer for outer in range(2, world_size) if world_size % outer == 0)
    # vLLM's shard transports read only one or two axes.
    for sizes in (*((outer, world_size // outer) for outer in outer_sizes), (world_size,)):
        for dims in itertools.product((None, *range(len(shape))), repeat=len(sizes)):
            layouts = [Replicate() if dim is None else Shard(dim) for dim in dims]
            if {*dims} != {None} and mesh_boxes(shape, sizes, layouts) == boxes:
                return MeshPlacement(sizes, dims)
    return None
