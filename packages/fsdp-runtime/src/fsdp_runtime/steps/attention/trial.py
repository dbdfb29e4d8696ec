"""The trial of attention kernels: each runs forward and backward once, and all ranks then use the same kernels.

A kernel that fails or computes other numbers is left out with one warning.  The trial precedes every collective of
training, so that no rank waits for a rank with another kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from fsdp_runtime._transformers_compat.masks import MaskOfRows, MaskPattern, function_of_window
from fsdp_runtime.model.token_mixers import TokenMixer
from fsdp_runtime.setup import Meshes, Setup
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.steps.attention.decision import AttentionKernels, Kernel, Keys, Needs, device_type_of, is_simulated
from fsdp_runtime.steps.attention.kernels import by_blocks, by_segments
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.methods import attention_dropout
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.documents.documents import Documents

logger = logging.getLogger(__name__)

#: Tokens of the documents in a trial.
_LENGTHS = (100, 156)
#: The largest difference from scaled_dot_product_attention in float32, for results of up to 1 in half precision.
_BOUND = 0.05


def decide(
    setup: Setup, replaced: Sequence[TokenMixer], others: Sequence[TokenMixer], *, keys: Keys
) -> AttentionKernels:
    """Return the kernels of a model's attention modules; collective over the mesh, except on a CPU."""
    # ``others`` compute attention in their own code, under a mask.
    facts = setup.facts
    kernels = AttentionKernels(device_type_of(setup.meshes.device_type) != "cpu")
    if facts.attention == "flex_attention":
        kernels.named = "flex"
    elif facts.attention == "eager" and not facts.eager_for_lack_of_choice:
        kernels.replaces = False
    needs = {mixer.path: _needs(mixer, setup, keys) for mixer in replaced}
    if kernels.replaces and kernels.accelerated:
        window = getattr(facts.text_config, "sliding_window", None) or None
        kernels.usable = _usable(kernels, list(needs.values()), setup.meshes, window if type(window) is int else None)
    kernels.by_path = {path: kernels.of(need) for path, need in needs.items()}
    of_others = facts.attention if facts.attention.startswith("flash") else "mask"
    kernels.by_path |= {mixer.path: of_others for mixer in others if mixer.isolation == "mask"}
    return kernels


def _needs(mixer: TokenMixer, setup: Setup, keys: Keys) -> Needs:
    module: Any = mixer.module
    policies = (getattr(step, "mp_policy", None) for step in setup.steps)
    dtypes = [dtype for policy in policies if (dtype := getattr(policy, "param_dtype", None)) is not None]
    dtypes += [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    width = getattr(module, "qk_head_dim", getattr(module, "head_dim", None))
    width = width if type(width) is int else 64
    values = getattr(module, "v_head_dim", width)
    return Needs(
        dtype=dtypes[0] if dtypes else torch.float32,
        widths=(width, values if type(values) is int else width),
        keys=keys,
        windowed=getattr(module, "sliding_window", None) is not None,
        changed_scores=any(getattr(module, name, None) is not None for name in ("sinks", "attn_logit_softcapping")),
        dropout=attention_dropout(module) > 0,
    )


def _usable(
    kernels: AttentionKernels, needs: Sequence[Needs], meshes: Meshes, window: int | None
) -> frozenset[Kernel]:
    """Return the kernels that every rank can run."""
    if is_simulated():
        return frozenset({"varlen"})
    tried = AttentionKernels(kernels.accelerated, frozenset({"varlen", "flex"}), kernels.named)
    # Under autocast, a model in float32 attends in half precision.
    half = [need.in_half_precision() for need in needs]
    trials: dict[Kernel, Needs] = {tried.of(need): need for need in (*half, *needs)}
    errors: dict[Kernel, str] = {}
    for kernel in sorted(trials.keys() & {"varlen", "flex"}):
        if error := try_kernel(kernel, trials[kernel], torch.device(meshes.device_type), window):
            errors[kernel] = error
    by_rank = all_gather_objects(ModelRanks(list(_groups(meshes))), errors)
    failed = {kernel: (rank, error) for rank, of_rank in by_rank.items() for kernel, error in of_rank.items()}
    for kernel, (rank, error) in sorted(failed.items()):
        logger.warning("attention does not use the kernel %r: on rank %d, %s", kernel, rank, error)
    return frozenset(kernel for kernel in trials if kernel not in failed)


def _groups(meshes: Meshes) -> Iterable[ProcessGroup]:
    for mesh in (meshes.fsdp, meshes.cp, meshes.tp):
        for group in [] if mesh is None else mesh.get_all_groups():
            if dist.get_world_size(group) > 1:
                yield group


def try_kernel(kernel: Kernel, needs: Needs, device: torch.device, window: int | None) -> str:
    """Run a kernel on two documents, and return the reason against it, or an empty text."""
    mask = _mask_of_trial(device, window)
    inputs = _inputs(needs, device)
    compute = partial(by_segments, mask=mask, scale=None)
    if kernel == "flex":
        compute = partial(by_blocks, mask=mask, scale=None, softcap=None, sinks=None)
    try:
        with torch.enable_grad():
            results = _results(compute, [each.to(needs.dtype) for each in inputs])
            expected = _results(partial(_reference, mask=mask), inputs)
    except Exception as error:  # noqa: BLE001  # a compiler and a driver may raise anything
        return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    differences = [
        float((result.float() - value).abs().max()) / max(float(value.abs().max()), 1e-3)
        for result, value in zip(results, expected, strict=True)
    ]
    return "" if all(each <= _BOUND for each in differences) else f"its results are off by {max(differences):.1e}"


def _mask_of_trial(device: torch.device, window: int | None) -> SequenceMask:
    length = sum(_LENGTHS)
    begins = torch.zeros(1, length, dtype=torch.bool, device=device)
    begins[:, 0] = begins[:, _LENGTHS[0]] = True
    documents = Documents(begins, (len(_LENGTHS), max(_LENGTHS)))
    between = MaskOfRows(
        mask_function=function_of_window(window),
        documents=documents.numbers,
        positions=documents.positions,
        subtree_end=None,
        padding=None,
        batch_size=1,
    )
    return SequenceMask(between, SequenceLayout(length, 1, 0), device, None, MaskPattern(window=window), documents)


def _inputs(needs: Needs, device: torch.device) -> list[Tensor]:
    """Return queries of two heads, and keys and values of one, in float32."""
    inputs = []
    for place, (heads, width) in enumerate([(2, needs.widths[0]), (1, needs.widths[0]), (1, needs.widths[1])]):
        numbers = torch.arange(heads * sum(_LENGTHS) * width, device=device, dtype=torch.float32)
        inputs.append(torch.sin(numbers * (place + 1.7)).view(1, heads, -1, width))
    return inputs


def _results(compute: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output of attention and the gradients of its inputs."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = compute(*leaves)
    weights = torch.cos(torch.arange(output.numel(), device=output.device).view(output.shape)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def _reference(query: Tensor, key: Tensor, value: Tensor, *, mask: SequenceMask) -> Tensor:
    heads = query.shape[1]
    keys, values = (each.expand(-1, heads, -1, -1) for each in (key, value))
    return functional.scaled_dot_product_attention(query, keys, values, mask.full).transpose(1, 2)
