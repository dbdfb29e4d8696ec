"""Every use of a private torch API in this package, with its reason and the versions it was seen to work on."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Several axes of a mesh as one, registered under ``name``; the same mesh again when called again.

    ``DeviceMesh._flatten`` has no public equivalent in torch 2.10 to 2.15; torch's own tutorials and torchtitan
    use it (pytorch/pytorch#133838).
    """
    sliced = mesh[axes] if len(axes) > 1 else mesh[axes[0]]
    return sliced._flatten(name)
