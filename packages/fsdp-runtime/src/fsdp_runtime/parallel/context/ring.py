"""Torch's ring attention in place of gathered keys and values, where it can run: CUDA, causal, unpadded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from fsdp_runtime.errors import BackendError, OptionError
from fsdp_runtime.parallel.context.apply import attention_of
from fsdp_runtime.parallel.context.sharding import sequence_layout


@contextmanager
def ring_attention(model: nn.Module, mesh: DeviceMesh, length: int) -> Iterator[nn.Module]:
    """Let torch's ``context_parallel`` compute attention inside the ``with``, which must hold forward and backward.

    A rank then never holds the keys of the whole sequence.  Inputs, outputs and gradients lie as without it.  Layers
    with a mask, as of padding or a sliding window, go on gathering, since torch's ring knows causal masks only.

    Args:
        model: a model under context parallelism, with ``cp_load_balancer="headtail"``, as in torch.
        mesh: the mesh that it is parallelized on.
        length: tokens of the whole sequences.

    Raises:
        BackendError: the mesh is not on CUDA, whose kernels are the only ones that torch's ring calls.
        OptionError: the model has another load balancer.
        ModelError: the model is not under context parallelism.
        LayoutError: the length does not divide.
    """
    attention = attention_of(model)
    if mesh.device_type != "cuda":
        raise BackendError(
            f"torch's ring attention calls CUDA kernels only, and the mesh is on {mesh.device_type}: leave it out, "
            "and keys and values are gathered instead"
        )
    if attention.load_balancer != "headtail":
        raise OptionError(
            f"ring attention needs cp_load_balancer='headtail', and the model's is {attention.load_balancer!r}"
        )
    sequence_layout(mesh, length)
    # torch takes the length from a buffer that it is to cut.
    tokens = torch.arange(length, device=mesh.device_type)
    ring = context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers={tokens})
    with ring:
        attention.ring = True
        try:
            yield model
        finally:
            attention.ring = False
