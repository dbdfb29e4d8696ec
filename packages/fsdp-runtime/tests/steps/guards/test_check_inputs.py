"""The step ``CheckInputs``: different inputs on the ranks of one tp group are an error on all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime import LayoutError, MeshSpec, OptionError, parallelize
from fsdp_runtime.steps import CheckInputs
from fsdp_runtime.steps.guards.check_inputs import InputCheck
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool


def _outcome(kind: str) -> str:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    inputs: dict[str, Any] = dict(tiny_inputs(model, batch=2, length=7))
    parallelize(model, MeshSpec(tp=2).build(device_type="cpu"), steps=(CheckInputs(),))
    last = dist.get_rank() == 1
    tokens = inputs["input_ids"]
    match kind:
        case "another token" if last:
            inputs["input_ids"] = tokens.clone()
            inputs["input_ids"][1, 6] = (tokens[1, 6] + 1) % 131
        case "two tokens swapped" if last:
            inputs["input_ids"] = tokens.flip(1)
        case "another length" if last:
            inputs["input_ids"] = tokens[:, :5]
        case "rows swapped" if last:
            inputs["input_ids"] = tokens.flip(0)
        case "another mask":
            inputs["attention_mask"] = torch.ones_like(tokens)
            inputs["attention_mask"][0, 0] = 0 if last else 1
        case "a missing mask" if last:
            inputs["attention_mask"] = torch.ones_like(tokens)
        case "another keyword" if last:
            inputs["logits_to_keep"] = 1
        case "embeddings":
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
            if last:
                inputs["inputs_embeds"] = inputs["inputs_embeds"] + 1e-6
    try:
        model(**inputs, use_cache=False)
    except LayoutError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("another token", "input_ids"),
        ("two tokens swapped", "input_ids"),
        ("another length", "[2, 7]"),
        ("rows swapped", "input_ids"),
        ("another mask", "attention_mask"),
        ("a missing mask", "missing on rank 0"),
        ("another keyword", "logits_to_keep"),
        ("embeddings", "inputs_embeds"),
    ],
)
def test_different_inputs_raise_on_every_rank(two_ranks: RankPool, kind: str, named: str) -> None:
    for outcome in two_ranks.run(_outcome, kind):
        assert outcome.startswith("LayoutError: ranks [0, 1] of one tp group were given different inputs")
        assert named in outcome


def test_equal_inputs_run(two_ranks: RankPool) -> None:
    assert two_ranks.run(_outcome, "equal") == ["ran", "ran"]


def _bytes_of_the_check() -> tuple[int, int]:
    sent = []
    for checked in (False, True):
        model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
        inputs = tiny_inputs(model, batch=2, length=7)
        parallelize(model, MeshSpec(tp=2).build(device_type="cpu"), steps=(CheckInputs(1 if checked else "never"),))
        with RecordCollectives() as communication, torch.no_grad():
            model(**inputs, use_cache=False)
        sent.append(sum(communication.counts().values()))
    return sent[0], sent[1]


def test_the_check_costs_one_collective(two_ranks: RankPool) -> None:
    for without, checked in two_ranks.run(_bytes_of_the_check):
        assert checked == without + 1


def _outcomes(every: Any, plan: str | None) -> list[str]:
    """Outcomes of forwards with inputs of each rank's own: three in training, two in evaluation, one in both modes."""
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    tokens = tiny_inputs(model, batch=2, length=7)["input_ids"]
    steps = () if every is None else (CheckInputs(every),)
    parallelize(model, MeshSpec(tp=2).build(device_type="cpu"), plan=plan, steps=steps)
    other, last = tokens + dist.get_rank(), dist.get_rank() == 1
    found = []
    for training, given in ((True, tokens), *((True, other),) * 2, *((False, other),) * 2):
        try:
            model.train(training)(given, use_cache=False)
            found.append("ran")
        except LayoutError as error:
            found.append("refused" if "first at [0, 0]: " in str(error) else str(error))
    fresh = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    parallelize(fresh, MeshSpec(tp=2).build(device_type="cpu"), plan=plan, steps=steps)
    try:
        fresh.train(last)(tokens, use_cache=False)
    except LayoutError as error:
        found.append("modes" if "training: False on rank 0, True on rank 1" in str(error) else str(error))
    return found


@pytest.mark.parametrize(
    ("every", "plan", "expected"),
    [
        (None, "auto", ["ran", "refused", "ran", "refused", "ran", "modes"]),
        (None, None, ["ran", "refused", "ran", "refused", "ran", "modes"]),
        (1, "auto", ["ran", "refused", "refused", "refused", "refused", "modes"]),
        (2, "auto", ["ran", "refused", "refused", "refused", "ran", "modes"]),
        ("never", "auto", ["ran"] * 5),
    ],
)
def test_first_forwards_are_compared_by_default(
    two_ranks: RankPool, every: Any, plan: str | None, expected: list[str]
) -> None:
    assert two_ranks.run(_outcomes, every, plan) == [expected, expected]


def _over_cp(images: float) -> str:
    """Give each rank of ``cp`` images of its own beside its part of the rows."""
    check = InputCheck(None, dist.GroupMember.WORLD, 1)
    tokens = torch.arange(4)[None] + dist.get_rank()
    pixels = torch.full((1, 3, 8, 8), images * dist.get_rank())
    try:
        check(torch.nn.Linear(1, 1), (), {"input_ids": tokens, "pixel_values": pixels})
    except LayoutError as error:
        return str(error)
    return "ran"


def test_media_are_compared_over_cp(two_ranks: RankPool) -> None:
    assert two_ranks.run(_over_cp, 0.0) == ["ran", "ran"]
    for outcome in two_ranks.run(_over_cp, 1.0):
        assert "of one cp group were given different inputs (pixel_values: [1, 3, 8, 8]" in outcome
        assert "first at [0, 0, 0, 0]: 0.0 on rank 0, 1.0 on rank 1" in outcome


@pytest.mark.parametrize("every", [0, True, "always", 1.0])
def test_a_frequency_that_means_nothing_is_refused(every: Any) -> None:
    with pytest.raises(OptionError, match=f"every={every!r}: give a number of forwards, 1 or more, or 'first' or"):
        CheckInputs(every)


def _copied_outcome() -> list[str]:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    inputs = dict(tiny_inputs(model, batch=2, length=7))
    parallelize(model, MeshSpec(tp=2).build(device_type="cpu"), steps=(CheckInputs(),))
    copied = copy.deepcopy(model)
    found = []
    for tokens in (inputs["input_ids"], inputs["input_ids"] + dist.get_rank()):
        try:
            copied(tokens, use_cache=False)
            found.append("ran")
        except LayoutError:
            found.append("refused")
    return found


def test_a_copied_model_compares_its_inputs_too(two_ranks: RankPool) -> None:
    assert two_ranks.run(_copied_outcome) == [["ran", "refused"]] * 2
