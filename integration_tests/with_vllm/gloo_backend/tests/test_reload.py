"""What a worker tries before an update, and how it loads gpt-oss: what a reload would lose is not taken for loaded."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime.sync import WeightInfo, WeightSyncError

OURS = "vllm_gloo"


class _Reload:
    """vLLM's layerwise reload: parameters on the meta device, and values counted by the weight loaders alone."""

    def __init__(self) -> None:
        self.infos: dict[nn.Module, Any] = {}
        self.own: dict[nn.Module, dict[str, Any]] = {}

    def get_layerwise_info(self, layer: nn.Module) -> Any:
        empty = SimpleNamespace(load_numel=0, load_numel_total=None, loaded_weights=[])
        info = self.infos.setdefault(layer, empty)
        info.can_load = lambda: info.load_numel_total is not None
        return info

    def begin(self, model: nn.Module) -> None:
        for layer in model.modules():
            own = dict(layer.named_parameters(recurse=False))
            self.own[layer] = own
            self.get_layerwise_info(layer).load_numel_total = sum(each.numel() for each in own.values())
            for name, parameter in own.items():
                setattr(layer, name, nn.Parameter(parameter.to("meta")))

    def end(self, model: nn.Module, config: Any) -> None:
        for layer, own in self.own.items():
            for name, parameter in own.items():
                setattr(layer, name, parameter)
        self.infos.clear()


class _Model(nn.Module):
    """A model of which some parameters are copied past the weight loaders."""

    def __init__(self, reload: _Reload, past: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)
        self._reload, self._past = reload, past

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> set[str]:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.data.copy_(tensor)
            if name not in self._past:
                layer = self.get_submodule(name.rpartition(".")[0])
                self._reload.get_layerwise_info(layer).load_numel += tensor.numel()
        return {name for name, _ in weights}


@pytest.fixture
def ours(release: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module, compat = (importlib.import_module(f"{OURS}.{name}") for name in ("reload", "_vllm_compat"))
    fake = _Reload()
    monkeypatch.setattr(compat, "layerwise", fake)
    fake._layerwise_process = None  # type: ignore[attr-defined]
    monkeypatch.setattr(compat, "finalize_layerwise_reload", fake.end)
    monkeypatch.setattr(compat, "VocabParallelEmbedding", nn.Embedding)
    monkeypatch.setattr(module, "initialize_layerwise_reload", fake.begin)
    gpt_oss = importlib.import_module(f"{OURS}.gpt_oss")
    return SimpleNamespace(reload=module, fake=fake, gpt_oss=gpt_oss)


WEIGHTS = [WeightInfo("first.weight", torch.float32, (2, 3)), WeightInfo("second.weight", torch.float32, (4, 2))]


def test_weights_that_a_loader_copies_past_the_reload_are_refused_by_name(ours: Any) -> None:
    ours.reload.try_on_meta(_Model(ours.fake, ()), None, WEIGHTS, 1)
    with pytest.raises(WeightSyncError, match=r"would keep none of their values, first second\.weight"):
        ours.reload.try_on_meta(_Model(ours.fake, ("second.weight",)), None, WEIGHTS, 1)


def test_weights_of_which_nothing_is_copied_are_refused(ours: Any) -> None:
    model = _Model(ours.fake, ())
    model.load_weights = lambda weights: {name for name, _ in weights}  # type: ignore[assignment]
    with pytest.raises(WeightSyncError, match=r"first\.weight of shape .* 0 of its 6 values would be loaded"):
        ours.reload.try_on_meta(model, None, WEIGHTS, 1)


class GptOssForCausalLM(nn.Module):
    """Named as vLLM's class."""


def test_stacked_experts_of_gpt_oss_are_loaded_one_by_one_and_nothing_else_is(ours: Any) -> None:
    parts, sinks = ours.gpt_oss.loadable_parts, ours.gpt_oss.sinks_parameter
    path, stack = "model.layers.1.mlp", torch.arange(24).view(3, 4, 2)
    for part in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        found = list(parts(GptOssForCausalLM(), f"{path}.experts.{part}", stack))
        assert [name for name, _ in found] == [f"{path}.experts.{expert}.{part}" for expert in range(3)]
        assert torch.equal(torch.stack([tensor for _, tensor in found]), stack)
    for model, name in (
        (GptOssForCausalLM(), f"{path}.router.weight"),
        (GptOssForCausalLM(), f"{path}.experts.gate_up_proj_blocks"),
        (nn.Module(), f"{path}.experts.gate_up_proj"),
    ):
        assert [each for each, _ in parts(model, name, stack)] == [name]
    assert sinks(GptOssForCausalLM(), "model.layers.0.self_attn.sinks") == "model.layers.0.attn.sinks"
    assert sinks(GptOssForCausalLM(), f"{path}.router.weight") is None
    assert sinks(nn.Module(), "model.layers.0.self_attn.sinks") is None
