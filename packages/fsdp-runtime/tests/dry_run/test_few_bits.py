"""Dry runs of a base in packed bytes and of moments in few bits, and the advice to use them."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.build_model import WithAdapters
from fsdp_runtime.steps import Float8, Quantized
from harness.models import tiny_config

_CONFIG = tiny_config("Qwen3ForCausalLM", intermediate_size=128, num_hidden_layers=2)
#: Elements of the linear layers of two blocks.
_LINEAR = 2 * (4 * 64 * 64 + 3 * 64 * 128)


def _estimate(source: Any, **options: Any) -> Estimate:
    return estimate(source, {"dp_shard": 2}, seq_len=16, activation_checkpointing="block", clip=False, **options)


def test_estimate_counts_the_packed_bytes_of_a_quantized_base() -> None:
    """A block of 64 weights has 36 bytes instead of 128, and each rank holds half of the rows."""
    source = WithAdapters(_CONFIG, rank=2)
    plain, packed = _estimate(source, device_memory="1MiB"), _estimate(source, steps=(Quantized("nf4"),))
    freed = plain.memory.resident.parameters - packed.memory.resident.parameters
    assert freed == _LINEAR * (128 - 36) // 64 // 2
    (advice,) = [each for each in plain.advice if "Quantized('nf4')" in each.change]
    assert advice.saves == pytest.approx(freed, rel=0.1)  # the adapters' bytes are not frozen
    assert packed.settings.quantized


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_estimate_counts_float8_products_without_a_device(recipe: Any) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = tiny_config("Qwen3ForCausalLM", head_dim=128, num_hidden_layers=2, **wide)
    plain, cast = (
        estimate(config, {"tp": 2}, seq_len=128, dtype="bf16", clip=False, steps=steps)
        for steps in ((), (Float8(recipe),))
    )
    weights = 2 * (4 * 256 * 256 + 3 * 256 * 512) // 2
    assert cast.flops_by_kind["float8"] == 3 * 2 * 128 * weights
    assert cast.flops_by_kind["float8"] + cast.flops_by_kind["matmul"] == plain.flops_by_kind["matmul"]
    assert cast.memory.resident.parameters == plain.memory.resident.parameters


def test_estimate_counts_moments_in_few_bits() -> None:
    config = tiny_config("Qwen3ForCausalLM", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    states = {name: _estimate(config, optimizer=name) for name in ("adamw", "adamw_bf16", "adamw_8bit")}
    full, half, low = (each.memory.resident.optimizer_state for each in states.values())
    assert half == pytest.approx(full, rel=0.05)  # of bfloat16 parameters
    assert low == pytest.approx(full / 2, rel=0.1)  # codes, and a scale of four bytes per row of at most 256
    (advice,) = [
        each
        for each in _estimate(config, device_memory="1MiB").advice
        if each.change.startswith("optimizer='adamw_8bit'")
    ]
    assert advice.saves == pytest.approx(full - low, rel=0.1)
