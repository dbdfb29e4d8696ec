"""Comparison of one parallelized layer with the unsharded one: output, input gradient, parameters' gradients.

Everything is in float64, where summation order costs about 1e-15, so the bound leaves no room for a small error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from harness.models import jitter
from harness.parity import own_part
from tp_plans import Plan, Style, layouts
from tp_plans.torch_styles.placement import placement

BOUND = 1e-12


@cache
def tp_mesh() -> DeviceMesh:
    """One axis over all ranks, made once a process."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def parallelized(module: nn.Module, rules: Mapping[str, Style]) -> nn.Module:
    """A parallelized copy, by torch's own function alone."""
    return parallelize_module(copy.deepcopy(module), tp_mesh(), Plan(rules).to_torch())


def arriving(tensor: Tensor, layout: layouts.Layout, *, plain: bool) -> Tensor:
    """A whole tensor as it may reach a layer: a DTensor in ``layout``, or this rank's plain part of one."""
    if isinstance(layout, layouts.Partial):
        addend = tensor.detach() / dist.get_world_size() + (tensor - tensor.detach())  # its gradient is the sum's
        return DTensor.from_local(addend, tp_mesh(), [Partial()], run_check=False)
    spread = DTensor.from_local(tensor, tp_mesh(), [Replicate()], run_check=False)
    spread = spread.redistribute(placements=[placement(layout)])
    return spread.to_local() if plain else spread


def mismatches(
    build: Callable[[], nn.Module],
    rules: Mapping[str, Style],
    whole: Tensor,
    *,
    arrives: layouts.Layout = layouts.Replicate(),
    plain: bool = True,
    leaves: layouts.Layout = layouts.Replicate(),
    leaves_plain: bool = True,
    keyword: str | None = None,
) -> list[str]:
    """Return the differences of a parallelized layer from the unsharded one on this rank; every rank must call it.

    Args:
        build: makes the layer.
        rules: the plan.
        whole: the input (ids, or floats whose gradient is compared too).
        arrives: how the input lies when it reaches the layer, as a DTensor unless ``plain``.
        leaves: how the output must lie, as a DTensor unless ``leaves_plain``.
        keyword: pass the input by this name rather than by position.
    """
    torch.manual_seed(0)
    reference = build().double()
    jitter(reference)
    candidate = parallelized(reference, rules)

    floats = whole.is_floating_point()
    theirs, ours = (whole.clone().requires_grad_(floats) for _ in range(2))
    expected = _call(reference, theirs, keyword)
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    output = _call(candidate, arriving(ours, arrives, plain=plain), keyword)
    _weighted_sum(output, weights, leaves).backward()

    return [
        *_output_mismatches(output, expected, leaves, plain=leaves_plain),
        *(_difference("the input's gradient", ours.grad, theirs.grad) if floats else ()),
        *gradient_mismatches(reference, candidate),
    ]


def gradient_mismatches(reference: nn.Module, candidate: nn.Module, *, bound: float = BOUND) -> Iterator[str]:
    """Yield the parameters whose gradient is not this rank's shard of the reference's, in the same placements."""
    expected = dict(reference.named_parameters())
    for name, parameter in candidate.named_parameters():
        wanted, actual = expected[name].grad, parameter.grad
        if isinstance(parameter, DTensor) and isinstance(actual, DTensor):
            if parameter.placements != actual.placements:
                yield f"{name} lies as {parameter.placements}, its gradient as {actual.placements}"
            wanted, actual = None if wanted is None else own_part(wanted, actual), actual.to_local()
        yield from _difference(f"the gradient of {name}", actual, wanted, bound)


def _call(module: nn.Module, value: Tensor, keyword: str | None) -> Any:
    return module(value) if keyword is None else module(**{keyword: value})


def _weighted_sum(output: Tensor, weights: Tensor, layout: layouts.Layout) -> Tensor:
    if isinstance(output, DTensor):
        return (output.full_tensor() * weights).sum()
    return (output * _own(weights, layout)).sum()


def _output_mismatches(output: Tensor, expected: Tensor, layout: layouts.Layout, *, plain: bool) -> Iterator[str]:
    if isinstance(output, DTensor) is plain:
        yield f"the output is a {type(output).__name__}"
    if isinstance(output, DTensor):
        wanted = placement(layout)
        if isinstance(wanted, Shard) and wanted.dim < 0:
            wanted = Shard(wanted.dim + expected.ndim)
        if output.placements != (wanted,) or output.shape != expected.shape:
            yield f"the output has shape {list(output.shape)} and placements {output.placements}"
        if output.placements[0].is_partial():
            yield from _difference("the output", output.full_tensor(), expected)
            return
        output = output.to_local()
    yield from _difference("the output", output, _own(expected, layout))


def _own(full: Tensor, layout: layouts.Layout) -> Tensor:
    if not isinstance(layout, layouts.Shard):
        return full
    chunk = -(-full.shape[layout.dim] // dist.get_world_size())
    start = min(chunk * dist.get_rank(), full.shape[layout.dim])
    return full.narrow(layout.dim, start, min(chunk, full.shape[layout.dim] - start))


def _difference(what: str, actual: Tensor | None, wanted: Tensor | None, bound: float = BOUND) -> Iterator[str]:
    if actual is None or wanted is None:
        if actual is not wanted:
            yield f"{what} is missing" if actual is None else f"{what} should be missing"
    elif actual.shape != wanted.shape:
        yield f"{what} has shape {list(actual.shape)}, not {list(wanted.shape)}"
    elif actual.numel():
        error = (actual - wanted).abs().max().item()
        if not error <= bound * max(1.0, wanted.abs().max().item()):
            yield f"{what} is off by {error:.1e}"
