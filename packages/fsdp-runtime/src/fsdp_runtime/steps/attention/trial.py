"""The trial of attention kernels: each runs forward and backward once, and all ranks then use the same kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from fsdp_runtime._torch_compat import varlen_attention
from fsdp_runtime._transformers_compat.attention import needs_eager_or_flex
from fsdp_runtime._transformers_compat.masks import MaskPattern
from fsdp_runtime.model.token_mixers import TokenMixer
from fsdp_runtime.setup import Setup
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.steps.attention.block_masks import attend_in_blocks
from fsdp_runtime.steps.attention.decision import HALF, AttentionKernels, Keys, Needs, is_accelerated, is_simulated
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.methods import attention_dropout
from fsdp_runtime.steps.context.sharding import SequenceLayout

logger = logging.getLogger(__name__)

#: The first token of the second of two documents, and the end of it.
_SPLIT, _LENGTH = 100, 256
#: The largest difference from scaled_dot_product_attention, for outputs of up to 1 in half precision.
_BOUND = 0.05


def decide(setup: Setup, replaced: Sequence[TokenMixer], others: Sequence[TokenMixer], keys: Keys) -> AttentionKernels:
    """Return the kernels of a model's attention modules; collective over the mesh, except on a CPU."""
    # ``others`` compute attention in their own code. "eager" attention is kept where it was a choice of the user.
    facts, meshes = setup.facts, setup.meshes
    is_choice = facts.attention == "eager" and not needs_eager_or_flex(facts.row_model, facts.text_config)
    kernels = AttentionKernels(accelerated=is_accelerated(meshes.device_type) and not is_choice)
    needs = {mixer.path: _needs(mixer.module, setup, keys) for mixer in replaced}
    if kernels.accelerated and needs:
        all_axes = [mesh for mesh in (meshes.fsdp, meshes.cp, meshes.tp) if mesh is not None]
        groups = [group for mesh in all_axes for group in mesh.get_all_groups() if dist.get_backend(group) != "fake"]
        kernels.usable = _usable(list(needs.values()), torch.device(meshes.device_type), groups)
    kernels.by_path = {path: kernels.of(need) for path, need in needs.items()}
    of_others = facts.attention if facts.attention.startswith("flash") else "mask"
    kernels.by_path |= {mixer.path: of_others for mixer in others if mixer.isolation == "mask"}
    return kernels


def _needs(module: Any, setup: Setup, keys: Keys) -> Needs:
    policies = (getattr(step, "mp_policy", None) for step in setup.steps)
    dtypes = [dtype for policy in policies if (dtype := getattr(policy, "param_dtype", None)) is not None]
    dtypes += [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or 64
    return Needs(
        dtype=dtypes[0] if dtypes else torch.float32,
        widths=(width, getattr(module, "v_head_dim", None) or width),
        keys=keys,
        pattern=None if setup.shared_prefixes else MaskPattern(window=getattr(module, "sliding_window", None)),
        changes_scores=any(getattr(module, name, None) is not None for name in ("sinks", "attn_logit_softcapping")),
        dropout=attention_dropout(module) > 0,
    )


def _usable(needs: Sequence[Needs], device: torch.device, groups: Sequence[ProcessGroup]) -> frozenset[str]:
    """Return the kernels that some module needs and every rank can run; the others get one warning each."""
    if is_simulated():
        return frozenset({"varlen"})
    # Under autocast, a model in float32 attends in half precision.
    both = AttentionKernels(accelerated=True, usable=frozenset({"varlen", "flex"}))
    tried = {"varlen", *(both.of(need) for need in needs)} & both.usable
    dtype = next((need.dtype for need in needs if need.dtype in HALF), torch.bfloat16)
    errors = {kernel: error for kernel in tried if (error := try_kernel(kernel, needs[0].widths[0], dtype, device))}
    failed: dict[str, str] = {}
    for rank, of_rank in all_gather_objects(ModelRanks(groups), errors).items():
        failed |= {kernel: f"on rank {rank}, {error}" for kernel, error in of_rank.items()}
    for kernel, error in sorted(failed.items()):
        logger.warning("attention does not use the kernel %r: %s", kernel, error)
    return frozenset(tried - failed.keys())


def try_kernel(kernel: str, width: int, dtype: torch.dtype, device: torch.device) -> str:
    """Run a kernel on two documents, forward and backward, and return the reason against it, or an empty text."""
    numbers = torch.arange(2 * _LENGTH * width, device=device).view(1, 2, _LENGTH, width)
    inputs = [torch.sin(numbers * factor).to(dtype) for factor in (1.7, 2.7, 3.7)]
    parts = [torch.split(each, [_SPLIT, _LENGTH - _SPLIT], dim=2) for each in inputs]
    try:
        with torch.enable_grad():
            leaves = [each.requires_grad_() for each in inputs]
            output = (_within_segments if kernel == "varlen" else _within_blocks)(leaves)
            gradients = torch.autograd.grad(output.sum(), leaves)
        alone = [scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*parts, strict=True)]
        difference = float((output - torch.cat(alone, dim=2).transpose(1, 2)).detach().abs().max())
    except Exception as error:  # noqa: BLE001  # a compiler and a driver may raise anything
        return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    return "" if difference <= _BOUND and finite else f"its results are off by {difference:.1e}"


def _within_segments(inputs: Sequence[Tensor]) -> Tensor:
    before = torch.tensor([0, _SPLIT, _LENGTH], dtype=torch.int32, device=inputs[0].device)
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in inputs)
    return varlen_attention(
        query, key, value, (before, before), (_LENGTH, _LENGTH), window=(-1, 0), scale=None
    ).unsqueeze(0)


def _within_blocks(inputs: Sequence[Tensor]) -> Tensor:
    def sees(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((key < _SPLIT) == (query < _SPLIT))

    mask = SequenceMask(
        lambda queries, keys: sees(0, 0, queries[:, None], keys)[None, None],
        SequenceLayout(_LENGTH, 1, 0),
        inputs[0].device,
        of_indices=sees,
    )
    query, key, value = inputs
    return attend_in_blocks(query, key, value, mask, None)
