from __future__ import annotations

import gc
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_runtime import FSDP2, MeshError, OptionError, setup
from fsdp_runtime.dry_run import Estimate, EstimateError, MemoryBreakdown, Peak, estimate, pipeline
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from fsdp_runtime.dry_run.remarks import advice_for, quantization_assumptions
from fsdp_runtime.steps import TensorParallel
from fsdp_runtime.steps.tensor import step as tensor
from harness.estimates import made_estimate, made_settings
from harness.models import tiny_config, tiny_inputs, tiny_model

WIDTH, VOCABULARY, LENGTH = 16, 32, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width, bias=False), nn.Linear(width, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Lookup(Block):
    """Has a part whose result has as many elements as values are unlike."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Distinct()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(super().forward(hidden))


class Distinct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scale(hidden) + torch.unique(hidden).sum()


class Decoder(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def twelve() -> nn.Module:
    return Decoder([Block() for _ in range(12)])


def with_scalars() -> nn.Module:
    model = twelve()
    for block in model.get_submodule("blocks").children():
        block.scale = nn.Parameter(torch.ones(()))
    return model


def tied() -> nn.Module:
    model = twelve()
    model.get_submodule("head").weight = model.get_submodule("embedding").weight
    return model


def alternating() -> nn.Module:
    return Decoder([Block(8), *(Block(width) for _ in range(6) for width in (16, 32))])


def with_lookup() -> nn.Module:
    return Decoder([Lookup() for _ in range(2)])


class WithTower(Decoder):
    """Has a tower for images, which a step of text does not reach."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(8)])
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


TOWER_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 2 // 4  # in bf16, of one rank of four


def mean(model: nn.Module, inputs: Any) -> Tensor:
    return model(**inputs).float().logsumexp(-1).mean()


def run(model: Any = twelve, mesh: Any = None, **options: Any) -> Estimate:
    return estimate(
        model, mesh or {"dp_shard": 4}, **{"seq_len": LENGTH, "logprobs": mean, "clip": False, "plan": None} | options
    )


@cache
def plain() -> Estimate:
    """The estimate of the defaults."""
    return run()


def test_an_estimate_keeps_no_traced_model() -> None:
    class Traced(Block):
        pass

    run(lambda: Decoder([Traced()]))
    gc.collect()
    assert not [each for each in gc.get_objects() if issubclass(type(each), Traced)]


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("model", "traced", "checkpointing"),
    [
        (alternating, (5, 7), "block"),
        pytest.param(alternating, (5, 7), "none", marks=pytest.mark.slow),
        pytest.param(twelve, (3, 4), "block", marks=pytest.mark.slow),
        pytest.param(twelve, (3, 4), "none", marks=pytest.mark.slow),
    ],
)
def test_scaled_traces_equal_exact_traces(model: Any, traced: Any, checkpointing: str) -> None:
    mesh = {"dp_shard": 8}  # of 4, a block's gradients are as large as its activations, and all blocks peak alike
    few = run(model, mesh, activation_checkpointing=checkpointing)
    every = run(model, mesh, activation_checkpointing=checkpointing, exact=True)
    assert few.settings.traced == traced
    assert every.settings.exact
    assert (few.memory, few.traffic, few.flops) == (every.memory, every.traffic, every.flops)


def test_estimate_replicates_the_scalars_of_every_block() -> None:
    replicated = {item.pattern: item.count for item in run(with_scalars).replicated}
    assert replicated == {"blocks.*.scale": 12}


def test_shards_gradients_and_moments_are_those_of_one_rank() -> None:
    found = plain()
    everything = (12 * 2 * WIDTH * WIDTH + 2 * VOCABULARY * WIDTH) * 2  # bytes in bf16
    assert found.memory.resident.parameters == everything // 4
    assert found.memory.after_backward.gradients == everything // 4
    steps = 4 * (12 * 2 + 2)
    assert found.memory.resident.optimizer_state == 2 * everything // 4 + steps


