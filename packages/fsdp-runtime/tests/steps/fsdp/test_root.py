"""A forward below FSDP2's root (``model.model(tokens)``): gradients of one process, or a typed error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import T5Config, T5ForConditionalGeneration

import rl_logprobs
from coverage.multimodal import multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from fsdp_runtime import FSDP2, MeshSpec, ModelError, parallelize, unsharded
from harness.models import tiny_inputs, tiny_model
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, gradient_errors, largest
from harness.ranks import RankPool


def _loss(model: Any, tokens: Tensor) -> Tensor:
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    return -rl_logprobs.linear_token_logprobs(hidden, model.lm_head.weight, tokens, shift=True).mean()


def _wrong(before: str, axes: dict[str, int]) -> list[str]:
    """Parameters whose gradients differ from one process."""
    plain = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    tokens = tiny_inputs(plain, batch=2, length=9)["input_ids"]
    model = parallelize(copy.deepcopy(plain), MeshSpec(**axes).build(device_type="cpu"))
    _loss(plain, tokens).backward()
    if before == "no_grad":
        with torch.no_grad():
            model(tokens, use_cache=False)
    wrong = []
    for step in range(2):
        model.zero_grad()
        with unsharded(model):
            _loss(model, tokens).backward()
        for (name, parameter), true in zip(model.named_parameters(), plain.parameters(), strict=True):
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            if gradient is None or not torch.allclose(gradient, true.grad, atol=1e-5, rtol=1e-3):
                wrong.append(f"{before}, step {step}: {name}")
    model.zero_grad()
    model(tokens, use_cache=False).logits.sum().backward()  # the root's own forward still works
    wrong += [name for name, parameter in model.named_parameters() if parameter.grad is None]
    return wrong


def _two_ranks() -> list[str]:
    return [found for before in ("nothing", "no_grad") for found in _wrong(before, {"dp_shard": 2})]


def test_gradients_inside_unsharded_equal_one_process_whatever_ran_before(two_ranks: RankPool) -> None:
    assert two_ranks.run(_two_ranks) == [[], []]


def _four_ranks() -> list[str]:
    return _wrong("nothing", {"dp_shard": 2, "tp": 2})


def test_gradients_inside_unsharded_equal_one_process_under_tensor_parallelism(four_ranks: RankPool) -> None:
    assert four_ranks.run(_four_ranks) == [[]] * 4


@pytest.fixture
def model() -> nn.Module:
    """A model under FSDP2 on one rank."""
    options = FSDP2(mp_policy=MixedPrecisionPolicy())
    plain = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    return parallelize(plain, MeshSpec().build(device_type="cpu"), fsdp=options)


def test_backward_after_the_with_names_the_call_to_use(model: nn.Module) -> None:
    tokens = tiny_inputs(model, batch=2, length=9)["input_ids"]
    with unsharded(model):
        loss = _loss(model, tokens)
    with pytest.raises(ModelError, match=r"freed at the end of 'with unsharded\(model\):'.*forward_with_lm_head"):
        loss.backward()


def test_backward_after_the_with_is_right_for_the_models_own_forward(model: nn.Module) -> None:
    tokens = tiny_inputs(model, batch=2, length=9)["input_ids"]
    plain = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    plain(tokens, use_cache=False).logits.square().sum().backward()
    with unsharded(model):
        loss = model(tokens, use_cache=False).logits.square().sum()
    loss.backward()
    for parameter, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), true.grad)


def test_a_change_in_place_is_still_refused_inside_unsharded(model: nn.Module) -> None:
    with unsharded(model):
        leaf = torch.ones(2, requires_grad=True)
        saved = leaf.exp()
        saved.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


def test_gradients_of_the_head_alone_are_reduced_at_the_end_of_unsharded(model: nn.Module) -> None:
    with unsharded(model):
        model.lm_head(torch.ones(1, 64)).sum().backward()
    assert bool((model.lm_head.weight.grad.full_tensor() == 1).all())


def test_a_call_below_the_root_outside_unsharded_is_refused_by_name(model: nn.Module) -> None:
    tokens = tiny_inputs(model, batch=2, length=9)["input_ids"]
    for _ in range(2):  # before the first forward and after it
        with pytest.raises(ModelError, match=r"model\.embed_tokens is called outside.*forward_with_lm_head"):
            model.model(tokens, use_cache=False)
        with torch.no_grad(), unsharded(model):
            model(tokens, use_cache=False)


def _called_with_parameters_on_two_meshes() -> list[str]:
    """What differs of a tower whose class token is on ranks of ``dp_shard``, and its positions also on those of tp."""
    mesh = MeshSpec(dp_shard=2, tp=2).build(device_type="cpu")
    plain: Any = multimodal_model("internvl")
    inputs = multimodal_inputs(plain)
    model: Any = parallelize(copy.deepcopy(plain), mesh)
    own = model.model.vision_tower.embeddings
    assert [each.device_mesh.ndim for each in own.parameters(recurse=False)] == [1, 2]
    wrong: list[str] = []
    for each in (plain, model):
        each(**inputs).logits.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    wrong += [name for name, error in gradient_errors(wanted, model).items() if error > GRADIENT_BOUND]
    with torch.no_grad():
        alone = [each.model.vision_tower.embeddings(inputs["pixel_values"]) for each in (plain, model)]
    wrong += [] if largest(alone[1] - alone[0]) < OUTPUT_BOUND else ["alone without gradients"]
    with pytest.raises(ModelError, match=r"is called outside of the model's own forward"):
        own(inputs["pixel_values"])
    return wrong


def test_root_refuses_a_call_of_one_module_with_parameters_on_two_meshes(four_ranks: RankPool) -> None:
    assert four_ranks.run(_called_with_parameters_on_two_meshes) == [[]] * 4


def _generated_from_an_encoder() -> bool:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    plain: Any = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    model: Any = parallelize(copy.deepcopy(plain), MeshSpec(dp_shard=2).build(device_type="cpu"))
    tokens = torch.arange(3, 13).view(2, 5)
    found, wanted = (each.generate(tokens, max_new_tokens=4, do_sample=False) for each in (model, plain))
    with torch.inference_mode():  # also before a training step
        hidden = [each.get_encoder()(tokens).last_hidden_state for each in (model, plain)]
    model(input_ids=tokens, labels=tokens).loss.backward()
    plain(input_ids=tokens, labels=tokens).loss.backward()
    torch.testing.assert_close(model.shared.weight.grad.full_tensor(), plain.shared.weight.grad)
    return torch.equal(found, wanted) and torch.allclose(*hidden)


def test_an_encoder_is_called_alone_and_in_generate(two_ranks: RankPool) -> None:
    assert two_ranks.run(_generated_from_an_encoder) == [True, True]


def test_a_trunk_that_is_the_root_returns_its_hidden_states() -> None:
    """Transformers knows what a class can collect by its name, which ``fully_shard`` changes."""
    model: Any = tiny_model("Qwen3ForCausalLM", dtype=torch.float32).model
    inputs = tiny_inputs(model, batch=1, length=7)
    wanted = model(**inputs, output_hidden_states=True).hidden_states
    options = FSDP2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    parallelize(model, MeshSpec(dp_shard=1).build(device_type="cpu"), fsdp=options)
    for found, expected in zip(model(**inputs, output_hidden_states=True).hidden_states, wanted, strict=True):
        torch.testing.assert_close(found, expected)
