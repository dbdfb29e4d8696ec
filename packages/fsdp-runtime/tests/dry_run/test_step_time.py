"""The time of a step follows from operations, bytes and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_runtime.dry_run.step_time import ATTENTION_EFFICIENCY, LINK_EFFICIENCY, MATMUL_EFFICIENCY, Hardware, step_time
from fsdp_runtime.dry_run.types import Estimate, Memory, MemoryBreakdown, Settings, Traffic
from fsdp_runtime.errors import EstimateError

RATES = Hardware(flops=1e12, memory_bandwidth=1e12, node_bandwidth=1e9, network_bandwidth=1e8)


def _estimate(*, tp: int = 1, traffic: dict[str, int] | None = None, compiled: bool = True) -> Estimate:
    nothing = MemoryBreakdown()
    settings = Settings(
        model="", parameters=0, mesh={"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": tp, "ep": 1}, world_size=2 * tp,
        rank=0, seq_len=1000, micro_batch=1, plan="auto", sequence_parallel=False, activation_checkpointing="none",
        dtype="bf16", master_dtype=None, optimizer="adamw", logprobs="logits", offload=False, blocks=1, traced=(1,),
        scaling="", compiled=compiled, micro_batches=2,
    )  # fmt: skip
    sent = tuple(
        Traffic(axis=axis, ranks=2, phase="forward", kind="all_gather", count=1, nbytes=size, bytes_sent=size)
        for axis, size in (traffic or {}).items()
    )
    return Estimate(
        settings=settings,
        memory=Memory(resident=nothing, after_forward=nothing, after_backward=nothing, phases=()),
        traffic=sent,
        flops=3 * 10**12,
        flops_by_kind={"matmul": 10**12, "attention": 2 * 10**12},
        bytes_moved=10**12,
    )


def test_half_of_attention_is_masked_and_micro_batches_add_up() -> None:
    found = step_time(_estimate(), RATES)
    assert found.lower_bound == pytest.approx(2 * 2.0)
    assert found.expected == pytest.approx(2 * (1 / MATMUL_EFFICIENCY + 1 / ATTENTION_EFFICIENCY["flash2"]))
    assert found.tokens_per_second == pytest.approx(2000 / found.expected)


def test_eager_operators_take_the_time_of_their_bytes() -> None:
    assert step_time(_estimate(compiled=False), RATES).expected > step_time(_estimate(), RATES).expected


def test_traffic_of_fsdp_hides_behind_computing_and_that_of_tp_does_not() -> None:
    alone = step_time(_estimate(tp=2), RATES).expected
    hidden = step_time(_estimate(tp=2, traffic={"dp_shard": 10**9}), RATES)
    added = step_time(_estimate(tp=2, traffic={"tp": 10**9}), RATES)
    assert hidden.expected == pytest.approx(alone)
    assert added.expected == pytest.approx(alone + 2 / LINK_EFFICIENCY)
    assert step_time(_estimate(tp=2, traffic={"dp_shard": 10**12}), RATES).expected > 1000


def test_float8_products_have_their_rate() -> None:
    flops = {"matmul": 10**12, "float8": 4 * 10**12}
    assert step_time(replace(_estimate(), flops_by_kind=flops), "H100").lower_bound == pytest.approx(
        2 * (1e12 / 989e12 + 4e12 / 1979e12)
    )
    with pytest.raises(EstimateError, match=r"has no rate of float8 products: give Hardware\(float8_flops"):
        step_time(replace(_estimate(), flops_by_kind=flops), "A100")


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(EstimateError, match="write one of A100"):
        step_time(_estimate(), "TPU")