@pytest.mark.parametrize("mesh", [{"dp_shard": 1}, {"dp_shard": 4}], ids=str)
def test_estimate_counts_a_tied_weight_its_gradient_and_moments_once(mesh: dict[str, int]) -> None:
    untied, once = (run(model, mesh).memory.after_backward for model in (twelve, tied))
    weight = VOCABULARY * WIDTH * 2 // mesh["dp_shard"]
    saved = (untied.parameters - once.parameters, untied.gradients - once.gradients)
    assert saved == (weight, weight)
    assert untied.optimizer_state - once.optimizer_state == pytest.approx(2 * weight, rel=0.05)


def test_gradients_of_a_tied_weight_are_added_in_place() -> None:
    rows = 2**12

    def model() -> nn.Module:
        decoder = Decoder([Block()])
        decoder.embedding, decoder.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)
        decoder.head.weight = decoder.embedding.weight
        return decoder

    memory = run(model, {"dp_shard": 1}, seq_len=1, optimizer="none", constants=()).memory
    weight = rows * WIDTH * 2
    assert 3 * weight < memory.peak.total < 3.5 * weight  # the weight and its two gradients, without another sum


def test_estimate_counts_the_workspaces_of_cublas_as_allocated() -> None:
    with_cublas, without = (run(constants=names).memory for names in (["cublas"], ()))
    assert with_cublas.peak.total - without.peak.total == with_cublas.resident.workspaces == 64 * 2**20
    assert with_cublas.reserved is not None
    assert without.reserved is not None
    assert with_cublas.reserved - without.reserved >= 60 * 2**20


def test_every_fsdp_module_except_the_last_and_the_root_is_gathered_twice() -> None:
    gathered = {item.phase: item.count for item in plain().traffic if item.kind == "all_gather"}
    assert gathered == {"forward": 13, "backward": 11}


def test_min_times_follow_the_bandwidth_of_the_axis() -> None:
    found = run(mesh={"dp_replicate": 2, "dp_shard": 4}, bandwidth={"dp_shard": "1kB/s"})
    timed = {item.axis: item.seconds for item in found.traffic if item.kind == "all_gather"}
    moved = {item.axis: item.bytes_sent for item in found.traffic if item.kind == "all_gather"}
    assert timed == {"dp_shard": moved["dp_shard"] / 1000}
    assert {item.seconds for item in found.traffic if item.axis == "dp_replicate"} == {None}


def test_estimate_keeps_masters_in_their_dtype_and_gathers_in_the_compute_dtype() -> None:
    resident, master = plain().memory.resident, run(fsdp=parse_fsdp(master_dtype="fp32"))
    assert master.memory.resident.parameters == 2 * resident.parameters
    gathers = [sum(item.nbytes for item in e.traffic if item.kind == "all_gather") for e in (plain(), master)]
    assert gathers[0] == gathers[1]


def test_offload_moves_shards_to_the_host() -> None:
    on_host, on_device = run(fsdp=FSDP2(offload_policy=CPUOffloadPolicy())), plain()
    assert on_host.memory.resident.parameters == 0
    assert on_host.memory.host.parameters == on_device.memory.resident.parameters
    assert on_host.memory.peak.total < on_device.memory.peak.total


def test_a_host_optimizer_moves_masters_and_moments_to_the_host() -> None:
    on_host, on_device = (run(optimizer=name, device_memory=10) for name in ("adamw_cpu_offload", "adamw_fused"))
    assert on_host.memory.resident.optimizer_state == 0
    parameters = on_device.memory.resident.parameters // 2  # bfloat16
    steps = on_device.memory.resident.optimizer_state - 2 * 2 * parameters
    assert on_host.memory.host.optimizer_state == 3 * 4 * parameters + steps
    assert on_host.memory.peak.total < on_device.memory.peak.total
    assert "optimizer" not in [peak.phase for peak in on_host.memory.phases]
    known = [{each.change.partition(":")[0] for each in found.advice} for found in (on_host, on_device)]
    assert {"optimizer='adamw_cpu_offload'"} <= known[1] - known[0]


