"""What one rank finds of one architecture: outputs, gradients, and how much of the model is split.

Every rank holds the whole tiny model beside the parallelized one.  Parameters are jittered in float64, so every
number in them is unique, and each element of a rank's part is found in the whole by its value: nothing has to be
assumed of how a layout deals its elements, and a gradient that is laid out otherwise than its weight is noticed.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coverage.peers import NoPlanError, parallelize_by_transformers
from coverage.shrink import VOCAB
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import FsdpRuntimeError, parallelize, submesh
from harness.float64 import compute_in_float64
from harness.parity import largest, logits_of, mesh_for, padding_mask, relative_error, ties
from tp_plans import TpPlansError

BATCH, LENGTH = 4, 7  # the length is odd, so that the sequence divides by no axis
#: The number of ranks that every tiny model has a part for; on more the models are wide.
NARROW = 2
KINDS = ("ids", "positions", "left padding", "right padding")


#: The ways in which a model is parallelized over the axis ``tp`` of a mesh.
MODES: dict[str, Callable[..., nn.Module]] = {
    "TP": parallelize,
    "SP": partial(parallelize, sequence_parallel=True),
    "transformers": parallelize_by_transformers,
}


class Refused(Exception):
    """The model was not parallelized, with the reason that the user would read."""


@contextmanager
def in_one_process() -> Iterator[None]:
    """Say of an error that the plain model raises it, on one process."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"in one process, too: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class RankResult:
    """What one rank found.

    Args:
        output_errors: the largest absolute error of the logits, by kind of input.
        gradient_errors: each parameter's largest error relative to its gradient's largest element.
        problems: anything else that is wrong.
        reached: bytes of the parameters that the loss reaches.
        whole: bytes of those of them that this rank holds whole, by pattern.
    """

    output_errors: dict[str, float]
    gradient_errors: dict[str, float]
    problems: list[str]
    reached: int
    whole: dict[str, int]


@dataclass(frozen=True)
class Run:
    """The reference's answer to one kind of input."""

    inputs: dict[str, Tensor]
    weights: Tensor
    expected: Tensor
    gradients: dict[str, Tensor | None]

    def part(self, rows: slice, ranks: int) -> Run:
        """Return a data-parallel rank's rows, weighted so that the mean over the ranks is the gradient of all rows."""
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        return Run(inputs, self.weights[rows] * ranks, self.expected[rows], self.gradients)


def warm_up() -> int:
    """Import what every row needs, so that no row's time holds it."""
    return len(coverage_entries())


def measure(
    name: str, mode: str, *, tp: int, kinds: tuple[str, ...], dp_shard: int = 1, float64: bool = False
) -> RankResult:
    """Measure one architecture in one of the modes on this rank; every rank of the world must call it.

    Each rank of ``dp_shard`` has rows of its own, where there are several.  ``float64`` is for what the model's code
    computes in float32 otherwise, so that nothing is left of rounding.
    """
    axes = {"dp_shard": dp_shard, "tp": tp} if dp_shard > 1 else {"tp": tp}
    with (
        default_dtype(torch.float64 if coverage_entries()[name].default_float64 else torch.float32),
        compute_in_float64() if float64 else nullcontext(),
    ):
        return _measure(name, mode, axes, kinds, float64=float64)


def _measure(name: str, mode: str, axes: Mapping[str, int], kinds: tuple[str, ...], *, float64: bool) -> RankResult:
    ranks = axes.get("dp_shard", 1)
    rows = BATCH // ranks
    reference, runs = _reference(name, kinds, mesh_for(axes).size() > NARROW, float64, rows)
    candidate, mesh = copy.deepcopy(reference), mesh_for(axes)
    try:
        candidate = MODES[mode](candidate, mesh, **coverage_entries()[name].options)
    except (TpPlansError, FsdpRuntimeError, NoPlanError) as error:
        raise Refused(str(error)) from error
    first = rows * submesh(mesh, "dp").get_local_rank()
    own = {kind: run.part(slice(first, first + rows), ranks) for kind, run in runs.items()}
    return compared(reference, candidate, own)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let tensors that model code makes without a dtype be of this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compared(reference: nn.Module, candidate: nn.Module, runs: dict[str, Run]) -> RankResult:
    """Run the candidate on every kind of input and compare."""
    places = _all_places(reference, candidate)
    problems = [*_wrong_weights(reference, candidate, places)]
    output_errors: dict[str, float] = {}
    largest_errors: dict[str, float] = defaultdict(float)
    for kind, run in runs.items():
        candidate.zero_grad()
        logits = logits_of(candidate, run.inputs)
        (logits * run.weights).sum().backward()
        output_errors[kind] = largest((logits - run.expected)[run.weights != 0])
        for path, error in gradient_errors(reference, candidate, run.gradients, places=places):
            largest_errors[path] = max(largest_errors[path], error)
    gradients = [run.gradients for run in runs.values()]
    reached = {path for each in gradients for path, gradient in each.items() if gradient is not None}
    whole: dict[str, int] = defaultdict(int)
    sizes = {path: parameter.numel() for path, parameter in reference.named_parameters()}
    for path, parameter in candidate.named_parameters():
        if path in reached and _local(parameter).numel() == sizes[path]:
            whole[re.sub(r"\.\d+(?=\.|$)", ".*", path)] += sizes[path]
    return RankResult(output_errors, dict(largest_errors), problems, sum(sizes[path] for path in reached), dict(whole))


