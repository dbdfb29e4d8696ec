"""Packed rows of one architecture: does a document read another, and is each computed as it is alone?

Everything is in float64: where a model's code asks for float32, it gets float64 too, so that no bound has to allow for
its rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coverage.measure import default_dtype, gradient_errors
from coverage.shrink import VOCAB
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import FsdpRuntimeError, MeshSpec, parallelize, sequence_layout
from harness.float64 import compute_in_float64
from harness.options import load_balancer_of
from harness.parity import largest, logits_of, mesh_for

#: Tokens of the documents of each row: several lengths, one document of a single token, and equal lengths.
ROWS = ((3, 9, 12), (14, 1, 9))
LENGTH = sum(ROWS[0])
Rows = tuple[tuple[int, ...], ...]
#: Float64 leaves nothing but the order of sums.
PACKED_BOUND = 1e-12
#: Rows whose output is not one per token.
POOLED = {"qwen3, classifier"}
#: Of ids for which few indexers find two keys with the same score, between which ``topk`` chooses by their places.
_SEED = 27


@dataclass(frozen=True)
class PackedResult:
    """What packing does to one architecture.

    Args:
        leak: the largest change of a document's logits where all others change, with equal shapes.
        gradient_leak: the same of any parameter's gradient of a loss on that document.
        output_error: the largest error of the logits against each document alone.
        gradient_errors: each parameter's gradient against the sum over the documents alone, of its largest element.
    """

    leak: float
    gradient_leak: float
    output_error: float
    gradient_errors: dict[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The largest of all errors against the documents alone."""
        return max(self.output_error, *self.gradient_errors.values())


def packed_positions(rows: Rows = ROWS) -> Tensor:
    """The position ids of rows."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def documents(rows: Rows = ROWS) -> Iterator[tuple[int, slice]]:
    """The row and the tokens of each document."""
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            yield row, slice(start, start + length)
            start += length


def measure_packing(model: nn.Module, prepare: Callable[[nn.Module], nn.Module]) -> PackedResult:
    """Compare a model that ``prepare`` has made for packed rows with the plain one on each document.

    Args:
        model: the plain model, in float64.
        prepare: changes a copy of it.
    """
    with default_dtype(torch.float64), compute_in_float64():
        model = _doubled(copy.deepcopy(model))  # some modules keep a state of their last forward
        packed = prepare(copy.deepcopy(model))
        reference = _Alone.of(model)
        logits = _logits(packed, reference.ids)
        (logits * reference.weights).sum().backward()
        together = _take_gradients(packed)

        row, tokens = list(documents())[1]
        others = reference.ids.flip(1)
        others[row, tokens] = reference.ids[row, tokens]
        one, same = (_one_document(packed, ids, reference.weights, row, tokens) for ids in (reference.ids, others))
    expected = reference.gradients
    floor = _floor(expected)
    return PackedResult(
        leak=largest(one[0] - same[0]),
        gradient_leak=max(_difference(one[1][n], same[1][n], floor) for n in one[1]),
        output_error=largest(logits.detach() - reference.logits),
        gradient_errors={name: _difference(together[name], expected[name], floor) for name in expected},
    )


def measure_packing_on_ranks(
    name: str,
    axes: Mapping[str, int],
    *,
    rows: Rows = ROWS,
    change: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Compare one architecture, parallelized for packed rows, with the plain model on each document, on this rank.

    Args:
        name: the row.
        axes: the mesh, without data-parallel axes of several ranks.
        rows: tokens of the documents of each row.
        change: of the plain model, as adding adapters.
        options: further keywords of ``parallelize``.

    Returns:
        The error of the logits, and of each gradient relative to its largest element.
    """
    model, reference = _alone(name, rows, change)
    with default_dtype(torch.float64), compute_in_float64():
        mesh = mesh_for(axes)
        candidate = parallelize(copy.deepcopy(model), mesh, packed_sequences=True, **options)
        layout = sequence_layout(mesh, LENGTH, load_balancer=load_balancer_of(options))
        inputs = {"input_ids": reference.ids, "position_ids": packed_positions(rows)}
        logits = logits_of(candidate, layout.shard_batch(inputs))
        (logits * layout.shard(reference.weights)).sum().backward()
    errors = {"logits": largest(logits.detach() - layout.shard(reference.logits))}
    return errors | dict(gradient_errors(model, candidate, reference.gradients, floor=_floor(reference.gradients)))