def test_a_module_that_depends_on_values_is_listed_and_the_rest_estimated() -> None:
    found = run(with_lookup)
    (left_out,) = [item for item in found.assumptions if "unique" in item.operator]
    assert not left_out.counted
    assert left_out.module == "blocks.*.mlp"
    assert found.flops > 0


def test_estimate_lists_unreached_parts_with_the_bytes_they_would_have() -> None:
    (item,) = run(WithTower).assumptions
    assert (item.module, item.counted) == ("tower", False)
    assert "4 trainable parameters have no gradient" in item.assumption
    assert f"{TOWER_BYTES} bytes of gradients and {2 * TOWER_BYTES} bytes of optimizer state" in item.assumption
    assert "assume_gradients=True" in item.assumption


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_estimate_counts_gradients_and_state_of_unreached_parts_on_request(exact: bool) -> None:
    without, assumed = run(WithTower, exact=exact).memory, run(WithTower, exact=exact, assume_gradients=True).memory
    steps = 4 * 4  # a step number per parameter
    assert assumed.resident.optimizer_state == without.resident.optimizer_state + 2 * TOWER_BYTES + steps
    assert assumed.after_backward.gradients == without.after_backward.gradients + TOWER_BYTES


def test_a_fused_optimizer_has_the_same_state_and_no_temporaries() -> None:
    foreach, fused = plain(), run(optimizer="adamw_fused")
    assert fused.memory.resident == foreach.memory.resident
    peaks = [{peak.phase: peak.nbytes for peak in found.memory.phases} for found in (foreach, fused)]
    assert peaks[0]["optimizer"].temporaries > 0
    assert "optimizer" not in peaks[1] or peaks[1]["optimizer"].temporaries <= 4 * 26  # step numbers


def test_advice_names_a_fused_optimizer_where_the_optimizer_has_the_peak() -> None:
    nbytes = MemoryBreakdown(parameters=4, optimizer_state=8, gradients=4, temporaries=3)
    memory = made_estimate().memory
    for phase, named in (("optimizer", True), ("backward", False)):
        peak = Peak(phase=phase, module="", operator="", nbytes=nbytes)  # type: ignore[arg-type]
        advice = advice_for(made_settings(optimizer="adamw"), replace(memory, phases=(peak,)), 10)
        assert [item.saves for item in advice if "AdamW(fused=True)" in item.change] == ([3] if named else [])


def test_advice_is_due_where_reserved_bytes_and_constants_fill_the_device() -> None:
    memory = replace(made_estimate(peak=34 * 2**30).memory, reserved=70 * 2**30, constants={"context": 2**30})
    assert advice_for(made_settings(), memory, memory.device)
    assert advice_for(made_settings(), memory, 2 * memory.device) == ()


@pytest.mark.parametrize(("reserved", "grow", "advised"), [(40, False, True), (40, True, False), (35, False, False)])
def test_advice_names_expandable_segments_where_blocks_are_unused(reserved: int, grow: bool, advised: bool) -> None:
    memory = replace(made_estimate(peak=34 * 2**30).memory, reserved=reserved * 2**30)
    advice = advice_for(made_settings(), memory, memory.device, segments_grow=grow)
    saved = [item.saves for item in advice if "expandable_segments:True" in item.change]
    assert saved == ([memory.fragmentation] if advised else [])


def test_a_quantized_checkpoint_is_told_with_the_refusal_of_its_weights() -> None:
    model = twelve()
    assert quantization_assumptions(model) == []
    model.config = SimpleNamespace(quantization_config={"quant_method": "fp8"})  # type: ignore[assignment]
    (item,) = quantization_assumptions(model)
    assert "quantized (fp8)" in item.assumption
    assert "load_weights refuses" in item.assumption


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_progress_counts_every_step_once_and_ends_at_all_of_them(exact: bool) -> None:
    seen: list[tuple[int, int]] = []
    run(exact=exact, progress=lambda _name, done, steps: seen.append((done, steps)))
    assert seen == [(done, 4) for done in range(5)]