@lru_cache(maxsize=1)
def _reference(name: str, kinds: tuple[str, ...], wide: bool, _: bool, rows: int) -> tuple[nn.Module, dict[str, Run]]:
    model = tiny_model(replace(coverage_entries()[name], wide=wide))
    return model, run_alone(model, kinds, rows)


def run_alone(model: nn.Module, kinds: tuple[str, ...], rows: int = BATCH) -> dict[str, Run]:
    """Run the model in one process, ``rows`` rows at a time as a data-parallel rank: some routers read other rows.

    Kinds of input for which gradients are not finite are left out.
    """
    runs = {}
    for kind in kinds:
        inputs = _inputs(kind)
        running = copy.deepcopy(model)  # some modules keep a state of their last forward
        parts = [{key: value[first : first + rows] for key, value in inputs.items()} for first in range(0, BATCH, rows)]
        expected = torch.cat([logits_of(running, part) for part in parts])
        weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
        if (mask := inputs.get("attention_mask")) is not None and mask.shape == weights.shape[:2]:
            weights = weights * mask.unsqueeze(-1)  # what padding positions compute is undefined
        (expected * weights).sum().backward()
        gradients = {path: parameter.grad for path, parameter in running.named_parameters()}
        # In float64 some eager attention gives NaN for a row that is masked whole, which would reach every gradient.
        if all(bool(gradient.isfinite().all()) for gradient in gradients.values() if gradient is not None):
            runs[kind] = Run(inputs, weights, expected.detach(), gradients)
    return runs


def _inputs(kind: str) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids}
    if kind == "positions":
        inputs["position_ids"] = (torch.arange(LENGTH) + 3).expand_as(ids)
    elif kind.endswith("padding"):
        mask = padding_mask(ids, kind.partition(" ")[0])
        inputs |= {"input_ids": ids * mask, "attention_mask": mask}  # the tiny models pad with id 0
    return inputs


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _all_places(reference: nn.Module, candidate: nn.Module) -> dict[str, Tensor | None]:
    """Where the elements of each parameter's part on this rank sit in the flattened full tensor."""
    weights = dict(reference.named_parameters())
    own = candidate.named_parameters()
    return {path: _places(weights[path], _local(parameter)) for path, parameter in own if path in weights}


def _places(whole: Tensor, part: Tensor) -> Tensor | None:
    """Where each element of a part sits in the flattened whole; ``None`` where one is not in it."""
    values, order = whole.detach().flatten().sort()
    wanted = part.detach().flatten()
    found = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
    return order[found] if torch.equal(values[found], wanted) else None


def gradient_errors(
    reference: nn.Module,
    candidate: nn.Module,
    gradients: Mapping[str, Tensor | None],
    *,
    floor: float | None = None,
    places: Mapping[str, Tensor | None] | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield each parameter's largest error on this rank, relative to its gradient's largest element.

    Args:
        reference: the single-process model.
        candidate: the parallelized one, after backward.
        gradients: the reference's.
        floor: the least number that an error is relative to.  Some gradients vanish mathematically (a key bias shifts
            every score of a query alike), and what is left of them is rounding: by default 1e-8 of
            the largest.
        places: of each parameter's part in the full tensor, for a caller that has them already.
    """
    if floor is None:
        largest_of_all = max(largest(gradient) for gradient in gradients.values() if gradient is not None)
        floor = 1e-8 * largest_of_all or sys.float_info.min  # of a model without features all are zero
    found = _all_places(reference, candidate) if places is None else places
    for path, parameter in candidate.named_parameters():
        if path not in found:
            continue  # reported as a problem
        wanted, actual = gradients[path], parameter.grad
        if wanted is None and (actual is None or largest(_local(actual)) <= floor):
            continue
        own = found[path]
        if wanted is None or actual is None or own is None or own.numel() != _local(actual).numel():
            yield path, float("inf")
            continue
        difference = _local(actual).flatten() - wanted.flatten()[own]
        yield path, relative_error(difference, max(largest(wanted), floor))


def _wrong_weights(reference: nn.Module, candidate: nn.Module, places: Mapping[str, Tensor | None]) -> Iterator[str]:
    """Ties that were broken, and weights that would be saved wrongly."""
    if ties(reference) != ties(candidate):
        yield f"ties: the reference shares {ties(reference)}, the parallelized model {ties(candidate)}"
    weights = dict(reference.named_parameters())
    own = {path for path, _ in candidate.named_parameters()}
    if changed := sorted(weights.keys() ^ own):
        yield f"parameters in only one of the two models: {', '.join(changed)}"
    for path, parameter in candidate.named_parameters():
        if path not in weights:
            continue
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if places[path] is None:
            yield f"{path} holds numbers that the model does not have"
        elif not torch.equal(whole, weights[path]):
            yield f"{path} gathers to another order than the model's"
