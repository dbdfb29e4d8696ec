"""Equal policies have ratio 1: truncated sampling from a mixture that routed otherwise, packed, on every axis."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_runtime
import rl_logprobs
from coverage.shrink import VOCAB
from coverage.table import entries, tiny_model
from fsdp_runtime import parallelize, replay_routes, submesh
from fsdp_runtime.batching import PackedRow, pack
from fsdp_runtime.steps.routing.routers import find_routers
from harness.float64 import compute_in_float64
from harness.options import CONTIGUOUS, load_balancer_of
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool
from harness.rollouts import sample_completions

BATCH, PROMPT, LENGTH, BUDGET = 4, 4, 12, 28
SAMPLING = rl_logprobs.SamplingFilter(top_p=0.8, top_k=40)
#: Of a log-probability absolute, of a gradient relative to its largest element; in float64 throughout.
BOUND = 1e-12

#: Each axis with the others, each way of recomputing.
CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_shard": 2, "tp": 2, "ep": 2}, {"activation_checkpointing": "block"}),
    ({"cp": 2, "tp": 2, "ep": 4}, {"activation_checkpointing": "selective"}),
    ({"dp_shard": 2, "cp": 2, "ep": 2}, {"activation_checkpointing": "mlp", **CONTIGUOUS}),
    ({"dp_shard": 2, "tp": 2}, {"activation_checkpointing": "block", "sequence_parallel": True}),
]


@dataclass(frozen=True)
class Rollout:
    """What a generator returns for ``BATCH`` prompts: samples, log-probabilities, kept ids and experts of each token.

    The experts are ``[layers, BATCH * LENGTH, k]`` with -1 for the last token of a sample, which was never run.
    """

    samples: list[Tensor]
    logprobs: Tensor
    kept_tokens: rl_logprobs.KeptTokens
    routes: Tensor


@torch.no_grad()
def _generate(model: nn.Module) -> Rollout:
    """Sample with truncation from a mixture whose experts are not those that the trainer would select."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, VOCAB - 1, (BATCH, PROMPT), generator=generator)
    lengths = [PROMPT + 3, LENGTH, PROMPT + 5, LENGTH - 1]
    routers = find_routers(model).by_path.values()
    chosen = torch.stack(
        [_any_experts(BATCH * LENGTH, router.experts, router.top_k or 2, generator) for router in routers]
    ).view(len(routers), BATCH, LENGTH, -1)

    def next_logits(tokens: Tensor) -> Tensor:
        with replay_routes(model, chosen[:, :, : tokens.shape[1]].flatten(1, 2)):
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits[:, -1]

    found = sample_completions(next_logits, prompts, [length - PROMPT for length in lengths], LENGTH, SAMPLING)
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    by_token = chosen.permute(1, 2, 0, 3)  # [tokens, layers, k] for each sample, as vLLM returns them
    return Rollout(
        samples=[row[:length] for row, length in zip(found.tokens, lengths, strict=True)],
        logprobs=found.logprobs,
        kept_tokens=found.kept_tokens,
        routes=fsdp_runtime.steps.routes_from_generator(
            [routes[: length - 1] for routes, length in zip(by_token, lengths, strict=True)], mask
        ),
    )


