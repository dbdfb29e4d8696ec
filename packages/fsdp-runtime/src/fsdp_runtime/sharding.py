"""FSDP2: every block is a unit that is gathered for its own forward and backward, and the rest is the root."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fsdp_runtime.anatomy import Anatomy
from fsdp_runtime.errors import MeshError
from fsdp_runtime.mesh import axis_size

logger = logging.getLogger(__name__)

_RESHARDS = "_fsdp_runtime_reshards"


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How parameters are sharded over the data-parallel ranks.

    Args:
        mixed_precision: dtypes of gathered parameters, reduced gradients and outputs; ``None`` leaves every dtype
            as it is.
        cpu_offload: keep shards, gradients and optimizer state on the CPU between uses.
        reshard_after_forward: free a block's gathered parameters after its forward.  The last block and the root
            keep theirs, since backward needs them first.
    """

    mixed_precision: MixedPrecisionPolicy | None = None
    cpu_offload: bool = False
    reshard_after_forward: bool = True

    @property
    def asked(self) -> bool:
        """Whether anything here needs FSDP even where a single rank holds all shards."""
        return self.mixed_precision is not None or self.cpu_offload


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The part of a mesh that FSDP uses: one axis of shards, or replicas times shards (HSDP); ``None`` without."""
    names = mesh.mesh_dim_names or ()
    axes = [axis for axis in ("dp_replicate", "dp_shard") if axis in names]
    if len(axes) == 2 and axis_size(mesh, "dp_replicate") == 1:
        axes.remove("dp_replicate")
    if axes == ["dp_replicate"]:
        raise MeshError("the mesh has dp_replicate but no dp_shard: add dp_shard, of size 1 for replicas only")
    return mesh[tuple(axes)] if axes else None


def shard_over_data_parallel(
    model: nn.Module, mesh: DeviceMesh, anatomy: Anatomy, options: ShardingOptions
) -> nn.Module:
    """Wrap every block and then the model with ``fully_shard``, in place.

    Args:
        model: the model, split over ``tp`` already where it is to be.
        mesh: what :func:`data_parallel_mesh` gives.
        anatomy: the model's blocks.
        options: dtypes, offload and resharding.
    """
    precision = options.mixed_precision or MixedPrecisionPolicy()
    offload: OffloadPolicy = (
        CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()
    )

    def shard(module: nn.Module, *, reshard: bool) -> None:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
        module.__dict__[_RESHARDS] = reshard

    for block in anatomy.blocks.values():
        shard(block, reshard=options.reshard_after_forward and block is not anatomy.last_block)
    shard(model, reshard=False)
    logger.info("FSDP2: %d blocks and the root over %d ranks", len(anatomy.blocks), mesh.size())
    return model


def reshards_after_forward(module: FSDPModule, *, is_root: bool) -> bool:
    """Whether a unit frees its gathered parameters after forward; for one wrapped elsewhere, torch's default."""
    recorded = module.__dict__.get(_RESHARDS)
    return not is_root if recorded is None else bool(recorded)