def test_warnings_of_the_plan_are_logged_once_with_the_numbers_of_the_full_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    found = run(wide_head, mesh={"dp_shard": 2, "tp": 2}, plan=plan)
    assert found.findings
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message for message in logged if "of the model" in message] == list(found.findings)


def wide_head() -> nn.Module:
    model = Decoder([Block() for _ in range(12)])
    model.tower = nn.Linear(1024, 1024)
    return model


def test_too_little_memory_brings_advice_with_numbers() -> None:
    found = run(device_memory="1KiB", mesh={"dp_replicate": 2, "dp_shard": 2})
    assert found.fits is False
    assert any("dp_shard=4" in item.change and item.saves for item in found.advice)
    assert run(device_memory="16GiB").advice == ()


def test_json_has_the_totals() -> None:
    found = plain()
    told = json.loads(found.to_json())
    assert told["memory"]["peak"]["total"] == found.memory.peak.total
    assert told["settings"]["traced"] == [3, 4]


@pytest.mark.parametrize(("exact", "copies"), [(False, 2), pytest.param(True, 1, marks=pytest.mark.slow)])
def test_a_model_is_inspected_once_and_its_plan_resolved_and_checked_once(
    monkeypatch: pytest.MonkeyPatch, exact: bool, copies: int
) -> None:
    calls: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(setup, "inspect_model")
    for name in ("resolve_adapted_plan", "check_plan"):
        count(tensor, name)
    count(pipeline, "trace_step")
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    run(mesh={"dp_shard": 2, "tp": 2}, plan=plan, exact=exact)
    assert calls.pop("trace_step") == copies
    assert set(calls.values()) == {1}


def test_the_fake_world_is_destroyed() -> None:
    run()
    assert not dist.is_initialized()


def test_an_initialized_world_is_refused(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(EstimateError, match="another process"):
            run()
    finally:
        dist.destroy_process_group()


class _Classifier(nn.Module):
    """One vector of scores for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block()])
        self.score = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.score(self.layers[0](self.embed(input_ids))[:, -1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 4}, "from 0 to 3"),
        ({"dtype": "int8"}, "bf16"),
        ({"optimizer": "lion"}, "adamw"),
        ({"seq_len": 0}, "seq_len=0: give a positive integer"),
        ({"micro_batch": -1}, "micro_batch=-1: give a positive integer"),
        ({"logprobs": "no.such.function"}, "package.module.function"),
        ({"model": twelve()}, "pass its config"),
        (
            {"model": _Classifier, "logprobs": "logits"},
            r"logits of shape \[1, 3\], not of every token: pass logprobs=function",
        ),
    ],
)
def test_invalid_values_are_refused_with_the_valid_ones(options: Any, says: str) -> None:
    with pytest.raises(EstimateError, match=says):
        run(**options)


def test_axes_must_be_known_and_sized() -> None:
    with pytest.raises(MeshError, match="ep"):
        run(mesh={"ep": 2})
    with pytest.raises(MeshError, match="-1"):
        run(mesh={"dp_shard": -1})


def test_a_config_of_remote_code_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "no_such_model", "auto_map": {"AutoConfig": "a.B"}}))
    with pytest.raises(EstimateError, match=r"no_such_model.*auto_map"):
        run(tmp_path)
    with pytest.raises(EstimateError, match="does not exist"):
        run(tmp_path / "nothing")


def _loss_of_images(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    pixels = torch.zeros(inputs["input_ids"].shape[0], 3, 8, 8, dtype=torch.bfloat16)
    return model(**inputs, pixel_values=pixels, use_cache=False).logits.square().mean()


def _untrained_by_images() -> int:
    """The number of the model's parameters that a real step with images leaves without gradient."""
    model = tiny_model("Gemma3ForConditionalGeneration")
    model(**tiny_inputs(model, batch=1, length=8), use_cache=False).logits.sum().backward()
    return sum(parameter.grad is None for parameter in model.parameters())


@pytest.mark.any_torch
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="5.10 finds the places of images by their values"
)
def test_a_step_with_images_counts_what_it_trains_of_the_vision_tower() -> None:
    config = tiny_config("Gemma3ForConditionalGeneration", num_hidden_layers=1, layer_types=["full_attention"])
    options: dict[str, Any] = {"seq_len": 16, "clip": False, "plan": None, "optimizer": "adamw_fused"}
    text = estimate(config, {"dp_shard": 2}, **options)
    images = estimate(config, {"dp_shard": 2}, logprobs=_loss_of_images, **options)
    without = {each.module: each.assumption for each in text.assumptions if "no images" in each.assumption}
    assert set(without) == {"model.vision_tower", "model.multi_modal_projector"}
    (item,) = [each for each in images.assumptions if "no gradient" in each.assumption]
    expected = f"the step does not use all of it, so {_untrained_by_images()} trainable parameters have no gradient"
    assert (item.module, item.assumption.partition(":")[0]) == ("model.vision_tower", expected)
    assert text.memory.resident.optimizer_state < images.memory.resident.optimizer_state


