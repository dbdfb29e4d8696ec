"""The step ``CheckInputs``: different inputs on the ranks of one tp group are an error on all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime import LayoutError, MeshSpec, parallelize
from fsdp_runtime.steps import CheckInputs
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
        parallelize(model, MeshSpec(tp=2).build(device_type="cpu"), steps=(CheckInputs(),) if checked else ())
        with RecordCollectives() as communication, torch.no_grad():
            model(**inputs, use_cache=False)
        sent.append(sum(communication.counts().values()))
    return sent[0], sent[1]


def test_the_check_costs_one_collective(two_ranks: RankPool) -> None:
    for without, checked in two_ranks.run(_bytes_of_the_check):
        assert checked == without + 1


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