def _any_experts(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices


@dataclass(frozen=True)
class Found:
    """The farthest log-probability from the generator's, and the model after backward of a clipped policy loss."""

    distance: float
    model: nn.Module


def _train(
    model: nn.Module,
    rollout: Rollout,
    axes: dict[str, int] | None = None,
    cures: tuple[str, ...] = ("kept tokens", "routes"),
    **options: Any,
) -> Found:
    """Score the packed samples and run backward, on one process or on the ranks of a mesh."""
    rank, dp, cp, layout_of = 0, 1, 1, None
    ranks: dict[str, Any] = {"group": ()}
    if axes is not None:
        mesh = mesh_for(axes)
        parallelize(model, mesh, **options)
        data = submesh(mesh, "dp")
        rank, dp, cp, ranks = data.get_local_rank(), data.size(), axes.get("cp", 1), {"mesh": mesh}
        if cp > 1:

            def layout_of(length: int) -> Any:
                return fsdp_runtime.sequence_layout(mesh, length, load_balancer=load_balancer_of(options))

    responses = [torch.arange(len(sample)) >= PROMPT for sample in rollout.samples]
    packing = pack(rollout.samples, BUDGET // cp, ranks=dp, cp=cp, loss_masks=responses, multiple_of=4)
    rows = packing.rows(rank)

    def local(row: PackedRow, values: Tensor) -> Tensor:
        return values if layout_of is None else layout_of(row.input_ids.shape[1]).shard(values)

    masks = [local(row, row.targets >= 0) for row in rows]
    segments = [local(row, _by_token(row, [torch.full((n,), s) for s, n in _samples(row)], 0)[None]) for row in rows]
    weights = rl_logprobs.mean_weights(masks, per="sequence", segments=segments, num_segments=BATCH, **ranks)
    advantages = torch.tensor([0.7, -1.0, 0.4, 1.3], dtype=torch.float64)
    distance = 0.0
    losses = []
    for row, mask, segment in zip(rows, masks, segments, strict=True):
        places = _by_token(row, [s * LENGTH + torch.arange(n) for s, n in _samples(row)], LENGTH - 1)
        routes = rollout.routes[:, places].masked_fill(torch.arange(len(places))[:, None] >= sum(row.lengths), -1)
        inputs = {name: local(row, value) for name, value in row.inputs.items()}
        with replay_routes(model, routes) if "routes" in cures else nullcontext():
            logits = model(**inputs, use_cache=False).logits
        own = local(row, places[None])
        kept_tokens = rollout.kept_tokens.select(own) if "kept tokens" in cures else None
        logprobs = rl_logprobs.token_logprobs(logits, local(row, row.targets), kept_tokens=kept_tokens)
        old = rollout.logprobs.flatten()[own]
        distance = max(distance, largest((logprobs.detach() - old)[mask]))
        policy = rl_logprobs.ppo_loss(logprobs, old, advantages[segment], mask)
        losses.append(rl_logprobs.global_mean(policy.loss, mask, weights, segments=segment))
    for loss in losses:  # recomputes after the contexts
        loss.backward()
    return Found(distance, model)


def _samples(row: PackedRow) -> list[tuple[int, int]]:
    return list(zip(row.samples, row.lengths, strict=True))


def _by_token(row: PackedRow, parts: list[Tensor], padding: int) -> Tensor:
    """One value for each token of a row, from those of its samples."""
    values = torch.cat([*parts, torch.empty(0, dtype=torch.int64)])
    return nn.functional.pad(values, (0, row.input_ids.shape[1] - len(values)), value=padding)


@cache
def _model_and_rollout(name: str) -> tuple[nn.Module, Rollout]:
    model = tiny_model(entries()[name]).double()
    with compute_in_float64():
        return model, _generate(model)


def _errors(name: str, cases: list[tuple[dict[str, int], dict[str, Any]]]) -> dict[str, float]:
    """The errors beyond the bound: of log-probabilities against the generator, of gradients against one process."""
    model, rollout = _model_and_rollout(name)
    errors: dict[str, float] = {}
    with compute_in_float64():
        alone = _train(copy.deepcopy(model), rollout)
        expected = {path: parameter.grad for path, parameter in alone.model.named_parameters()}
        errors["one process: ratio"] = alone.distance
        for axes, options in cases:
            found = _train(copy.deepcopy(model), rollout, axes, **options)
            errors[f"{axes}: ratio"] = found.distance
            # A gradient that vanishes mathematically is rounding, in these units too.
            gradients = gradient_errors(expected, found.model, least_share=1e-3)
            errors |= {f"{axes}: {path}": error for path, error in gradients.items()}
    return {path: error for path, error in errors.items() if not error <= BOUND}


# Of the second's experts, groups are chosen first.
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("deepseek_v3", CASES[1:2]),
        pytest.param("mixtral", CASES[2:3], marks=pytest.mark.slow),
        *(pytest.param(name, CASES, marks=pytest.mark.slow) for name in ("mixtral", "deepseek_v3")),
    ],
)
def test_equal_policies_have_ratio_one_and_one_gradient_on_every_mesh(
    four_ranks: RankPool, name: str, cases: list[tuple[dict[str, int], dict[str, Any]]]
) -> None:
    assert four_ranks.run(_errors, name, cases) == [{}] * 4


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_without_either_cure_the_ratio_is_not_one(name: str) -> None:
    model, rollout = _model_and_rollout(name)
    with compute_in_float64():
        assert _train(copy.deepcopy(model), rollout).distance <= BOUND
        assert _train(copy.deepcopy(model), rollout, cures=("kept tokens",)).distance > 1e-3
        assert _train(copy.deepcopy(model), rollout, cures=("routes",)).distance > 1e-2
