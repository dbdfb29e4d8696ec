"""Convolutions and recurrences over ``cp``: each rank computes its own tokens, as one process computes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from coverage.packing import LENGTH, PACKED_BOUND, ROWS, measure_packing_on_ranks
from coverage.table import entries, tiny_model
from fsdp_runtime import parallelize, sequence_layout
from fsdp_runtime.steps.context import mixers as gathered
from fsdp_runtime.steps.documents.recurrences import ByFunctions, functions_called
from harness.float64 import compute_in_float64
from harness.options import CONTIGUOUS
from harness.parity import mesh_for
from harness.ranks import RankPool

ONE = ((LENGTH,),) * 2
#: A row, the axes, the tokens of its documents, and options.
Case = tuple[str, dict[str, int], Any, dict[str, Any]]
TWO_RANKS: list[Case] = [
    ("qwen3_next", {"cp": 2}, ROWS, CONTIGUOUS),
    ("nemotron_h", {"cp": 2}, ROWS, {}),
    ("nemotron_h", {"cp": 2}, ONE, CONTIGUOUS),
    ("lfm2_moe", {"cp": 2}, ROWS, {"activation_checkpointing": "block"}),
    ("olmo_hybrid", {"cp": 2}, ONE, {}),
]
FOUR_RANKS: list[Case] = [
    ("qwen3_next", {"cp": 4}, ROWS, {}),
    ("nemotron_h", {"cp": 4}, ROWS, {}),
    ("lfm2_moe", {"cp": 4}, ONE, CONTIGUOUS),
    ("qwen3_5_text", {"cp": 2, "tp": 2}, ROWS, {}),
    ("nemotron_h", {"cp": 2, "tp": 2}, ROWS, {"sequence_parallel": True}),
    ("lfm2_moe", {"cp": 2, "tp": 2}, ROWS, {"sequence_parallel": True}),
]
#: The other rows whose convolutions and recurrences are spread, and those of the default tests.
SPREAD = [
    *("bailing_hybrid", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"),
]


@contextmanager
def _counted() -> Iterator[list[str]]:
    """The names of modules that compute their own tokens only, once a forward."""
    found: list[str] = []
    original = ByFunctions.is_verified

    def verified(self: Any, tokens: Any) -> bool:
        answer = original(self, tokens)
        if answer:
            found.append(type(self).__name__)
        return answer

    ByFunctions.is_verified = verified  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ByFunctions.is_verified = original  # type: ignore[method-assign]


def _errors(cases: list[Case]) -> dict[str, Any]:
    """Errors beyond the bound, and cases without a mixer that computes its own tokens, on this rank."""
    wrong: dict[str, Any] = {}
    for name, axes, rows, options in cases:
        with compute_in_float64(), _counted() as found:  # what backward recomputes, too
            errors = measure_packing_on_ranks(name, axes, rows=rows, **options)
        beyond = {path: error for path, error in errors.items() if not error <= PACKED_BOUND}
        if beyond or not found:
            wrong[f"{name} {axes} {rows} {options}"] = beyond or "on full sequences"
    return wrong


@pytest.mark.parametrize(
    "cases", [TWO_RANKS[::4], pytest.param(TWO_RANKS[1:4], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_two_ranks_give_the_outputs_and_gradients_of_documents_alone(two_ranks: RankPool, cases: list[Case]) -> None:
    assert two_ranks.run(_errors, cases) == [{}, {}]


@pytest.mark.parametrize(
    "cases", [FOUR_RANKS[4:5], pytest.param(FOUR_RANKS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_four_ranks_give_the_outputs_and_gradients_of_documents_alone(four_ranks: RankPool, cases: list[Case]) -> None:
    assert four_ranks.run(_errors, cases) == [{}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_every_architecture_with_known_functions_is_spread_exactly(
    two_ranks: RankPool, four_ranks: RankPool, name: str
) -> None:
    orders: list[dict[str, Any]] = [{}, CONTIGUOUS]
    assert two_ranks.run(_errors, [(name, {"cp": 2}, rows, o) for rows in (ROWS, ONE) for o in orders]) == [{}] * 2
    assert four_ranks.run(_errors, [(name, {"cp": 4}, ROWS, o) for o in orders]) == [{}] * 4


def _operations(names: list[str]) -> dict[str, tuple[float, float, float]]:
    """For each row, operations of a forward on this rank: by own tokens, on full sequences, all tokens' projections."""
    mesh, found = mesh_for({"cp": 2}), {}
    local = sequence_layout(mesh, LENGTH).shard_batch({"input_ids": torch.arange(2 * LENGTH).view(2, LENGTH)})
    for name in names:
        figures = []
        for mix_in in (gathered.mix_in, lambda *_: None):
            model = tiny_model(entries()[name])
            projections = sum(
                4 * LENGTH * linear.weight.numel()  # two rows, multiplied and added
                for module in model.modules()
                if functions_called(type(module))
                for linear in module.children()
                if isinstance(linear, nn.Linear)
            )
            with mock.patch.object(gathered, "mix_in", mix_in):
                parallelize(model, mesh, plan=None)
            with torch.no_grad():
                model(**local, use_cache=False)  # tests the modules
                with FlopCounterMode(display=False) as counter:
                    model(**local, use_cache=False)
            figures.append(float(counter.get_total_flops()))
        found[name] = (*figures, float(projections))
    return found


def test_a_rank_computes_the_projections_of_its_own_tokens_only(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_operations, ["lfm2_moe", "qwen3_next"]):
        for own, full, projections in found.values():
            assert projections > 0
            assert full - own >= projections / 2
