"""Activation checkpointing: less is kept, the numbers stay, and the cache cannot be filled twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import ModelError, anatomy_of, checkpoint_activations
from harness.models import tiny_inputs, tiny_model


def _saved_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes that a forward keeps for backward, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**inputs, use_cache=False).logits.sum().backward()
    return sum(kept.values())


def _checkpointed(model: nn.Module) -> nn.Module:
    checkpoint_activations(model, anatomy_of(model), "block")
    return model


def test_gradients_are_bit_identical_and_fewer_activations_are_kept() -> None:
    plain = tiny_model("Gemma3ForCausalLM", num_hidden_layers=2)
    recomputing = _checkpointed(copy.deepcopy(plain))
    inputs = tiny_inputs(plain, batch=2, length=9)
    kept, kept_recomputing = _saved_bytes(plain, inputs), _saved_bytes(recomputing, inputs)
    assert kept_recomputing < kept / 2
    for (name, expected), actual in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(expected.grad, actual.grad), name


def test_names_and_classes_stay_usable() -> None:
    model = tiny_model("LlamaForCausalLM")
    before = list(model.state_dict())
    block_class = type(model.model.layers[0])
    _checkpointed(model)
    assert list(model.state_dict()) == before
    assert isinstance(model.model.layers[0], block_class)


def test_a_deep_copy_recomputes_with_its_own_parameters() -> None:
    model = _checkpointed(tiny_model("LlamaForCausalLM"))
    twin = copy.deepcopy(model)
    inputs = tiny_inputs(model, batch=1, length=4)
    twin(**inputs, use_cache=False).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_a_cache_under_gradient_is_refused_with_the_fix() -> None:
    model = _checkpointed(tiny_model("LlamaForCausalLM"))
    with pytest.raises(ModelError, match="pass use_cache=False"):
        model(**tiny_inputs(model, batch=1, length=4), use_cache=True)


def test_the_configs_no_longer_ask_for_a_cache() -> None:
    model = _checkpointed(tiny_model("Gemma3ForConditionalGeneration"))
    assert not model.config.get_text_config().use_cache
    assert model(**tiny_inputs(model, batch=1, length=7)).logits.requires_grad


def test_inference_with_a_cache_still_works() -> None:
    model = _checkpointed(tiny_model("LlamaForCausalLM"))
    inputs = tiny_inputs(model, batch=1, length=4)
    with torch.no_grad():
        assert model(**inputs, use_cache=True).past_key_values.get_seq_length() == 4
