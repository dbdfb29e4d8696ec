"""Adapters alone on a server: versions, bytes, failures, and the greedy tokens of the merged policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdp_runtime import OptionError, parallelize, stream_weights
from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sync import AdapterTransfer
from fsdp_runtime.sync.adapter_transfer import require_servable
from harness.engine_server import EngineServer, first
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

LINEAR = ["q_proj", "o_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class LoraServer(EngineServer):
    """A server with vLLM's two routes for adapters: it reads a directory when it is named."""

    def __init__(self, refuses: str = "none") -> None:
        super().__init__()
        self.refuses_to_unload = False
        self.refuses, self.adapters, self.bodies = refuses, dict[str, Path](), list[dict[str, Any]]()

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        if route == "/v1/load_lora_adapter":
            if self.refuses in body["lora_name"]:
                raise RuntimeError("The lora adapter has too large a rank")
            self.adapters[body["lora_name"]] = Path(body["lora_path"])
        elif route == "/v1/unload_lora_adapter":
            if self.refuses_to_unload:
                raise RuntimeError("The lora adapter cannot be found")
            self.adapters.pop(body["lora_name"], None)
        else:
            return super().answer(route, body)
        return {}


def _model(architecture: str = "Qwen3ForCausalLM", names: tuple[str, ...] = ("default",), **settings: Any) -> Any:
    base = tiny_model(architecture, dtype=torch.float32)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 12, "target_modules": LINEAR, **settings})
    model: Any = peft.get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    _change(model, 0)
    return model.eval()


