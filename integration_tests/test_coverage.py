"""Architectures with every style word and special case: outputs and gradients on every rank, as ``nox -s coverage``.

Each row is there for a reason, which its name or comment gives.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from coverage.compiled import measure_compiled
from coverage.measure import KINDS, measure
from coverage.outcome import summarize
from coverage.table import entries, tiny_model
from coverage.unplanned import UNPLANNED
from harness.parity import largest, mesh_for
from harness.ranks import RankPool
from tp_plans import ExpertsParallel, Plan

#: Rows whose block types permit sequence parallelism.
BOTH = [
    "apertus",  # learned scalars in the activation
    "aria_text",  # packed_rowwise: gate and up fused along the last dim
    "cohere, head norms",  # a norm with other weights for every head, in parallel branches
    "deepseek_v3",  # latent attention, dense and mixture blocks
    "doge",  # a mask computed from the values, per key head
    "falcon_h1",  # attention and a state space side by side
    "gemma3_text",  # tied, sliding and full attention
    "gpt_neox",  # queries, keys and values of a head in turn
    "granite_swa",  # local_params: attention sinks
    "kimi_linear",  # blocks of two kinds under one name
    "llama",
    "llama, biases",
    "mistral3, ministral3",  # a language model inside, whose tower stays whole
    "mixtral",  # moe_tp_experts, packed_colwise
    "mixtral, batched",
    "nemotron_h",  # four kinds of blocks under one name, experts without a gate
    "olmo2",  # rowwise_split_input: norms over all heads at once
    "olmo_hybrid",  # colwise_gather_output
    "phi",  # biases in a parallel block, a head with a bias
    "phi3",  # fused qkv and gate_up
    "qwen3_5_moe_text",  # linear attention
    "qwen3, classifier",  # no language-model head
    "baichuan",
    "deci_lm",
    "nemotron_labs_diffusion",
]
#: Rows that are right with tensor parallelism only.
TP_ONLY = [
    "gemma3n_text",  # statistics over all features of an MLP; embeddings per layer
    "gemma4",  # code that reads a row of the embedding's weight
    "inkling_text",  # all_reduce; a norm inside the embedding
    "inkling2_text",  # replicate
    "llama4_text",  # experts without an index; additions in place
    "longcat_flash",  # moe_identity_expert
    "qwen4_exp_text",  # embedding_colwise, hyper-connections
]


#: The kinds of input in two halves, which rows take in turn.
HALVES = (KINDS[::2], KINDS[1::2])
#: What the default tests run: a row for each way to split a layer, but for those of test_parity (Gemma 3) and of
#: test_router_replay (Mixtral). All others are slow, and rows of the coverage page.
DEFAULT = {
    ("deepseek_v3", "SP"),
    ("gpt_neox", "SP"),
    ("granite_swa", "TP"),
    ("olmo2", "SP"),
    ("phi3", "SP"),
    ("gemma3n_text", "TP"),
    ("llama4_text", "TP"),
    ("longcat_flash", "TP"),
}


def cases(rows: list[str], *modes: str) -> list[Any]:
    """The rows in every mode with both halves of the kinds of input; slow but for one half of the default ones."""
    return [
        pytest.param(name, mode, kinds, marks=[] if half == row % 2 and (name, mode) in DEFAULT else [pytest.mark.slow])
        for row, name in enumerate(rows)
        for mode in modes
        for half, kinds in enumerate(HALVES)
    ]


@pytest.mark.parametrize(("name", "mode", "kinds"), cases(BOTH, "TP", "SP"), ids=str)
def test_parallelized_architecture_equals_single_process(
    two_ranks: RankPool, name: str, mode: str, kinds: tuple[str, ...]
) -> None:
    found = summarize(two_ranks.run(measure, name, mode, tp=2, kinds=kinds))
    assert (found.status, found.note) == ("right", "")


@pytest.mark.parametrize(("name", "mode", "kinds"), cases(TP_ONLY, "TP"), ids=str)
def test_architecture_without_sequence_parallelism_equals_single_process(
    two_ranks: RankPool, name: str, mode: str, kinds: tuple[str, ...]
) -> None:
    found = summarize(two_ranks.run(measure, name, mode, tp=2, kinds=kinds))
    assert (found.status, found.note) == ("right", "")


#: Rows without a plan: attention that is found wrong and gathered, and experts that read another module's parameters.
INFERRED = ("codegen", "dbrx")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name not in INFERRED else []) for name in UNPLANNED]
)
def test_an_inferred_plan_equals_single_process(two_ranks: RankPool, name: str) -> None:
    found = summarize(two_ranks.run(measure, name, "TP", tp=2, kinds=KINDS[::2]))
    assert (found.status, found.note) == ("right", "")


@pytest.mark.parametrize(
    "name",
    [
        "llama, one key head",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deepseek_v3", "gemma3n_text", "longcat_flash", "nemotron_h", "phi3")
        ),
    ],
)
def test_four_ranks_equal_single_process(four_ranks: RankPool, name: str) -> None:
    found = summarize(four_ranks.run(measure, name, "TP", tp=4, kinds=("ids",)))
    assert (found.status, found.note) == ("right", "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["TP", "SP"])
@pytest.mark.parametrize("name", ["gemma4_text", "llama", "longcat_flash", "mixtral", "qwen3_next"])
def test_eight_ranks_equal_single_process(eight_ranks: RankPool, name: str, mode: str) -> None:
    found = summarize(eight_ranks.run(measure, name, mode, tp=8, kinds=("ids",)))
    assert (found.status, found.note) == ("right", "")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama", "SP"),
        pytest.param("mixtral", "TP", marks=pytest.mark.slow),
        pytest.param("doge, mixture", "TP", marks=pytest.mark.slow),  # its router reads the other rows of a batch
    ],
)
def test_tensor_parallelism_with_fsdp2_equals_single_process(four_ranks: RankPool, name: str, mode: str) -> None:
    found = summarize(four_ranks.run(measure, name, mode, tp=2, dp_shard=2, kinds=("ids",)))
    assert (found.status, found.note) == ("right", "")


@pytest.mark.parametrize("name", ["gemma3n_text", "llama", "mixtral"])
def test_wide_model_has_a_shard_per_rank_but_for_shared_key_value_heads(
    name: str,
) -> None:
    model = tiny_model(replace(entries()[name], wide=True))
    config = model.config.get_text_config()
    assert config.num_attention_heads == 8
    assert config.num_key_value_heads == (2 if name == "gemma3n_text" else 4)
    assert getattr(config, "num_local_experts", 8) == 8


def _experts_error(routes: list[list[int]]) -> float:
    """The largest error of split experts in the implementation that training uses by default, in float32."""
    model = tiny_model(replace(entries()["mixtral"], experts="grouped_mm"), dtype=torch.float32)
    whole = model.get_submodule("model.layers.0.mlp.experts")
    split = parallelize_module(
        copy.deepcopy(whole), mesh_for({"tp": 2})["tp"], Plan({"": ExpertsParallel()}).to_torch()
    )
    generator = torch.Generator().manual_seed(0)
    tokens, weights = torch.randn(len(routes), 64, generator=generator), torch.rand(len(routes), 2, generator=generator)
    expected, actual = (_run_experts(module, tokens, torch.tensor(routes), weights) for module in (whole, split))
    return max(largest(theirs - ours) / largest(theirs) for theirs, ours in zip(expected, actual, strict=True))


def _run_experts(experts: nn.Module, tokens: Tensor, routes: Tensor, weights: Tensor) -> list[Tensor]:
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    output = experts(tokens, routes, weights)
    output.square().sum().backward()
    return [output.detach(), tokens.grad, weights.grad]


@pytest.mark.parametrize(
    "routes",
    [[[0, 2], [3, 1], [1, 2], [0, 1], [2, 3]], [[0, 1], [1, 0], [0, 1]]],
    ids=["every expert", "one rank's experts only"],
)
def test_grouped_experts_skip_what_other_ranks_run(two_ranks: RankPool, routes: list[list[int]]) -> None:
    assert max(two_ranks.run(_experts_error, routes)) < 1e-5


@pytest.mark.slow
def test_compiled_blocks_take_uneven_lengths_under_sequence_parallelism(two_ranks: RankPool) -> None:
    lengths = (7, 9) if torch.__version__ >= "2.13" else (7,)  # an older compiler fails at the second; see the guide
    for found in two_ranks.run(measure_compiled, "phi", "SP", backend="aot_eager", lengths=lengths):
        assert found.errors == ()
