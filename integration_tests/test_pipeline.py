"""Pipeline stages against the single-process model: losses, logits, gradients and norms on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from coverage.measure import default_dtype
from coverage.pipeline import PIPELINE_BOUND, measure_pipeline, pipeline_outcome
from coverage.pipeline_routes import measure_routes
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import ModelError, parallelize, submesh, unsharded
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps import Pipeline, forward_backward, forward_only
from fsdp_runtime.steps.pipeline.state import summing_shared_gradients
from harness.adapters import filled
from harness.float64 import compute_in_float64
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool
from rl_logprobs import clip_grad_norm_, grad_norm, grad_norms

#: Each schedule, and each kind of model that other implementations of stages refuse.
TWO_RANKS = {
    "mixture with MLA": ("deepseek_v3", Pipeline(), {}),
    "tied, sliding and full attention": ("gemma2", Pipeline("GPipe"), {"activation_checkpointing": "block"}),
    "shared keys, per-layer inputs, interleaved": ("gemma4_text", Pipeline("Interleaved1F1B"), {}),
    "shared keys, per-layer inputs, V": ("gemma4_text", Pipeline("ZBVZeroBubble"), {}),
    "adapters": ("gemma2", Pipeline(), {"adapted": "all-linear"}),
    "hybrid of a vision model": ("qwen3_5, vision", Pipeline(layers=(1, 1)), {}),
    "packed rows of a hybrid": ("qwen3_next", Pipeline(), {"packed": True, "packed_sequences": True}),
    "deepstack": ("qwen3_vl", Pipeline(layers=(3, 1), microbatches=2), {"media": "image"}),
    "per-layer inputs of images": ("gemma4", Pipeline(microbatches=2), {"media": "image"}),
}
#: Modules of the language model that get adapters.
LANGUAGE = r".*language_model.*(q_proj|down_proj)"
MEDIA = {
    "images in V": ("llava", {"pp": 2}, Pipeline("ZBVZeroBubble", microbatches=2, layers=(1,) * 4), {}),
    "adapters, frozen tower": ("gemma3", {"pp": 2}, Pipeline(microbatches=2), {"adapted": LANGUAGE}),
    "video": ("qwen2_5_vl", {"pp": 2}, Pipeline(microbatches=2), {"media": "video"}),
    "parameter of the model": ("llava_next", {"pp": 2}, Pipeline(microbatches=2), {}),
    "sound": ("qwen2_audio", {"pp": 2}, Pipeline(microbatches=2), {"media": "audio"}),
    "sound of a Mistral": ("voxtral", {"pp": 2}, Pipeline(microbatches=2), {"media": "audio"}),
    "FSDP2": ("qwen2_5_vl", {"pp": 2, "dp_shard": 2}, Pipeline(microbatches=2), {}),
    "SP": ("qwen2_5_vl", {"pp": 2, "tp": 2}, Pipeline(microbatches=2), {"sequence_parallel": True}),
}
FOUR_RANKS = {
    "four stages, tied": ("gemma4_text", {"pp": 4}, {}),
    "SP": ("llama", {"pp": 2, "tp": 2}, {"sequence_parallel": True}),
    "EP": ("deepseek_v3", {"pp": 2, "tp": 2, "ep": 2}, {}),
    "FSDP2": ("gemma2", {"pp": 2, "dp_shard": 2}, {}),
    "FSDP2, split backward": ("gemma4_text", {"pp": 2, "dp_shard": 2}, {"step": Pipeline("ZBVZeroBubble")}),
}


def _assert_right(reports: list[dict[str, float]]) -> None:
    errors = [{name: error for name, error in each.items() if not error <= PIPELINE_BOUND} for each in reports]
    assert not any(errors), errors
    assert sum("logits" in each for each in reports) in (1, 2)  # the last stage's ranks have outputs


@pytest.mark.parametrize("case", TWO_RANKS)
def test_stages_on_two_ranks_match_the_whole_model(case: str, two_ranks: RankPool) -> None:
    name, step, options = TWO_RANKS[case]
    _assert_right(two_ranks.run(measure_pipeline, name, {"pp": 2}, step, **options))


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_stages_with_another_axis_match_the_whole_model(case: str, four_ranks: RankPool) -> None:
    name, axes, options = FOUR_RANKS[case]
    _assert_right(four_ranks.run(measure_pipeline, name, axes, **{"step": Pipeline(), **options}))


def _assert_routes_are_right(reports: list[dict[str, float]]) -> None:
    for errors in reports:
        assert not {name: error for name, error in errors.items() if not error <= PIPELINE_BOUND}


def test_routes_and_balance_in_stages_match_the_whole_model(two_ranks: RankPool) -> None:
    _assert_routes_are_right(two_ranks.run(measure_routes, "deepseek_v3", {"pp": 2}, Pipeline(microbatches=2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"pp": 2, "dp_shard": 2}, {"activation_checkpointing": "block"}),
        ({"pp": 2, "tp": 2, "ep": 2}, {"sequence_parallel": True}),
    ],
)
def test_routes_in_stages_with_another_axis_match_the_whole_model(
    axes: dict[str, int], options: dict[str, Any], four_ranks: RankPool
) -> None:
    reports = four_ranks.run(measure_routes, "deepseek_v3", axes, Pipeline(microbatches=2), **options)
    _assert_routes_are_right(reports)


@pytest.mark.slow
@pytest.mark.parametrize("case", MEDIA)
def test_stages_of_a_multimodal_model_match_the_whole(case: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    name, axes, step, options = MEDIA[case]
    ranks = two_ranks if axes == {"pp": 2} else four_ranks
    _assert_right(ranks.run(measure_pipeline, name, axes, step, **{"media": "image", **options}))


def _errors_of_lengths(lengths: list[list[tuple[int, int]]]) -> list[float]:
    """The errors of logits where data-parallel ranks have micro-batches of other lengths, under SP."""
    with default_dtype(torch.float64), compute_in_float64(), torch.no_grad():
        plain = tiny_model(coverage_entries()["llama"])
        mesh = mesh_for({"pp": 2, "dp_shard": 2, "tp": 2})
        options: dict[str, Any] = {"logits": "full", "sequence_parallel": True}
        staged = parallelize(copy.deepcopy(plain), mesh, steps=(Pipeline(microbatches=2),), **options)
        errors = []
        for both in lengths[submesh(mesh, "dp").get_local_rank()]:
            batches = [{"input_ids": torch.arange(2 * length).view(2, length) % 90 + 3} for length in both]
            logits = forward_only(staged, batches, lambda output, _: output.logits) or []
            expected = [plain(**batch, use_cache=False).logits for batch in batches]
            errors += [largest(one - other) for one, other in zip(logits, expected, strict=False)]
    return errors


@pytest.mark.slow
def test_forward_only_takes_other_lengths_on_each_data_parallel_rank(eight_ranks: RankPool) -> None:
    lengths = [[(7, 7), (7, 9), (5, 6)], [(8, 9), (7, 7), (10, 11)]]  # of two data-parallel ranks, in three calls
    errors = eight_ranks.run(_errors_of_lengths, lengths)
    assert sorted(map(len, errors)) == [0] * 4 + [6] * 4
    assert max(max(each, default=0.0) for each in errors) <= PIPELINE_BOUND


def _errors_of_accumulated_gradients() -> dict[str, float]:
    """The errors of gradients of a call, then of a second one inside ``unsharded``, with a tied embedding."""
    with default_dtype(torch.float64), compute_in_float64():
        plain = tiny_model(coverage_entries()["gemma2"])
        staged = parallelize(
            copy.deepcopy(plain), mesh_for({"pp": 2, "dp_shard": 2}), steps=(Pipeline(microbatches=2),), logits="full"
        )
        batches = [{"input_ids": torch.arange(9).view(1, 9) + start} for start in (3, 20)]

        def loss(output: Any, batch: Any = None) -> torch.Tensor:
            return output.logits.square().mean()  # type: ignore[no-any-return]

        forward_backward(staged, batches, loss)
        with unsharded(staged):
            forward_backward(staged, batches, loss)
        sum(2 * loss(plain(**batch, use_cache=False)) for batch in batches).backward()
        return gradient_errors({name: p.grad for name, p in plain.named_parameters()}, staged)


def test_forward_backward_inside_unsharded_adds_to_earlier_gradients(four_ranks: RankPool) -> None:
    for errors in four_ranks.run(_errors_of_accumulated_gradients):
        assert not {name: error for name, error in errors.items() if not error <= PIPELINE_BOUND}


def _shared_gradients_after_an_error() -> dict[str, bool]:
    """Whether each parameter on several ranks keeps its earlier gradient if a schedule raises."""
    staged = parallelize(
        tiny_model(coverage_entries()["gemma2"]), mesh_for({"pp": 2}), steps=(Pipeline(microbatches=2),)
    )
    batches = [{"input_ids": torch.arange(9).view(1, 9) + start} for start in (3, 20)]
    forward_backward(staged, batches, lambda output, _: output.logits.square().mean())
    record, parameters = runtime_state(staged).stages, dict(staged.named_parameters())
    earlier = {name: parameters[name].grad for name in record.shared}
    with suppress(ValueError), summing_shared_gradients(staged, record):
        raise ValueError("planted")
    return {name: gradient is not None and parameters[name].grad is gradient for name, gradient in earlier.items()}


def test_summing_shared_gradients_keeps_earlier_ones_after_an_error(two_ranks: RankPool) -> None:
    for kept in two_ranks.run(_shared_gradients_after_an_error):
        assert kept
        assert all(kept.values())


def _modes_after_a_failing_batch() -> tuple[str, set[bool]]:
    """The error of a batch that no stage can run, and the modes of the modules after it."""
    staged = parallelize(
        tiny_model(coverage_entries()["llama"]).train(), mesh_for({"pp": 2}), steps=(Pipeline(microbatches=2),)
    )
    try:
        forward_only(staged, [{"input_ids": torch.full((1, 4), 10**6)}] * 2)
    except ModelError as error:
        return str(error), {module.training for module in staged.modules()}
    return "", set()


def test_forward_only_leaves_the_mode_of_a_model_after_a_failing_batch(two_ranks: RankPool) -> None:
    for message, modes in two_ranks.run(_modes_after_a_failing_batch):
        assert "the forward of stage 0 on rank 0 of pp raises IndexError" in message
        assert modes == {True}


#: Rows of the coverage table that are refused: they run a block several times, or read blocks after the last one.
REFUSED = {"dory", "hrm_text", "inkling2_loop_text", "inkling2_text", "rwkv"}


@pytest.mark.slow
def test_stages_of_every_architecture_are_right_or_refused(two_ranks: RankPool) -> None:
    statuses: dict[str, set[str]] = {}
    for name in sorted(set(coverage_entries()) - {"gemma3n"}):
        outcomes: list[Mapping[str, Any]] = two_ranks.run(pipeline_outcome, name, {"pp": 2}, Pipeline(), timeout=120)
        statuses.setdefault(",".join(sorted({str(each["status"]) for each in outcomes})), set()).add(name)
    assert statuses.pop("refused") == REFUSED
    assert set(statuses) == {"right"}
    assert len(statuses["right"]) >= 150


def _norms_of_one_adapted_block(block: int) -> tuple[list[float], float]:
    """The norms of the trained parameters, which one of two stages has all, in stages and in one process."""
    config = LoraConfig(r=4, target_modules=rf".*layers\.{block}\..*(q_proj|down_proj)")
    with default_dtype(torch.float64):
        plain = filled(get_peft_model(tiny_model(coverage_entries()["llama"]), config))
    staged = parallelize(copy.deepcopy(plain), mesh_for({"pp": 2}), steps=(Pipeline(microbatches=2),), logits="full")
    batches = [{"input_ids": torch.arange(9).view(1, 9), "labels": torch.arange(9).view(1, 9)}] * 2
    forward_backward(staged, batches)
    (sum(plain(**batch, use_cache=False).loss for batch in batches) / 2).backward()
    trained = [parameter for parameter in staged.parameters() if parameter.requires_grad]
    norms = [grad_norm(trained), clip_grad_norm_(trained, 0.5), grad_norm(trained), grad_norm(trained, math.inf)]
    assert {norm.dtype for norm in norms} == {torch.float64}
    norms.append(grad_norms({"trained": trained})["trained"])
    return [float(norm) for norm in norms], float(grad_norm(plain.parameters()))


@pytest.mark.parametrize("block", [0, 1])
def test_grad_norm_covers_all_stages_from_a_stage_without_parameters(block: int, two_ranks: RankPool) -> None:
    for norms, expected in two_ranks.run(_norms_of_one_adapted_block, block):
        assert norms[0] == norms[1] == pytest.approx(expected, rel=1e-6)
        assert norms[2] == norms[4] == pytest.approx(min(0.5, expected), rel=1e-4)
        assert 0 < norms[3] < norms[2]
