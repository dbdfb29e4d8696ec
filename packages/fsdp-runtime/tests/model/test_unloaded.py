"""A parallelized model on the meta device: a forward, a step and a save name the calls that load it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from fsdp_runtime import ModelError, load_weights, materialize, meta_device, parallelize, save_weights
from fsdp_runtime.errors import OtherRankError
from harness.models import tiny_config, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Qwen3ForCausalLM(tiny_config("Qwen3ForCausalLM"))
        self.value_head = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Any:
        output = self.policy(ids, output_hidden_states=True)
        return output.logits, self.value_head(output.hidden_states[-1])


def _lora() -> nn.Module:
    model = Qwen3ForCausalLM(tiny_config("Qwen3ForCausalLM"))
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # type: ignore[return-value]


def _on_meta(build: Callable[[], nn.Module], axes: dict[str, int]) -> Any:
    with meta_device():
        model = build()
    return parallelize(model, mesh_for(axes))


def _causal() -> nn.Module:
    return Qwen3ForCausalLM(tiny_config("Qwen3ForCausalLM"))


def _error(call: Callable[[], object]) -> str:
    with pytest.raises((ModelError, OtherRankError)) as raised:
        call()
    return str(raised.value)


def _errors(axes: dict[str, int], build: Callable[[], nn.Module], folder: Path) -> list[str]:
    model = _on_meta(build, axes)
    ids = torch.ones(1, 8, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    messages = [_error(call) for call in (lambda: model(ids), optimizer.step, lambda: save_weights(model, folder))]
    if build is _causal:
        messages += [_error(lambda: model.model(ids)), _error(lambda: model.generate(ids, max_new_tokens=2))]
    return messages


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("build", [_causal, _Critic, _lora])
def test_unloaded_model_names_load_weights_and_materialize_on_every_rank(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int], build: Callable[[], nn.Module]
) -> None:
    for messages in two_ranks.run(_errors, axes, build, tmp_path / "out"):
        assert all("on the meta device" in message for message in messages)
        assert all("load_weights(model, checkpoint)" in message for message in messages[:2])
        assert all("materialize(model)" in message for message in messages[:2])


def _hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) for module in model.modules()]


def _loads_after_an_error(axes: dict[str, int], folder: Path) -> tuple[bool, bool]:
    model = _on_meta(_causal, axes)
    ids = torch.ones(1, 8, dtype=torch.long)
    _error(lambda: model(ids))
    load_weights(model, folder)
    other = parallelize(tiny_model("Qwen3ForCausalLM", dtype=torch.float32), mesh_for(axes))
    with torch.no_grad():
        equal = torch.equal(
            *(each(ids).logits.to_local() if "tp" in axes else each(ids).logits for each in (model, other))
        )
    return equal, _hooks(model) == _hooks(other)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_unloaded_model_computes_after_a_load_and_keeps_no_hook(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int]
) -> None:
    tiny_model("Qwen3ForCausalLM", dtype=torch.float32).save_pretrained(tmp_path)
    assert two_ranks.run(_loads_after_an_error, axes, tmp_path) == [(True, True)] * 2


def _head_error(folder: Path) -> tuple[str, bool]:
    model = _on_meta(_Critic, {"tp": 2})
    load_weights(model.policy, folder)
    ids = torch.ones(1, 8, dtype=torch.long)
    message = _error(lambda: model(ids))
    materialize(model)
    with torch.no_grad():
        for parameter in model.value_head.parameters():
            parameter.fill_(1)
        values = copy.deepcopy(model)(ids)[1]
    return message, bool(values.isfinite().all()) and torch.equal(values, model(ids)[1])


def test_unloaded_head_is_named(two_ranks: RankPool, tmp_path: Path) -> None:
    tiny_model("Qwen3ForCausalLM", dtype=torch.float32).save_pretrained(tmp_path)
    for message, computes in two_ranks.run(_head_error, tmp_path):
        assert "2 parameters on the meta device (value_head.weight, value_head.bias)" in message
        assert "new_modules" in message
        assert computes


def _shapes() -> tuple[int, ...]:
    model = _on_meta(_causal, {"tp": 2})
    return tuple(model(torch.ones(1, 8, dtype=torch.long, device="meta")).logits.shape)


def test_unloaded_model_computes_shapes_of_inputs_on_meta(two_ranks: RankPool) -> None:
    assert len(set(two_ranks.run(_shapes))) == 1
