"""Torch's ring attention instead of gathered keys and values: CUDA, causal, unpadded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import context_parallel
from fsdp_runtime.argument_types import checked
from fsdp_runtime.errors import BackendError, OptionError
from fsdp_runtime.parallel.context.apply import attention_of
from fsdp_runtime.parallel.context.sharding import sequence_layout


@checked
@contextmanager
def ring_attention(model: nn.Module, mesh: DeviceMesh, length: int) -> Iterator[nn.Module]:
    """Compute attention with torch's ring (``context_parallel``) inside the ``with``, around forward and backward.

    A rank then never holds the keys of the full sequence.  Inputs, outputs and gradients are sharded as without it.
    Layers with a mask (padding, a sliding window) still gather keys and values, because torch's ring supports causal
    masks only.

    Source of the method: Liu et al., Ring Attention, arXiv:2310.01889.

    Args:
        model: a model under context parallelism, with ``cp_load_balancer="headtail"``, as in torch.
        mesh: the mesh that it is parallelized on.
        length: tokens of the full sequences.

    Yields:
        The same model.

    Raises:
        BackendError: the mesh is not on CUDA; torch's ring calls CUDA kernels only.
        OptionError: the model has another load balancer.
        ModelError: the model is not under context parallelism.
        LayoutError: the length is not divisible.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import BackendError, MeshSpec, ModelError, ring_attention
        >>> mesh = MeshSpec(cp=1).build(device_type="cpu")
        >>> try:
        ...     with ring_attention(nn.Linear(2, 2), mesh, length=8):
        ...         pass
        ... except (BackendError, ModelError) as error:
        ...     print(error)
        Linear is not under context parallelism: parallelize it on a mesh with cp > 1
    """
    attention = attention_of(model)
    if mesh.device_type != "cuda":
        raise BackendError(
            f"torch's ring attention calls CUDA kernels only, and the mesh is on {mesh.device_type}: leave it out, "
            "then keys and values are gathered"
        )
    if attention.load_balancer != "headtail":
        raise OptionError(
            f"ring attention needs cp_load_balancer='headtail', and the model's is {attention.load_balancer!r}"
        )
    sequence_layout(mesh, length)
    # torch takes the length from a buffer that it shards.
    tokens = torch.arange(length, device=mesh.device_type)
    ring = context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers={tokens})
    with ring:
        attention.ring = True
        try:
            yield model
        finally:
            attention.ring = False
