"""Buffers that no checkpoint stores are computed after the meta device, or an error names them."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from fsdp_runtime import WeightsError
from fsdp_runtime.weights import materialize, meta_device
from harness.models import ARCHITECTURES, tiny_config


def _on_meta(architecture: str, *, tied: bool = False) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, architecture)(tiny_config(architecture, tied=tied))
    return model


class _Scaled(nn.Module):
    """A module whose buffer only its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)
        self.register_buffer("positions", torch.arange(4), persistent=False)


class _Resettable(_Scaled):
    def reset_parameters(self) -> None:
        self.weight.data.fill_(1)
        self.scale.fill_(3)
        self.positions.copy_(torch.arange(4))


class _HalfReset(_Scaled):
    def reset_parameters(self) -> None:
        self.scale[:1].fill_(3)
        self.positions.copy_(torch.arange(4))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_buffers_equal_those_of_a_model_built_on_the_cpu(architecture: str) -> None:
    real = dict(getattr(transformers, architecture)(tiny_config(architecture)).named_buffers())
    model = materialize(_on_meta(architecture))
    assert real
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, real.pop(name)), name
    assert not real


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_meta_device_keeps_buffers_real_and_parameters_on_meta(architecture: str) -> None:
    real = getattr(transformers, architecture)(tiny_config(architecture, tied=True))
    with meta_device():
        model = getattr(transformers, architecture)(tiny_config(architecture, tied=True))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in real.named_parameters()]  # ties included
    for (name, buffer), (_, expected) in zip(model.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_stacks_of_experts_larger_than_the_memory_are_not_allocated() -> None:
    with meta_device():
        small, stack = torch.zeros(4), nn.Parameter(torch.zeros(64, 2**20, 2**20))  # 256 TiB
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(2, generator=generator)
    assert stack.shape == (64, 2**20, 2**20)
    assert stack.is_meta
    assert small.tolist() == [0.0] * 4
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(0)))


def test_parameters_stay_the_same_objects() -> None:
    model = _on_meta("LlamaForCausalLM", tied=True)
    before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    materialize(model)
    after = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert before == after
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_tensors_that_are_not_on_meta_keep_their_values() -> None:
    model = _on_meta("Gemma3ForConditionalGeneration")
    kept = model.model.vision_tower.to_empty(device="cpu")  # a tower whose own buffers are on meta no more
    for parameter in kept.parameters():
        parameter.data.fill_(7)
    model.model.vision_tower.embeddings.register_buffer(
        "position_ids", torch.empty(1, 16, dtype=torch.long, device="meta"), persistent=False
    )  # so that transformers initialises this module, its position embedding with it
    materialize(model)
    assert all((parameter == 7).all() for parameter in kept.parameters())
    assert torch.equal(kept.embeddings.position_ids, torch.arange(16)[None])


def test_a_model_with_nothing_on_meta_does_not_move() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
    before = [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]
    materialize(model)
    assert [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()] == before


def test_the_rng_state_does_not_change() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    materialize(_on_meta("Gemma3ForCausalLM"))
    assert torch.equal(torch.rand(2), expected)


def test_reset_parameters_computes_the_buffers_of_other_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_Resettable())
    materialize(model)
    assert torch.equal(model[0].scale, torch.full((2,), 3.0))
    assert torch.equal(model[0].positions, torch.arange(4))


@pytest.mark.parametrize("kind", [_Scaled, _HalfReset])
def test_a_buffer_that_no_module_computes_is_named_and_the_model_stays_on_meta(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(kind())
    with pytest.raises(WeightsError, match=r"0\.scale.*meta_device\(\).*reset_parameters"):
        materialize(model)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
