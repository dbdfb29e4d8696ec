"""What a generator sampled with truncation, a sharded trainer scores equally; and a batch has one gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_runtime
import rl_logprobs
from harness.models import tiny_model
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, gradient_errors, mesh_for
from harness.ranks import RankPool
from harness.rollouts import Completions, sample_completions

BATCH, PROMPT, LENGTH = 4, 4, 16
SAMPLING = rl_logprobs.SamplingFilter(top_p=0.8, top_k=40)
MESHES = ({"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2})
#: Of a mixture, whose experts are divided over ``ep`` and summed over other ranks than all other parameters.
EXPERT_MESHES = (
    {"dp_shard": 2, "tp": 2, "ep": 4},
    {"dp_shard": 2, "cp": 2, "ep": 2},
    {"dp_replicate": 2, "tp": 2, "ep": 2},
)
CASES = [
    pytest.param("Qwen3ForCausalLM", MESHES[:1], "token", marks=pytest.mark.slow),
    ("Qwen3ForCausalLM", MESHES[1:2], "sequence"),
    pytest.param("Qwen3ForCausalLM", MESHES[2:3], "token", marks=pytest.mark.slow),
    pytest.param("Qwen3ForCausalLM", MESHES[3:], "sequence", marks=pytest.mark.slow),
    pytest.param("Qwen3ForCausalLM", MESHES[1::2], "token", marks=pytest.mark.slow),
    pytest.param("Qwen3ForCausalLM", MESHES[::2], "sequence", marks=pytest.mark.slow),
    ("Qwen3MoeForCausalLM", EXPERT_MESHES[1:2], "token"),
    pytest.param("Qwen3MoeForCausalLM", EXPERT_MESHES[::2], "token", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Rollout(Completions):
    """Completions, their log-probabilities zero outside of ``mask`` ``[batch, seq]``."""

    mask: Tensor


@torch.no_grad()
def _generate(model: nn.Module) -> Rollout:
    """Completions of random lengths, as an engine with truncated sampling returns them."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, 120, (BATCH, PROMPT), generator=generator)
    lengths = torch.randint(3, LENGTH - PROMPT + 1, (BATCH,), generator=generator)

    def next_logits(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False).logits[:, -1].double()

    found = sample_completions(next_logits, prompts, lengths.tolist(), LENGTH, SAMPLING)
    positions = torch.arange(LENGTH)
    mask = (positions >= PROMPT - 1) & (positions < PROMPT - 1 + lengths[:, None])
    return Rollout(found.tokens, found.logprobs * mask, found.kept_tokens, mask)


def _gradients(model: nn.Module, rollout: Rollout, axes: dict[str, int] | None, per: str) -> tuple[float, nn.Module]:
    """Backward of a GRPO loss in two micro-batches per rank; the largest distance of a ratio from 1."""
    rows, layout = torch.arange(BATCH), None
    ranks: dict[str, Any] = {"group": ()}
    if axes is not None:
        mesh = mesh_for(axes)
        fsdp_runtime.parallelize(model, mesh, sequence_parallel="tp" in axes and "cp" not in axes)
        data = fsdp_runtime.submesh(mesh, "dp")
        ranks = {"mesh": mesh}
        # Uneven: a rank of dp has one sequence, and the other three.
        rows = rows if data.size() == 1 else (rows[:1], rows[1:])[data.get_local_rank()]
        if axes.get("cp"):
            layout = fsdp_runtime.sequence_layout(mesh, LENGTH)
    advantages = torch.tensor([0.7, -1.0, 0.4, 1.3], dtype=torch.float64)[:, None]
    targets = rl_logprobs.next_token_targets(rollout.tokens).masked_fill(~rollout.mask, -100)
    positions = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)

    def local(tensor: Tensor, part: Tensor) -> Tensor:
        return tensor[part] if layout is None else layout.shard(tensor[part])

    # All ranks run the model as often as the others, because its collectives have to match.
    parts = [rows[:1], rows[1:] if len(rows) > 1 else rows[:1]]
    masks = [local(rollout.mask, part) for part in parts]
    if len(rows) == 1:
        masks[1] = torch.zeros_like(masks[1])
    weights = rl_logprobs.mean_weights(masks, per=per, **ranks)  # type: ignore[arg-type]
    furthest = 0.0
    for part, mask in zip(parts, masks, strict=True):
        inputs = {"input_ids": rollout.tokens[part]}
        if layout is not None:
            inputs = layout.shard_batch(inputs)
        logits = model(**inputs, use_cache=False).logits
        logprobs = rl_logprobs.token_logprobs(
            logits, local(targets, part), kept_tokens=rollout.kept_tokens.select(local(positions, part))
        )
        old = local(rollout.logprobs, part)
        furthest = max(furthest, (logprobs.detach() - old).abs().max().item())
        found = rl_logprobs.ppo_loss(logprobs, old.to(logprobs.dtype), advantages[part], mask)
        rl_logprobs.global_mean(found.loss, mask, weights).backward()
    return furthest, model


def _errors(architecture: str, meshes: tuple[dict[str, int], ...], per: str) -> dict[str, float]:
    """For each mesh, the largest error of a ratio and of each gradient, in units of their bounds."""
    single = tiny_model(architecture)
    rollout = _generate(single)
    _, reference = _gradients(copy.deepcopy(single), rollout, None, per)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert all(gradient is not None for gradient in expected.values())
    errors: dict[str, float] = {}
    for axes in meshes:
        furthest, model = _gradients(copy.deepcopy(single), rollout, axes, per)
        errors[f"{axes} ratio"] = furthest / OUTPUT_BOUND
        for name, error in gradient_errors(expected, model).items():
            errors[f"{axes} {name}"] = error / GRADIENT_BOUND
    return errors


@pytest.mark.parametrize(("architecture", "meshes", "per"), CASES)
def test_replayed_kept_sets_give_ratio_1_and_any_cut_the_gradient_of_one_process(
    four_ranks: RankPool, architecture: str, meshes: tuple[dict[str, int], ...], per: str
) -> None:
    for rank, errors in enumerate(four_ranks.run(_errors, architecture, meshes, per)):
        beyond = {name: error for name, error in errors.items() if not error <= 1}
        assert not beyond, f"rank {rank}"
        assert sum(name.endswith(" ratio") for name in errors) == len(meshes)
