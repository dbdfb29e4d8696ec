"""Packed rows: no document reads another, and each is computed as it is alone, in every kind of token mixer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from coverage.packing import (
    LENGTH,
    PACKED_BOUND,
    POOLED,
    ROWS,
    measure_packing,
    measure_packing_on_ranks,
    packed_positions,
)
from coverage.table import UNBUILDABLE, Entry, entries, tiny_model
from fsdp_runtime import MeshSpec, parallelize
from harness.ranks import RankPool

#: Rows with every way of mixing tokens.
KINDS = [
    "afmoe",  # masks that are built without position ids
    "bailing_hybrid",  # gated delta rule with a convolution
    "deepseek_v4",  # compressed keys
    "doge, mixture",  # a router whose choice depends on all tokens of a batch
    "falcon_h1",  # a state space beside attention
    "gemma3_text",  # sliding windows
    "glm_moe_dsa",  # an indexer that layers share
    "inkling2_text",  # short convolutions inside attention, sinks
    "inkling_text",
    "jamba",  # Mamba 1
    "kimi_linear",
    "lfm2_moe",  # short convolutions
    "llama4_text",  # chunked attention
    "minimax",  # lightning attention
    "nemotron_h",  # Mamba 2, blocks of one sub-layer
    "qwen3_next",
    "qwen4_exp_text",  # embeddings of n-grams, a dilated convolution
    "vaultgemma",  # soft caps
]
#: Rows that tests on ranks compare with their documents, too.
ON_RANKS = {"falcon_h1", "glm_moe_dsa", "inkling2_text", "lfm2_moe", "llama4_text", "minimax"}
#: Rows whose mixers are of a kind that another row has.
SLOW = ON_RANKS | {"bailing_hybrid", "inkling_text", "kimi_linear", "qwen4_exp_text"}
#: Decoders that transformers ships no plan for.
OTHERS = [
    Entry("gpt_oss", "gpt_oss", "GptOssForCausalLM"),  # sinks, and masks that are built without position ids
    Entry("mamba", "mamba", "MambaForCausalLM", {"state_size": 8}),
    Entry("mpt", "mpt", "MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2}),  # true entries forbid
    Entry("recurrent_gemma", "recurrent_gemma", "RecurrentGemmaForCausalLM", {"lru_width": 64}),
    Entry("rwkv", "rwkv", "RwkvForCausalLM", {"attention_hidden_size": 64}),  # token shift
    Entry("xlstm", "xlstm", "xLSTMForCausalLM", {"num_heads": 4, "num_blocks": 2}),
]
#: Rows of models that are not from transformers.
_REFUSED = {"baichuan", "deci_lm", "nemotron_flash", "nemotron_labs_diffusion"}


def _packed(model: nn.Module) -> nn.Module:
    return parallelize(model, MeshSpec().build(device_type="cpu"), packed_sequences=True)


def _assert_exact(entry: Entry) -> None:
    found = measure_packing(tiny_model(entry), _packed)
    # Experts multiply the tokens of all documents at once, by kernels that are chosen by their number.
    bound = 1e-13 if any("expert" in name for name in found.gradient_errors) else 0.0
    assert max(found.leak, found.gradient_leak) <= bound
    assert found.output_error <= PACKED_BOUND
    assert {name: error for name, error in found.gradient_errors.items() if not error <= PACKED_BOUND} == {}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in KINDS])
def test_a_packed_document_equals_the_document_alone(name: str) -> None:
    _assert_exact(entries()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(entries().keys() - set(KINDS) - UNBUILDABLE.keys() - POOLED - _REFUSED))
def test_a_packed_document_equals_the_document_alone_in_every_architecture(name: str) -> None:
    _assert_exact(entries()[name])


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            entry, id=entry.name, marks=[] if entry.name in ("gpt_oss", "mamba", "mpt") else [pytest.mark.slow]
        )
        for entry in OTHERS
    ],
)
def test_packing_needs_no_plan(entry: Entry) -> None:
    _assert_exact(entry)


def _beyond(names: list[str], axes: dict[str, int], **options: Any) -> dict[str, dict[str, float]]:
    """Errors beyond the bound, of architectures on this rank."""
    found = {name: measure_packing_on_ranks(name, axes, **options) for name in names}
    return {
        name: beyond
        for name, errors in found.items()
        if (beyond := {key: error for key, error in errors.items() if not error <= PACKED_BOUND})
    }


@pytest.mark.parametrize(
    ("sequence_parallel", "names"),
    [
        pytest.param(False, ["falcon_h1"], marks=pytest.mark.slow),
        (True, ["lfm2_moe", "llama4_text"]),
        pytest.param(False, ["afmoe", "qwen3_next"], marks=pytest.mark.slow),
        pytest.param(True, ["kimi_linear", "minimax"], marks=pytest.mark.slow),
    ],
    ids=["TP", "SP", "more TP", "more SP"],
)
def test_packing_composes_with_tensor_and_sequence_parallelism(
    two_ranks: RankPool, sequence_parallel: bool, names: list[str]
) -> None:
    assert two_ranks.run(_beyond, names, {"tp": 2}, sequence_parallel=sequence_parallel) == [{}, {}]


def _inputs(**changes: torch.Tensor | None) -> dict[str, Any]:
    ids = torch.randint(3, 131, (len(ROWS), LENGTH), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "position_ids": packed_positions(), **changes}
    return {name: value for name, value in given.items() if value is not None}


@pytest.mark.parametrize("name", ["afmoe", "jamba"])
def test_boundaries_may_be_given_as_numbers_or_lengths(name: str) -> None:
    model = _packed(tiny_model(entries()[name]))
    seq_idx = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in ROWS])
    lengths = torch.tensor([0, *(length for row in ROWS for length in row)]).cumsum(0)
    with torch.no_grad():
        expected = model(**_inputs()).logits
        for changes in ({"seq_idx": seq_idx}, {"cu_seq_lens_q": lengths}):
            for positions in ({}, {"position_ids": None}):
                assert torch.equal(model(**_inputs(**changes, **positions)).logits, expected)


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_rows_of_one_document_are_computed_as_without_packing(name: str) -> None:
    plain = tiny_model(entries()[name])
    model = _packed(tiny_model(entries()[name]))
    with torch.no_grad():
        for changes in ({"position_ids": None}, {"position_ids": torch.arange(LENGTH).expand(len(ROWS), -1)}):
            inputs = _inputs(**changes)
            assert torch.equal(model(**inputs).logits, plain(**inputs).logits)


@pytest.mark.parametrize("name", ["afmoe", "jamba"])
def test_backward_recomputes_each_batch_with_its_own_documents(name: str) -> None:
    model = tiny_model(entries()[name])
    recomputing = parallelize(
        model, MeshSpec().build(device_type="cpu"), packed_sequences=True, activation_checkpointing="block"
    )
    batches = [_inputs(), _inputs(position_ids=packed_positions().roll(1, 0))]

    def gradients(*, one_after_another: bool) -> list[torch.Tensor]:
        model.zero_grad()
        losses = []
        for batch in batches:
            losses.append(recomputing(**batch).logits.square().sum())
            if one_after_another:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    pairs = zip(gradients(one_after_another=True), gradients(one_after_another=False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_selective_checkpointing_keeps_no_result_of_the_check_of_a_mixer() -> None:
    mesh = MeshSpec().build(device_type="cpu")
    options = {"plan": None, "packed_sequences": True, "activation_checkpointing": "selective"}
    model = tiny_model(entries()["lfm2_moe"])
    found = measure_packing(model, lambda each: parallelize(each, mesh, **options))
    assert found.error <= PACKED_BOUND


@pytest.mark.parametrize("lengths", [(3, 5), (4, 4)])
def test_a_row_may_have_as_many_tokens_as_heads_and_features(lengths: tuple[int, int]) -> None:
    model: Any = tiny_model(entries()["qwen3_next"])
    tokens = sum(lengths)
    assert model.config.linear_num_value_heads == model.config.linear_value_head_dim == tokens
    ids = torch.arange(3, 3 + 2 * tokens).view(2, tokens)
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    packed = parallelize(model, MeshSpec().build(device_type="cpu"), packed_sequences=True)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand_as(ids)
    found = packed(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.allclose(found, torch.cat(parts, dim=1), rtol=0, atol=1e-12)