@torch.no_grad()
def _change(model: Any, seed: int) -> None:
    """Give every factor values that depend on its name alone."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
            values = torch.randn(tuple(parameter.shape), generator=generator) * 0.3
            if isinstance(parameter.data, torch.distributed.tensor.DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                values = torch.distributed.tensor.distribute_tensor(values, mesh, placements)
            parameter.copy_(values)


def _greedy(model: Any) -> Tensor:
    prompt = torch.randint(3, 130, (2, 6), generator=torch.Generator().manual_seed(2))
    tokens: Tensor = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    return tokens[:, 6:]


def _served_tokens(architecture: str, path: Path) -> Tensor:
    """What an engine generates with the base model and the adapter of a directory."""
    served: Any = peft.PeftModel.from_pretrained(tiny_model(architecture, dtype=torch.float32), str(path))
    return _greedy(served.eval())


def _sent(axes: dict[str, int], architecture: str, settings: dict[str, Any], path: Path) -> list[str]:
    """Differences between an engine with the adapter alone and one with merged weights, over three versions."""
    model, wrong = parallelize(_model(architecture, **settings), mesh_for(axes)), []
    server = LoraServer() if first() else None
    transfer = AdapterTransfer(server.url if server else "http://127.0.0.1:9", path)
    for version in (1, 2, 3):
        _change(model, version)
        report = transfer.send(model)
        merged = dict(stream_weights(model, names="model"))
        if server is None:
            continue
        engine = tiny_model(architecture, dtype=torch.float32)
        base = _greedy(engine)
        engine.load_state_dict(merged, strict=False)
        folder = server.adapters[report.names["default"]]
        tensors = load_file(folder / "adapter_model.safetensors")
        wrong += [] if torch.equal(_served_tokens(architecture, folder), _greedy(engine)) else [f"tokens of {version}"]
        wrong += ["tokens of the base"] if torch.equal(base, _greedy(engine)) else []
        wrong += [name for name in tensors if not name.startswith("base_model.model.") or "lora_" not in name]
        wrong += [] if report.nbytes == sum(each.nbytes for each in tensors.values()) else ["bytes"]
        wrong += [] if report.nbytes < sum(each.nbytes for each in merged.values()) / 3 else ["all bytes"]
        wrong += [] if list(server.adapters) == [f"policy-v{version}"] else ["versions"]
        wrong += [] if server.bodies[0].get("is_3d_lora_weight", False) == ("Moe" in architecture) else ["stacked"]
        kept = {f"policy-v{number}" for number in (version - 1, version) if number > 0}
        wrong += [] if {folder.name for folder in path.iterdir()} == kept else ["files"]
    if server is not None:
        server.close()
    return wrong


@pytest.mark.parametrize(
    ("axes", "architecture", "settings"),
    [
        ({"tp": 2}, "Qwen3ForCausalLM", {"use_rslora": True}),
        ({"dp_shard": 2}, "Qwen3MoeForCausalLM", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        pytest.param({"dp_shard": 2}, "Qwen3ForCausalLM", {}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2}, "LlamaForCausalLM", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_with_the_adapter_alone_generates_as_one_with_merged_weights(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int], architecture: str, settings: dict[str, Any]
) -> None:
    assert two_ranks.run(_sent, axes, architecture, settings, tmp_path) == [[]] * 2


def test_a_server_that_restarted_gets_the_next_version(tmp_path: Path) -> None:
    model = _model()
    with LoraServer() as server:
        transfer = AdapterTransfer(server.url, tmp_path)
        transfer.send(model)
        server.adapters.clear()
        server.refuses_to_unload = True
        assert transfer.send(model).names == {"default": "policy-v2"}
        assert [*server.adapters] == ["policy-v2"]


def test_several_adapters_have_names_and_versions_of_their_own(tmp_path: Path) -> None:
    model, names = _model(names=("left", "right")), ("left", "right")
    with LoraServer() as server:
        transfer = AdapterTransfer(server.url, tmp_path, adapters=names, name="run", keep=2)
        assert transfer.send(model, 4).names == {"left": "run-left-v4", "right": "run-right-v4"}
        transfer.send(model)
        transfer.send(model, 9)
        assert set(server.adapters) == {f"run-{name}-v{version}" for name in names for version in (5, 9)}
        with pytest.raises(OptionError, match="the server has version 9; give a larger one"):
            transfer.send(model, 9)
        left, right = (load_file(tmp_path / f"run-{name}-v9" / "adapter_model.safetensors") for name in names)
        assert left.keys() == right.keys()
        assert not any(torch.equal(left[key], right[key]) for key in left)
        config = json.loads((tmp_path / "run-left-v9" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 12)


def _refused_by_the_server(path: Path) -> tuple[str, list[str]]:
    model = parallelize(_model(names=("left", "right")), mesh_for({"tp": 2}))
    server = LoraServer(refuses="right") if first() else None
    transfer = AdapterTransfer(server.url if server else "http://127.0.0.1:9", path, adapters=("left", "right"))
    try:
        transfer.send(model)
    except WeightSyncError as error:
        return str(error), list(server.adapters) if server else []
    return "sent", []


def test_an_adapter_that_the_server_refuses_is_raised_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    for said, adapters in two_ranks.run(_refused_by_the_server, tmp_path):
        assert "/v1/load_lora_adapter answered 500: The lora adapter has too large a rank" in said
        assert "the server needs --enable-lora" in said
        assert adapters == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["norm"]}, "modules_to_save="),
        ({"bias": "lora_only"}, "trains biases"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapts lm_head"),
        ({"alpha_pattern": {"q_proj": 3}}, "by 1 and not by lora_alpha / r = 4"),
        ({"rank_pattern": {"o_proj": 6}}, "by 2 and not by lora_alpha / r = 4"),
    ],
    ids=str,
)
def test_adapters_that_vllm_reads_otherwise_than_peft_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match="send merged weights") as error:
        require_servable(_model(**settings), "default")
    assert words in str(error.value)


@pytest.mark.parametrize("names", [EXPERTS[:1], EXPERTS[1:]], ids=str)
def test_stacked_experts_need_both_of_their_parameters(names: list[str]) -> None:
    with pytest.raises(OptionError, match="in the order of vLLM"):
        require_servable(_model("Qwen3MoeForCausalLM", target_modules=["q_proj"], target_parameters=names), "default")
    require_servable(_model("Qwen3MoeForCausalLM", target_modules=["q_proj"], target_parameters=EXPERTS), "default")
    with pytest.raises(OptionError, match="has no adapter 'other'"):
        require_servable(_model(), "other")


@pytest.mark.parametrize("wrong", [{"adapters": "default"}, {"adapters": ()}, {"keep": 0}, {"timeout_s": 0.0}], ids=str)
def test_options_of_a_transfer_are_checked(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        AdapterTransfer("http://127.0.0.1:9", tmp_path, **wrong)
