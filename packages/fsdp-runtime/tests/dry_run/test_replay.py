"""A step replayed on the allocator: scaled tapes reserve what the tape of all blocks does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig

from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from fsdp_runtime.steps import ActivationCheckpointing

#: More blocks than are traced to scale them, and as few as a model has that is traced as it is.
MANY, FEW = 8, 2


def _config(blocks: int, width: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@cache
def _estimate(blocks: int = FEW, **options: object) -> Estimate:
    keywords: dict[str, object] = {"seq_len": 2048, "activation_checkpointing": "block", "constants": ()}
    return estimate(_config(blocks, 128, 256), {"dp_shard": 2}, **{**keywords, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile": True, "activation_checkpointing": "none"},
        {"micro_batches": 2},
        {"optimizer": "adamw_8bit"},
        {"activation_checkpointing": ActivationCheckpointing("none", offload=True), "blocks": 12},
        {"activation_checkpointing": ActivationCheckpointing("block", offload=True), "blocks": 12},
    ],
    ids=str,
)
def test_scaled_tapes_reserve_as_much_as_every_block(options: dict[str, object]) -> None:
    options = {"blocks": MANY, **options}
    scaled, exact = _estimate(**options), _estimate(exact=True, **options)  # type: ignore[arg-type]
    assert scaled.settings.traced < exact.settings.traced == (options["blocks"],)
    assert [peak.total for peak in scaled.memory.phases] == [peak.total for peak in exact.memory.phases]
    assert scaled.memory.reserved is not None
    assert exact.memory.reserved is not None
    assert scaled.memory.reserved == pytest.approx(exact.memory.reserved, rel=0.02)
    assert scaled.memory.reserved >= scaled.memory.peak.total
    assert scaled.memory.host == exact.memory.host


def test_gradients_of_earlier_micro_batches_are_live_in_forward() -> None:
    one, two = _estimate(), _estimate(micro_batches=2)
    gradients = one.memory.after_backward.gradients
    assert two.memory.after_forward.total - one.memory.after_forward.total == gradients


def test_gradients_on_the_host_reserve_nothing() -> None:
    wide = _config(MANY, 2048, 8192)
    options: dict[str, Any] = {"seq_len": 64, "fsdp": parse_fsdp(offload=True), "micro_batches": 2, "constants": ()}
    scaled, exact = (
        estimate(wide, {"tp": 2}, exact=each, activation_checkpointing="block", **options).memory
        for each in (False, True)
    )
    assert scaled.reserved == exact.reserved


def test_gradients_that_one_rank_reduces_have_memory_of_their_own() -> None:
    # FSDP2 allocates them on its stream for reductions, also without another rank.
    options: dict[str, Any] = {"seq_len": 8192, "optimizer": "adamw_fused", "constants": ()}
    options["allocator"] = "expandable_segments:True"
    wide, sharding = _config(FEW, 1024, 4096), parse_fsdp(master_dtype="fp32")
    memory = estimate(wide, {"dp_shard": 1}, fsdp=sharding, **options).memory
    assert memory.peak.phase == "backward"
    assert memory.fragmentation is not None
    assert memory.fragmentation > 0.9 * (memory.after_backward.gradients - memory.peak.nbytes.gradients)


def test_what_is_cached_is_released_before_a_device_is_full() -> None:
    free = _estimate(MANY).memory
    assert free.reserved is not None
    available = free.reserved - 2**20
    found = _estimate(MANY, device_memory=available + sum(free.constants.values()))
    assert found.memory.reserved is not None
    assert found.memory.reserved <= available
    assert found.fits


def test_inputs_of_recomputed_blocks_move_to_the_host() -> None:
    kept, moved = _estimate(), _estimate(offload_activations=True)
    offloaded = _estimate(activation_checkpointing=ActivationCheckpointing("block", offload=True))
    one = 2048 * 128 * 2
    saved = kept.memory.after_forward.activations - moved.memory.after_forward.activations
    assert saved >= FEW * one
    # The input of the last block leaves the device with the next forward.
    assert kept.memory.after_forward.activations - offloaded.memory.after_forward.activations == (FEW - 1) * one
    assert offloaded.memory.host.activations == FEW * one
    assert offloaded.settings.offload_activations
