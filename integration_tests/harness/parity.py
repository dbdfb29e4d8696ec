"""Comparison of a parallelized model with the single-process model, on every rank.

Each rank builds the same tiny model twice, runs one copy unsharded and the other parallelized, and compares the
output and every parameter's gradient: this rank's shard against the same shard of the reference's gradient, which is
computed here without DTensor.  So a gradient that is wrong on one rank only, still a partial sum, or sharded
differently from its parameter is found and named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.copies import copier
from harness.models import tiny_inputs, tiny_model

#: The bounds of the numerics contract for Hugging Face models, whose norms and rotary code pass through float32:
#: outputs absolute, gradients relative to the tensor's largest element.
OUTPUT_BOUND = 1e-5
GRADIENT_BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """One model, one mesh, one way of parallelizing.

    Args:
        architecture: a Hugging Face class in ``harness.models``.
        mesh: axis sizes by name, as ``{"dp_shard": 2, "tp": 2}``.
        parallelize: an importable function of the model and the mesh that returns the parallelized model.
        options: further keywords for ``parallelize``.
        model: options of ``tiny_model``.
        length: tokens a sequence; odd, so that it divides by no axis.
        padding: ``"left"`` or ``"right"`` to pass an attention mask with padding on that side.
        inputs: ``"ids"``; ``"positions"`` to pass position ids beside them; ``"embeddings"`` to pass those instead.
    """

    architecture: str
    mesh: Mapping[str, int]
    parallelize: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    length: int = 7
    padding: str | None = None
    inputs: str = "ids"


@dataclass(frozen=True)
class RankReport:
    """What one rank found: the largest output error, each parameter's gradient error, and other problems."""

    output_error: float
    gradient_errors: dict[str, float]
    problems: list[str]


def compare(case: Case) -> RankReport:
    """Run one case on this rank; every rank of the world must call it."""
    reference = _reference(case.architecture, tuple(sorted(case.model.items())), case.length, case.padding, case.inputs)
    mesh = mesh_for(case.mesh)
    candidate = case.parallelize(reference.copied(), mesh, **case.options)

    weights = reference.weights
    own = _own_rows(len(weights), mesh)
    logits = logits_of(candidate, {name: value[own] for name, value in reference.inputs.items()})
    # FSDP averages over the data-parallel ranks, each of which has its own share of the sum.
    (logits * weights[own]).sum().mul(_data_parallel_size(mesh)).backward()
    return RankReport(
        output_error=largest((logits - reference.logits[own]) * (weights[own] != 0)),
        gradient_errors=gradient_errors(reference.gradients, candidate),
        problems=[*structural_problems(reference.model, candidate)],
    )


@dataclass(frozen=True)
class _Reference:
    """The single-process model, the inputs, and what it computes from them.

    Args:
        model: the model, without gradients.
        copied: returns a copy of it.
        inputs: keyword arguments of its forward.
        weights: those of the loss, a weighted sum of the logits.
        logits: the output.
        gradients: each parameter's gradient of the loss.
    """

    model: nn.Module
    copied: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    weights: Tensor
    logits: Tensor
    gradients: dict[str, Tensor | None]


