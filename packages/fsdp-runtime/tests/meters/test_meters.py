"""Operations against torch's counter, tokens of all ranks, traffic against what a mesh must send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.errors import OptionError
from fsdp_runtime.meters import AttentionFlops, ModelFlops, StepMeter
from fsdp_runtime.steps import ActivationCheckpointing, Float8
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool

LENGTH = 12


def _counted(model: Any) -> int:
    """What torch counts of forward and backward, whose attention computes all pairs."""
    inputs = tiny_inputs(model, batch=1, length=LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def _dense_pairs(flops: ModelFlops) -> float:
    every = ModelFlops(flops.per_token, tuple(AttentionFlops(a.per_pair, causal=False) for a in flops.attention))
    return every.step([LENGTH])


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_operations_are_those_that_torch_counts(name):
    model = tiny_model(name, attn_implementation="eager")
    counted = _counted(model)
    assert abs(_dense_pairs(ModelFlops.of(model)) / counted - 1) < 0.02  # rotary embeddings, no gradient of embeddings


def test_a_token_uses_top_k_experts():
    model = tiny_model("Qwen3MoeForCausalLM")
    config = model.config
    flops = ModelFlops.of(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    others = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim > 1 and ".experts." not in n and "embed" not in n
    )
    assert flops.per_token == 6 * (others + experts * config.num_experts_per_tok / config.num_experts)


def test_masks_decide_the_pairs_of_attention():
    assert AttentionFlops(1).pairs(5) == 15
    assert AttentionFlops(1, causal=False).pairs(5) == 25
    assert AttentionFlops(1, window=2).pairs(5) == 1 + 2 + 2 + 2 + 2
    assert AttentionFlops(1, chunk=2).pairs(5) == 3 + 3 + 1
    flops = ModelFlops(10.0, (AttentionFlops(4),))
    assert flops.step([2, 3]) == 50 + 3 * 4 * (3 + 6)  # documents do not see one another


def test_windows_of_a_hybrid_are_read_by_block():
    model = tiny_model("Gemma3ForCausalLM")
    windows = [each.window for each in ModelFlops.of(model).attention]
    expected = [
        model.config.sliding_window if kind == "sliding_attention" else None for kind in model.config.layer_types
    ]
    assert windows == expected


def test_a_frozen_weight_has_no_gradient():
    model = tiny_model("LlamaForCausalLM")
    trained = ModelFlops.of(model).per_token
    model.requires_grad_(False)
    assert ModelFlops.of(model).per_token == trained * 2 / 3


@pytest.mark.parametrize(("recipe", "products"), [("tensorwise", 3), ("rowwise_with_gw_hp", 2), ("mxfp8", 3)])
def test_float8_operations_are_counted_apart(recipe, products):
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    total = ModelFlops.of(model).per_token
    parallelize(model, MeshSpec().build(device_type="cpu"), steps=(Float8(recipe, emulate=True),))
    blocks = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2)
    meter = StepMeter(model, peak_flops=1e12)
    with meter.step(lengths=[3, 5]):
        pass
    assert ModelFlops.of(model).per_token == total
    assert meter.last.float8_flops == 8 * products * 2 * blocks
    speed = (meter.last.flops - meter.last.float8_flops / 2) / meter.last.seconds
    assert meter.last.mfu == pytest.approx(speed / 1e12)
    assert meter.last.to_dict()["float8_tflops_per_second_per_rank"] > 0


def _step(sizes: dict[str, int]) -> tuple[dict[str, float], int, int]:
    mesh = MeshSpec(**sizes).build(device_type="cpu")
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    whole = sum(p.nbytes for p in model.parameters())
    parallelize(model, mesh)
    meter = StepMeter(model, mesh, peak_flops=1e12)
    inputs = tiny_inputs(model, batch=2, length=LENGTH)
    with meter.step([LENGTH] * 2, count_traffic=True):
        with meter.phase("forward"):
            logits = model(**inputs, use_cache=False).logits
        with meter.phase("backward"):
            logits.sum().backward()
    return meter.last.to_dict(), meter.last.tokens, whole


def test_ranks_of_dp_add_their_tokens_and_send_each_byte(two_ranks: RankPool):
    for values, tokens, whole in two_ranks.run(_step, {"dp_shard": 2}):
        assert tokens == 4 * LENGTH
        assert values["bytes_sent/dp_shard"] >= whole  # gathered for both passes by halves, and gradients reduced
        assert values["bytes_sent/dp_shard"] < 2.5 * whole
        assert values["mfu"] == pytest.approx(values["tflops_per_second_per_rank"])
        assert {"seconds/forward", "seconds/backward", "tokens_per_second_per_rank"} <= set(values)


def test_ranks_of_tp_share_their_tokens(two_ranks: RankPool):
    for values, tokens, _ in two_ranks.run(_step, {"tp": 2}):
        assert tokens == 2 * LENGTH
        assert values["bytes_sent/tp"] > 0


def test_a_step_reports_the_activations_on_the_host():
    model = tiny_model("LlamaForCausalLM")
    parallelize(
        model,
        MeshSpec().build(device_type="cpu"),
        activation_checkpointing=ActivationCheckpointing("block", offload=True),
    )
    meter, inputs = StepMeter(model), tiny_inputs(model, batch=2, length=LENGTH)
    for micro_batches in (2, 1):
        with meter.step([LENGTH] * 2 * micro_batches):
            logits = [model(**inputs, use_cache=False).logits for _ in range(micro_batches)]
            sum(each.sum() for each in logits).backward()
        blocks, width = model.config.num_hidden_layers, model.config.hidden_size
        assert meter.last.host_bytes == micro_batches * blocks * 2 * LENGTH * width * 8
    assert meter.last.to_dict()["host_bytes"] == meter.last.host_bytes


def test_misuse_is_named():
    model = tiny_model("LlamaForCausalLM")
    with pytest.raises(OptionError, match="peak_flops=0"):
        StepMeter(model, peak_flops=0)
    with pytest.raises(OptionError, match="no step has finished"):
        _ = StepMeter(model).last