@pytest.mark.any_torch
def test_the_layers_of_sharded_towers_take_half_of_their_bytes() -> None:
    config = tiny_config("Gemma3ForConditionalGeneration", num_hidden_layers=1, layer_types=["full_attention"])
    sharded, replicated = (
        estimate(config, {"tp": 2}, seq_len=16, plan=plan, optimizer="none", clip=False).memory.resident.parameters
        for plan in (TensorParallel(), TensorParallel(towers="replicated"))
    )
    model = tiny_model("Gemma3ForConditionalGeneration").model
    tower = model.vision_tower
    layers = {path: layer for path, layer in tower.named_modules() if type(layer) is nn.Linear}
    split = sum(layer.weight.numel() for layer in layers.values())
    split += sum(layer.bias.numel() for path, layer in layers.items() if not path.endswith(("out_proj", "fc2")))
    others = [each for each in tower.modules() if type(each) is not nn.Linear] + [model.multi_modal_projector]
    tensors = [each for module in others for each in module.parameters(recurse=False) if each.ndim > 1 < len(each)]
    split += sum(each.numel() for each in tensors)  # patches, positions, fused attention, a bare projection
    assert replicated - sharded == 2 * split // 2  # half of them, of two bytes each
    with pytest.raises(OptionError, match="towers='none': write one of 'sharded', 'replicated'"):
        estimate(config, {"tp": 2}, seq_len=16, plan=TensorParallel(towers="none"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("way", "kind"), [("ring", "send"), pytest.param("ulysses", "all_to_all", marks=pytest.mark.slow)]
)
def test_each_way_of_attention_over_cp_sends_what_its_closed_form_says(way: Any, kind: str) -> None:
    config, ranks, length = tiny_config("LlamaForCausalLM", num_key_value_heads=2), 4, 64
    found = estimate(
        config, {"cp": ranks}, seq_len=length, context_parallel=way, optimizer="none", clip=False, exact=True
    )
    heads, kv_heads, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    features = length // ranks * config.head_dim
    ring = (ranks - 1) * features * 2 * kv_heads * (2 + 2 + 4)  # forward, backward, gradients in float32
    ulysses = 2 * (ranks - 1) * features * (2 * heads + 2 * ranks) * 2 // ranks
    sent = sum(item.bytes_sent for item in found.traffic if item.kind == kind)
    assert sent == layers * {"ring": ring, "ulysses": ulysses}[way]
    assert found.settings.context_parallel == way
