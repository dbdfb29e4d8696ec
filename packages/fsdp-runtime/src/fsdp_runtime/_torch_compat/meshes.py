"""Axes of a mesh, and the layouts of tensors over them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten several axes of a mesh into one, registered under ``name``; a repeated call returns the same mesh.

    ``DeviceMesh._flatten`` has no public equivalent in torch 2.10 to 2.15; torch's own tutorials and torchtitan
    use it (pytorch/pytorch#133838, and #159013 on a public form).
    """
    sliced = mesh[axes] if len(axes) > 1 else mesh[axes[0]]
    return sliced._flatten(name)


def join_axes(*meshes: DeviceMesh) -> DeviceMesh:
    """Concatenate meshes of one root, at least one of which is a flattened axis.

    Slicing the root by the name of a flattened axis warns from torch 2.11 on (pytorch/pytorch#164993, #169381), and
    2.10 to 2.15 have no public replacement.
    """
    return DeviceMesh._concatenate(list(meshes))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from, or itself (not public in torch 2.10 to 2.15; no issue found)."""
    return mesh._get_root_mesh()


def is_strided(placement: Placement) -> bool:
    """Return True for ``_StridedShard``, FSDP2's placement of a dim that is already sharded over ``tp``.

    The class is private in torch 2.10 to 2.15, where parameters of TP x FSDP2 carry it.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor itself; ``to_local`` gives a view, which a recorder of memory would count anew.

    Any other tensor is its own (torch 2.10 to 2.15).
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