@lru_cache(maxsize=1)
def _alone(name: str, rows: Rows, change: Callable[[nn.Module], nn.Module] | None) -> tuple[nn.Module, _Alone]:
    with default_dtype(torch.float64), compute_in_float64():
        model = _doubled(tiny_model(coverage_entries()[name]))
        model = model if change is None else change(model)
        unused = copy.deepcopy(model)  # some modules keep a state of their last forward
        return unused, _Alone.of(model, rows)


def _doubled(model: nn.Module) -> nn.Module:
    """The model with the parts in float64 that keep themselves in float32."""
    for module in model.modules():
        module.double()
    return model


def packed_outcome(name: str) -> dict[str, Any]:
    """Return what is kept of one row: whether documents meet without the option, and what it makes of them."""
    model = tiny_model(coverage_entries()[name])
    mesh = MeshSpec().build(device_type="cpu")
    options = {"plan": None, **coverage_entries()[name].options}
    try:
        found = measure_packing(model, lambda each: parallelize(each, mesh, packed_sequences=True, **options))
    except FsdpRuntimeError as error:
        return {"status": "refused", "note": str(error)}
    plain = measure_packing(model, lambda each: each)
    leaks = plain.leak > PACKED_BOUND
    if max(found.error, found.leak, found.gradient_leak) <= PACKED_BOUND:
        return {"status": "right", "leaks": leaks}
    with _indexers_without_ties():
        found = measure_packing(model, lambda each: parallelize(each, mesh, packed_sequences=True, **options))
    if max(found.error, found.leak, found.gradient_leak) <= PACKED_BOUND:
        note = "right where no scores of its indexer tie, of which topk takes others in rows of other lengths"
        return {"status": "right", "note": note, "leaks": leaks}
    return {"status": "wrong", "leaks": leaks}


@contextmanager
def _indexers_without_ties() -> Iterator[None]:
    """Let the scores of indexers, sums over heads after a ``relu``, be distinct where all heads are negative."""
    original = functional.relu
    functional.relu = partial(functional.leaky_relu, negative_slope=0.1)  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.relu = original  # type: ignore[assignment]


@dataclass(frozen=True)
class _Alone:
    """The plain model on each document alone.

    Args:
        ids: ``[rows, LENGTH]``.
        weights: those of the loss, a weighted sum of the logits.
        logits: as for packed rows.
        gradients: sums over the documents.
    """

    ids: Tensor
    weights: Tensor
    logits: Tensor
    gradients: dict[str, Tensor | None]

    @classmethod
    def of(cls, model: nn.Module, rows: Rows = ROWS) -> _Alone:
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(3, VOCAB, (len(ROWS), LENGTH), generator=generator)
        found: Tensor | None = None
        for row, tokens in documents(rows):
            positions = torch.arange(tokens.stop - tokens.start)[None]
            output = _forward(model, ids[row : row + 1, tokens], positions)[0]
            if found is None:
                found = torch.zeros(len(ROWS), LENGTH, output.shape[-1])
                weights = torch.randn(found.shape, generator=generator)
            (output * weights[row, tokens]).sum().backward()
            found[row, tokens] = output.detach()
        return cls(ids, weights, found, _take_gradients(model))


def _floor(gradients: Mapping[str, Tensor | None]) -> float:
    """The least scale of a gradient's error: some vanish mathematically, and what is left of them is rounding."""
    # The bound times this is half of float64's epsilon.
    return 1e-4 * max(largest(each) for each in gradients.values() if each is not None)


def _one_document(model: nn.Module, ids: Tensor, weights: Tensor, row: int, tokens: slice) -> tuple[Tensor, Any]:
    logits = _logits(model, ids)[row, tokens]
    (logits * weights[row, tokens]).sum().backward()
    return logits.detach(), _take_gradients(model)


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return _forward(model, ids, packed_positions())


def _forward(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits


def _take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def _difference(actual: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if actual is None or wanted is None:
        found = actual if wanted is None else wanted
        return 0.0 if found is None or largest(found) <= floor else float("inf")
    return largest(actual - wanted) / max(largest(wanted), floor)
