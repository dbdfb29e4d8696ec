"""Outputs of which each rank has an addend, brought to the layout that a style asks for."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_plans import layouts
from tp_plans.layouts import Layout
from tp_plans.torch_styles.gradients import plain_output
from tp_plans.torch_styles.placement import as_dtensor, redistribute


def reduced(addend: Tensor, mesh: DeviceMesh, layout: Layout, *, use_local_output: bool) -> Tensor:
    """The ranks' sum in ``layout``, as a plain tensor or a DTensor."""
    lying = redistribute(as_dtensor(addend, mesh, layouts.Partial()), layout)
    return handed_on(lying, use_local_output=use_local_output)


def handed_on(output: DTensor, *, use_local_output: bool) -> Tensor:
    """An output as the style says: this rank's plain tensor, or the DTensor."""
    return plain_output(output) if use_local_output else output
