"""The weight that a language-model head computes with: a copy that an adapter trains, or with adapters added."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import HeadFactors, linear_in_force
from fsdp_runtime.errors import ModelError


def require_linear(head: nn.Module, path: str) -> None:
    """Check that a head is one linear map, as which a loss without logits reads it."""
    if reason := linear_in_force(head).not_linear:
        raise ModelError(
            f"{path} is not one linear map, which a loss without logits needs: {reason}; or compute the loss from the "
            "logits"
        )


def head_weight(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight ``[vocab, features]`` and the bias ``[vocab]`` that a head, or peft's wrapper, computes with.

    Adapters in force are added in the weight's dtype, and get their gradients through the sum.  Of a weight that is
    sharded over ``tp`` a rank adds its rows only.
    """
    found = linear_in_force(head)
    weight: Tensor = found.layer.weight
    bias: Tensor | None = getattr(found.layer, "bias", None)
    for factors in found.factors:
        weight = _adapted(weight, found.layer.weight, factors).to(found.layer.weight.dtype)
        if factors.bias is not None:
            added = factors.bias * factors.scaling
            bias = added if bias is None else (bias + added).to(bias.dtype)
    return weight, bias


def _adapted(weight: Tensor, of_base: Tensor, factors: HeadFactors) -> Tensor:
    """Return a weight with an adapter.

    DoRA scales the rows of the sum, by norms that count as constants: Liu et al., arXiv:2402.09353, section 4.3.
    """
    product = factors.b @ _with_full_gradient(factors.a) * factors.scaling
    if factors.magnitude is None:
        return weight + product
    norms = torch.linalg.norm(of_base.detach() + product.detach(), dim=1)
    scales: Tensor = factors.magnitude / norms
    return scales[:, None] * (weight + product)


def _with_full_gradient(factor: Tensor) -> Tensor:
    """Return a replicated factor whose gradient is summed over the ranks, each of which has some rows of the weight."""
    if not isinstance(factor, DTensor):
        return factor
    return DTensor.from_local(factor.to_local(), factor.device_mesh, factor.placements, run_check=False)
