"""Outputs of which each rank has an addend, brought to the layout that a style asks for."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans import layouts
from tp_plans.layouts import Layout
from tp_plans.torch_styles.gradients import summed_output
from tp_plans.torch_styles.placement import as_dtensor, redistribute


def reduced(addend: Tensor, mesh: DeviceMesh, layout: Layout, *, use_local_output: bool) -> Tensor:
    """The ranks' sum in ``layout``, as a plain tensor or a DTensor."""
    if use_local_output and layout == layouts.Replicate():
        return summed_output(addend, mesh)
    lying = redistribute(as_dtensor(addend, mesh, layouts.Partial()), layout)
    return lying.to_local() if use_local_output else lying
