"""``forward_with_lm_head``: a loss without logits has the gradients of one process on every mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rl_logprobs
from fsdp_runtime import FSDP2, MeshSpec, ModelError, OptionError, parallelize
from fsdp_runtime.steps import Compile
from fsdp_runtime.steps.outputs.lm_head import LMHeadParameters, LogitsMap, _maps, forward_with_lm_head
from harness.models import tiny_inputs, tiny_model
from harness.pairwise import alternating_first, pairwise_first
from harness.ranks import RankPool


def _score(tokens: Tensor) -> Any:
    def function(hidden: Tensor, head: LMHeadParameters) -> Tensor:
        return rl_logprobs.linear_token_logprobs(
            hidden,
            head.weight,
            tokens,
            bias=head.bias,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            shift=True,
        )

    return function


def _mismatches(
    axes: Mapping[str, int], options: Mapping[str, Any], *, tied: bool, before: str, late: bool
) -> list[str]:
    model = tiny_model("Qwen3ForCausalLM", tied=tied, dtype=torch.float32, num_hidden_layers=1)
    tokens = tiny_inputs(model, batch=2, length=9)["input_ids"]
    expected = copy.deepcopy(model)
    full = torch.log_softmax(expected(tokens, use_cache=False).logits[:, :-1], -1)
    reference = full.gather(-1, tokens[:, 1:, None])[..., 0]
    reference.mean().backward()
    parallelize(model, MeshSpec(**axes).build(device_type="cpu"), **options)
    if before == "no_grad":
        with torch.no_grad():
            model(tokens, use_cache=False)
    found = forward_with_lm_head(model, _score(tokens), tokens, use_cache=False)
    if late:
        with torch.no_grad():
            model(tokens[:, :3], use_cache=False)
    found[:, :-1].mean().backward() if found.shape[1] == 9 else found.mean().backward()
    wrong = [] if torch.allclose(found[:, :8], reference, atol=1e-5) else ["logprobs"]
    for (name, parameter), true in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = parameter.grad
        if gradient is None:
            wrong.append(f"{name}: None")
            continue
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        assert true.grad is not None
        if not torch.allclose(whole, true.grad, atol=1e-5 * float(true.grad.abs().max()) + 1e-7, rtol=1e-3):
            wrong.append(name)
    return wrong


WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp_shard": ({"dp_shard": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "sequence_parallel": ({"tp": 2}, {"sequence_parallel": True}),
    "recomputed": (
        {"dp_shard": 2},
        {"activation_checkpointing": "block", "fsdp": FSDP2(reshard_after_forward=True)},
    ),
    "compiled": (
        {"dp_shard": 2},
        {"compile": Compile({"backend": "eager"})},
    ),  # between blocks nothing changes
}


@pytest.mark.parametrize(
    ("way", "tied", "before"), pairwise_first([*WAYS], [False, True], ["nothing", "no_grad"], limit=5)
)
def test_gradients_on_two_ranks_equal_one_process(two_ranks: RankPool, way: str, tied: bool, before: str) -> None:
    axes, options = WAYS[way]
    assert two_ranks.run(_mismatches, axes, options, tied=tied, before=before, late=False) == [[], []]


@pytest.mark.parametrize(("tied", "sequence_parallel"), alternating_first([False, True], [False, True]))
def test_gradients_on_four_ranks_equal_one_process(four_ranks: RankPool, tied: bool, sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    found = four_ranks.run(_mismatches, {"dp_shard": 2, "tp": 2}, options, tied=tied, before="nothing", late=False)
    assert found == [[]] * 4


def test_backward_may_follow_another_forward(two_ranks: RankPool) -> None:
    assert two_ranks.run(_mismatches, {"dp_shard": 2}, {}, tied=False, before="nothing", late=True) == [[], []]


def _statistics(tokens: Tensor) -> Any:
    def function(hidden: Tensor, head: LMHeadParameters) -> Any:
        return rl_logprobs.linear_token_statistics(hidden, head.weight, tokens, entropy=True, shift=True)

    return function


def _statistics_of_a_shard() -> tuple[str, bool]:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    tokens = tiny_inputs(model, batch=1, length=7)["input_ids"]
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"))
    found = forward_with_lm_head(model, _statistics(tokens), tokens, use_cache=False)
    (found.logprobs.mean() + found.entropy.mean()).backward()
    return type(found).__name__, all(parameter.grad is not None for parameter in model.parameters())


def test_a_dataclass_of_tensors_comes_back_as_such(two_ranks: RankPool) -> None:
    assert two_ranks.run(_statistics_of_a_shard) == [("TokenStatistics", True)] * 2


def _transformed(name: str, **changes: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **changes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("Llama", {}, LogitsMap()),
        ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 30.0}, LogitsMap(1.0, 30.0)),
        ("Cohere", {"logit_scale": 0.0625}, LogitsMap(0.0625)),
        ("Granite", {"logits_scaling": 8.0}, LogitsMap(0.125)),
    ],
)
def test_scale_and_soft_cap_of_the_model_reach_the_function(
    name: str, changes: dict[str, Any], expected: LogitsMap
) -> None:
    model = _transformed(name, **changes)
    tokens = torch.arange(3, 12)[None]
    found = forward_with_lm_head(model, _score(tokens), tokens, use_cache=False)
    true = rl_logprobs.token_logprobs(model(tokens, use_cache=False).logits, tokens, shift=True)
    assert torch.allclose(found, true, atol=1e-5)
    measured = _maps[model]
    assert measured.scale == pytest.approx(expected.scale, rel=1e-4)
    assert measured.softcap == pytest.approx(expected.softcap)


class _Biased(nn.Module):
    """A model whose forward changes its logits in a way that is no scale and no soft cap."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(31, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
        self.lm_head = nn.Linear(8, 31, bias=False)
        self.change = change

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        changed: Tensor = self.change(self, hidden)
        return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model, hidden: model.lm_head(hidden) + 1.0, "does more with the output of lm_head"),
        (lambda model, hidden: model.lm_head(hidden).relu(), "does more with the output of lm_head"),
        (lambda model, hidden: model.lm_head(hidden)[..., 20:], "does more with the output of lm_head"),
        (lambda model, hidden: model.lm_head(hidden).index_fill(-1, torch.tensor(25), 0.0), "does more"),
        (lambda model, hidden: model.lm_head(hidden) + model.lm_head(hidden), "more than once"),
        (lambda model, hidden: hidden @ model.lm_head.weight.T, "does not call lm_head"),
    ],
    ids=["shifted", "rectified", "sliced", "masked", "twice", "never"],
)
def test_other_uses_of_the_head_are_refused(change: Any, message: str) -> None:
    model = _Biased(change)
    with pytest.raises(ModelError, match=message):
        forward_with_lm_head(model, lambda hidden, head: hidden.sum(), torch.arange(5)[None])
    assert isinstance(model.lm_head, nn.Linear)
    assert not model._forward_hooks


class _ScaledHead(nn.Linear):
    """A head that multiplies its outputs, each by a factor of its own, as that of Dory."""

    def __init__(self) -> None:
        super().__init__(8, 31, bias=False)
        self.scales = nn.Parameter(torch.rand(31))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.scales


def test_a_head_that_computes_more_than_a_product_is_refused() -> None:
    model = _Biased(lambda model, hidden: model.lm_head(hidden))
    model.lm_head = _ScaledHead()
    with pytest.raises(ModelError, match="_ScaledHead has a custom forward"):
        forward_with_lm_head(model, lambda hidden, head: hidden.sum(), torch.arange(5)[None])


def test_labels_are_refused() -> None:
    model = _transformed("Llama")
    tokens = torch.arange(5)[None]
    with pytest.raises(OptionError, match="labels"):
        forward_with_lm_head(model, _score(tokens), tokens, labels=tokens)


def test_an_error_in_the_function_arrives_as_it_is() -> None:
    model = _transformed("Llama")

    def fails(hidden: Tensor, head: LMHeadParameters) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        forward_with_lm_head(model, fails, torch.arange(5)[None], use_cache=False)
    assert isinstance(model.lm_head, nn.Linear)
