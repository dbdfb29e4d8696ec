"""Run a model in full and split over the ranks of a mesh, on every rank, and compare outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tp_plans.errors import ModelError
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.verification.inputs import Inputs, candidate_inputs

#: Least number that differences are relative to: a model of width 0 has outputs and gradients of zeros alone.
_LEAST = 1e-30


@dataclass(frozen=True)
class Reference:
    """The results of the model that is not split."""

    model: nn.Module  # before it ran: some keep a state of their forward
    inputs: Inputs
    output: Tensor
    weights: Tensor  # the loss is the output's sum with these weights
    gradients: Mapping[str, Tensor | None]  # None where the loss does not reach


@dataclass(frozen=True)
class Differences:
    """The differences on one rank: see :class:`~tp_plans.verification.report.VerificationReport`."""

    output_error: float = 0.0
    gradient_errors: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


def first_reference_run(model: nn.Module, given_inputs: Inputs | None, *, device: str) -> Reference:
    """Run a model on the given inputs, or on the first candidate that it accepts."""
    tried = candidate_inputs(model) if given_inputs is None else iter([given_inputs])
    reasons: dict[str, None] = {}
    for inputs in tried:
        try:
            return reference_run(model, _on_device(inputs, device))
        except ModelError as error:
            reasons[str(error)] = None
    first, *_, last = [*reasons] * 2  # with images, and on token ids alone
    raise ModelError("; ".join(dict.fromkeys([first, last])))


def reference_run(model: nn.Module, inputs: Inputs) -> Reference:
    """Run a model forward and backward."""
    run = copy.deepcopy(model)
    try:
        output = _run(run, inputs)
        generator = torch.Generator().manual_seed(2)
        weights = torch.randn(output.shape, dtype=torch.float64, generator=generator).to(output)
        (output * weights).sum().backward()  # type: ignore[no-untyped-call]
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be run on the CPU in float64: {type(error).__name__}: {error}"
        ) from error
    gradients = {path: parameter.grad for path, parameter in ModelTree.of(run).parameters.items()}
    tensors = (output, *(gradient for gradient in gradients.values() if gradient is not None))
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise ModelError(f"{type(model).__name__} gives numbers that are not finite: give inputs, or a model, of yours")
    return Reference(model, inputs, output.detach(), weights, gradients)


def compare(reference: Reference, plan: Plan, mesh: DeviceMesh) -> Differences:
    """Split a copy of the model by a plan, run it and compare, on this rank; every rank of the mesh has to call it."""
    candidate = copy.deepcopy(reference.model)
    try:
        parallelize_module(candidate, mesh, dict(plan.to_torch(candidate)))
        output = _run(candidate, reference.inputs)
        output = output.full_tensor() if isinstance(output, DTensor) else output
        if output.shape != reference.output.shape:
            return Differences(error=f"its output is {list(output.shape)}, not {list(reference.output.shape)}")
        (output * reference.weights).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 (the code of a model may raise anything)
        return Differences(error=f"{type(error).__name__}: {error}")
    full = reference.output
    off = _largest(output.detach() - full) / max(_largest(full), _LEAST)
    return Differences(off, dict(_gradient_errors(reference, ModelTree.of(candidate))))


def _on_device(inputs: Inputs, device: str) -> Inputs:
    def moved(value: Any) -> Any:
        return value.to(device) if hasattr(value, "to") else value

    if isinstance(inputs, Mapping):
        return {name: moved(value) for name, value in inputs.items()}
    return tuple(map(moved, inputs))


def _run(model: nn.Module, inputs: Inputs) -> Tensor:
    with _default_float64():
        output: Any = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    several = output.values() if isinstance(output, Mapping) else output
    values = several if isinstance(output, (Mapping, tuple, list)) else [output]
    real = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    if (first := next(real, None)) is None:
        raise ModelError(f"the model gives {type(output).__name__} without a tensor of real numbers")
    return first


def _gradient_errors(reference: Reference, tree: ModelTree) -> Iterator[tuple[str, float]]:
    """Yield each parameter's largest error on this rank, relative to its gradient's largest element."""
    # Some gradients vanish mathematically (a key's bias adds one number to every score of a query) and are rounding
    # errors. So errors are relative to no less than 1e-9 of the largest gradient of the model.
    gradients = (gradient for gradient in reference.gradients.values() if gradient is not None)
    largest_of_all = max(map(_largest, gradients), default=1.0)
    floor = max(1e-9 * largest_of_all, _LEAST)
    for path, parameter in tree.parameters.items():
        expected, actual = reference.gradients.get(path), parameter.grad
        if expected is None and (actual is None or _largest(_local(actual)) <= floor):
            continue
        if expected is None or actual is None:
            yield path, float("inf")
            continue
        largest = max(_largest(expected), floor)
        if isinstance(parameter, DTensor):
            expected = distribute_tensor(expected, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local, expected_local = _local(actual), _local(expected)
        yield path, _largest(local - expected_local) / largest if local.shape == expected_local.shape else float("inf")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _largest(tensor: Tensor | None) -> float:
    return tensor.abs().max().item() if tensor is not None and tensor.numel() else 0.0


@contextmanager
def _default_float64() -> Iterator[None]:
    """Make float64, the dtype of the weights, the default dtype of tensors that model code creates."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