@lru_cache(maxsize=32)
def _reference(
    architecture: str, options: tuple[tuple[str, Any], ...], length: int, padding: str | None, kind: str
) -> _Reference:
    """Run the single-process model; cases that differ in mesh or parallelism only share the result."""
    model = tiny_model(architecture, **dict(options))
    inputs = _inputs(model, kind, length)
    if padding is not None:
        inputs["attention_mask"] = padding_mask(inputs["input_ids"], padding)
    logits = logits_of(model, inputs)
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
    if padding is not None:
        weights = weights * inputs["attention_mask"].unsqueeze(-1)  # what padding positions compute is undefined
    (logits * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return _Reference(model, copier(model), inputs, weights, logits.detach(), gradients)


def assert_parity(
    reports: Iterable[RankReport], *, output: float = OUTPUT_BOUND, gradient: float = GRADIENT_BOUND
) -> None:
    """Raise one ``AssertionError`` that names every rank, parameter and error beyond its bound."""
    found = [each for rank, report in enumerate(reports) for each in _mismatches(rank, report, output, gradient)]
    if found:
        raise AssertionError("\n".join(found))


def mesh_for(axes: Mapping[str, int]) -> DeviceMesh:
    """A CPU mesh of the runtime's kind, one per process and shape, since process groups are slow to make."""
    from fsdp_runtime import MeshSpec

    key = tuple(sorted(axes.items()))
    if key not in _meshes:
        _meshes[key] = MeshSpec(**axes).build(device_type="cpu")
    return _meshes[key]


_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def own_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``full``, cut as ``like`` is: axes left to right, strided ones (FSDP over TP) last."""
    mesh = like.device_mesh
    placements = list(enumerate(like.placements))
    ordered = [p for p in placements if not _is_strided(p[1])] + [p for p in placements if _is_strided(p[1])]
    for axis, placement in ordered:
        if placement.is_shard() or _is_strided(placement):
            chunk = -(-full.shape[placement.dim] // mesh.size(axis)) if full.shape[placement.dim] else 0
            start = min(chunk * mesh.get_local_rank(axis), full.shape[placement.dim])
            full = full.narrow(placement.dim, start, min(chunk, full.shape[placement.dim] - start))
    return full


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _inputs(model: nn.Module, kind: str, length: int) -> dict[str, Tensor]:
    inputs = tiny_inputs(model, batch=4, length=length)
    if kind == "positions":
        inputs["position_ids"] = (torch.arange(length) + 3).expand_as(inputs["input_ids"])
    elif kind == "embeddings":
        ids = inputs.pop("input_ids")
        table = next(model.parameters())
        inputs["inputs_embeds"] = torch.randn(
            *ids.shape, table.shape[1], dtype=table.dtype, generator=torch.Generator().manual_seed(3)
        )
    return inputs


def logits_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def padding_mask(ids: Tensor, side: str) -> Tensor:
    """Row ``i`` has ``i`` padding positions, so that rows differ."""
    length = ids.shape[1]
    padding = torch.arange(len(ids)).clamp(max=length - 1)
    mask = torch.arange(length).unsqueeze(0) >= padding.unsqueeze(1)
    return (mask if side == "left" else mask.flip(1)).long()


def _data_parallel_size(mesh: DeviceMesh) -> int:
    from fsdp_runtime import submesh

    return submesh(mesh, "dp").size()


def _own_rows(batch: int, mesh: DeviceMesh) -> slice:
    from fsdp_runtime import submesh

    share = batch // _data_parallel_size(mesh)
    start = share * submesh(mesh, "dp").get_local_rank()
    return slice(start, start + share)


def gradient_errors(
    expected: Mapping[str, Tensor | None], candidate: nn.Module, *, least_share: float = 1e-9
) -> dict[str, float]:
    """Each parameter's gradient error on this rank, relative to the gradient's largest element.

    Some gradients vanish mathematically (a key bias shifts every score of a query alike), and what is left of them is
    rounding: errors are relative to no less than ``least_share`` of the model's largest gradient.
    """
    floor = least_share * max(largest(gradient) for gradient in expected.values() if gradient is not None)
    errors: dict[str, float] = {}
    for name, parameter in candidate.named_parameters():
        if name not in expected:  # a broken tie: reported as a structural problem
            continue
        wanted, actual = expected[name], parameter.grad
        if wanted is None and actual is None:
            continue
        if wanted is None or actual is None:
            errors[name] = float("inf")
            continue
        scale = max(largest(wanted), floor)
        if isinstance(actual, DTensor):
            wanted, actual = own_part(wanted, actual), actual.to_local()
        errors[name] = relative_error(actual - wanted, scale) if actual.shape == wanted.shape else float("inf")
    return errors


def relative_error(difference: Tensor, scale: float) -> float:
    """The largest element relative to a scale; infinite where one is NaN, which Python's ``max`` would drop."""
    error = largest(difference) / scale
    return float("inf") if math.isnan(error) else error


def structural_problems(reference: nn.Module, candidate: nn.Module) -> Iterable[str]:
    """Broken ties, missing parameters, and gradients that are laid out otherwise than their parameters."""
    wanted, actual = ties(reference), ties(candidate)
    if wanted != actual:
        yield f"ties: the reference shares {wanted}, the parallelized model {actual}"
    missing = {n for n, _ in reference.named_parameters()} ^ {n for n, _ in candidate.named_parameters()}
    if missing:
        yield f"parameters in only one of the two models: {sorted(missing)}"
    for name, parameter in candidate.named_parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if parameter.placements != gradient.placements:
            yield f"{name}: laid out as {parameter.placements}, its gradient as {gradient.placements}"


def ties(model: nn.Module) -> list[list[str]]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return sorted(sorted(names) for names in owners.values() if len(names) > 1)


def _mismatches(rank: int, report: RankReport, output: float, gradient: float) -> Iterable[str]:
    if not report.output_error <= output:
        yield f"rank {rank}: output off by {report.output_error:.2e} (bound {output:.0e})"
    for name, error in report.gradient_errors.items():
        if not error <= gradient:
            yield f"rank {rank}: gradient of {name} off by {error:.2e} of its largest element (bound {gradient:.0e})"
    for problem in report.problems:
        yield f"rank {rank}: {problem}"


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
