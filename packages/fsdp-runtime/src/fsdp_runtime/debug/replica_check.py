"""Whether copies that several ranks hold are still equal.

A replica that misses one reduction trains on, a little different on each rank, and only one copy is ever saved
or streamed (pytorch/pytorch#160169).  Comparing fingerprints finds it for one small collective an axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_runtime._torch_compat import all_gather_flat
from fsdp_runtime.errors import ReplicaError

#: Elements hashed at a time, so that a large parameter needs no copy of itself in 64 bits.
_CHUNK = 2**20
#: An odd multiplier (Knuth's, from the golden ratio), so that equal values in other places hash differently.
_MULTIPLIER = 2654435761


@torch.no_grad()
def assert_replicas_equal(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Raise unless every parameter and persistent buffer is bit-identical on all ranks that hold a copy of it.

    Collective: every rank of the mesh calls it; one all-gather of a number per tensor for each mesh axis.

    Args:
        model: before, during or after training; FSDP2's units must be sharded (not inside ``unsharded``).
        mesh: the whole mesh; axes that a tensor's own mesh lacks then count as replicas too.  Without it only the
            axes of each DTensor's mesh are compared, and plain tensors not at all.

    Raises:
        ReplicaError: some differ; all are named, with the axis and the ranks, on every rank that compared them.
    """
    groups: dict[ProcessGroup, tuple[str, list[tuple[str, Tensor]]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        for axis, group in _replicated_over(tensor, mesh):
            groups.setdefault(group, (axis, []))[1].append((name, tensor))
    drifted: dict[str, list[str]] = defaultdict(list)
    for group, (axis, tensors) in groups.items():
        own = torch.stack([_fingerprint(tensor) for _, tensor in tensors])
        everyone = own.new_empty(dist.get_world_size(group), len(own))
        all_gather_flat(everyone.view(-1), own, group).wait()
        differs = (everyone != everyone[0]).any(0).tolist()
        told = f"axis {axis} (ranks {', '.join(map(str, dist.get_process_group_ranks(group)))})"
        for (name, _), different in zip(tensors, differs, strict=True):
            if different:
                drifted[name].append(told)
    if drifted:
        lines = "\n".join(f"  {name}: over {' and '.join(axes)}" for name, axes in drifted.items())
        raise ReplicaError(
            f"{len(drifted)} tensors differ between ranks that hold copies of them:\n{lines}\n"
            "their gradients were not the same on these ranks: check that the plan sums them over tp, that these ranks "
            "saw the same batch, and that they began from the same weights"
        )


def _replicated_over(tensor: Tensor, mesh: DeviceMesh | None) -> Iterator[tuple[str, ProcessGroup]]:
    """The axes over which ranks hold copies of a tensor, with this rank's group on each."""
    own_axes: tuple[str, ...] = ()
    if isinstance(tensor, DTensor):
        own = tensor.device_mesh
        own_axes = own.mesh_dim_names or ()
        for index, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate) and own.size(index) > 1:
                yield (own_axes[index] if own_axes else str(index)), own.get_group(index)
    for index, axis in enumerate((mesh.mesh_dim_names if mesh is not None else None) or ()):
        if mesh is not None and axis not in own_axes and mesh.size(index) > 1:
            yield axis, mesh.get_group(index)


def _fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit hash of this rank's bits, as a 0-d tensor on the device that the collectives run on."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    flat = local.contiguous().view(-1).view(words) if local.numel() else local.new_empty(0, dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        total += ((part + 1) * (places * _MULTIPLIER)).sum()  # wraps around in 64 bits, alike on every rank
    device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device
    return total.to(device)
