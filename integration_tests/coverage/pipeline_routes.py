"""Routes and balance of a mixture in pipeline stages, beside the same in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from coverage.measure import default_dtype
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import parallelize, record_routes, replay_routes, submesh
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.steps import Pipeline, RouterBalance, Routes, forward_backward, forward_only
from harness.float64 import compute_in_float64
from harness.parity import gradient_errors, mesh_for


def measure_routes(name: str, axes: dict[str, int], step: Pipeline, **options: Any) -> dict[str, float]:
    """Record routes, replay others and move the biases of routers, on this rank; return the errors."""
    with default_dtype(torch.float64), compute_in_float64():
        plain = tiny_model(coverage_entries()[name])
        mesh = mesh_for(axes)
        staged = parallelize(copy.deepcopy(plain), mesh, steps=(step,), logits="full", **options)
        data = submesh(mesh, "dp")
        batches = [_batches(step.microbatches, rank) for rank in range(data.size())]
        rank = data.get_local_rank()
        balances = [RouterBalance(model, rate=0.1) for model in (plain, staged)]
        recorded = [_recorded(plain, batch) for rows in batches for batch in rows]
        for routes in recorded:
            balances[0].count(routes)
        with balances[1].counting() as routes:
            forward_only(staged, batches[rank])
        own = recorded[rank * step.microbatches : (rank + 1) * step.microbatches]
        expected = {path: torch.cat([part[path] for part in own]) for path in own[0]}
        errors = {"routes": float(not _equal(routes, expected))}
        for balance in balances:
            balance.step()
        errors["loads"] = float(not _equal(balances[1].loads, balances[0].loads))
        errors |= _bias_errors(plain, staged)
        for batch, part in zip((b for rows in batches for b in rows), recorded, strict=True):
            with replay_routes(plain, {path: _others(ids) for path, ids in part.items()}):
                _loss(plain(**batch, use_cache=False)).backward()
        others = {path: torch.cat([_others(part[path]) for part in own]) for path in own[0]}
        with replay_routes(staged, Routes(others)):
            forward_backward(staged, batches[rank], lambda output, _: _loss(output) * data.size())
        return errors | gradient_errors({name: p.grad for name, p in plain.named_parameters()}, staged)


def _batches(count: int, rank: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"input_ids": torch.randint(3, 90, (2, 5 + i % 2), generator=generator)} for i in range(count)]


def _recorded(model: nn.Module, batch: dict[str, Tensor]) -> Routes:
    with record_routes(model) as routes, torch.no_grad():
        model(**batch, use_cache=False)
    return routes


def _others(ids: Tensor) -> Tensor:
    """Return routes that differ from the model's own: of the next token in the order of ids."""
    return ids.sort(-1).values.flip(-1).roll(1, 0) if len(ids) > 1 else ids


def _loss(output: Any) -> Tensor:
    return output.logits.square().mean()  # type: ignore[no-any-return]


def _equal(routes: Any, expected: Any) -> bool:
    return routes.keys() == expected.keys() and all(torch.equal(routes[path], expected[path]) for path in expected)


def _bias_errors(plain: nn.Module, staged: nn.Module) -> dict[str, float]:
    expected = {entry.names[0]: entry.tensor for entry in state_entries(plain)}
    biases = {e.names[0]: e.tensor for e in state_entries(staged) if "correction_bias" in e.names[0]}
    return {name: float((bias.detach() - expected[name]).abs().max()) for name, bias in biases.items()}
