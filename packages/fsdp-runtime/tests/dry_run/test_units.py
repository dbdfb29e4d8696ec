"""Parsing and formatting of sizes, rates and meshes."""

from __future__ import annotations

import pytest

from fsdp_runtime import MeshError, MeshSpec
from fsdp_runtime.dry_run import EstimateError
from fsdp_runtime.dry_run.parse_args import (
    parse_bandwidth,
    parse_bandwidths,
    parse_bytes,
    parse_flops,
    parse_mesh,
    split_bandwidths,
)
from fsdp_runtime.dry_run.report.format import format_bytes, format_count, format_seconds
from fsdp_runtime.dry_run.sweep_types import format_mesh


def test_axes_that_are_not_named_have_size_1() -> None:
    assert parse_mesh("dp_replicate=4, dp_shard=32,tp=8") == MeshSpec(dp_replicate=4, dp_shard=32, tp=8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tp", "'tp' in 'tp' is not axis=value"),
        ("tp=8,tp=4", "axis tp is named twice"),
        ("sp=4", "an axis 'sp'; the axes are dp_replicate, dp_shard, cp, tp, ep, pp"),
        ("tp=big", "axis tp has size 'big'"),
        ("tp=0", "axis tp has size 0"),
    ],
)
def test_an_invalid_mesh_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(MeshError, match=told):
        parse_mesh(text)


def test_bandwidths_are_given_by_axis_or_once_for_all() -> None:
    assert split_bandwidths("tp=450GB/s,dp_shard=400Gb/s") == {"tp": "450GB/s", "dp_shard": "400Gb/s"}
    assert split_bandwidths("50GB/s") == "50GB/s"
    with pytest.raises(EstimateError, match="axis tp is named twice"):
        split_bandwidths("tp=1,tp=2")


@pytest.mark.parametrize(
    ("value", "size"), [("80GiB", 80 * 2**30), ("80 gb", 80 * 10**9), ("1.5KiB", 1536), ("4096", 4096), (7, 7)]
)
def test_sizes_with_an_i_are_powers_of_1024_and_others_of_1000(value: int | str, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", ["80G", "big", "", "-1", 0, "0GiB"])
def test_an_invalid_size_is_refused(value: int | str) -> None:
    with pytest.raises(EstimateError, match=r"80GiB|positive"):
        parse_bytes(value)


@pytest.mark.parametrize("value", ["50GB/s", "400Gb/s", "400Gbit/s", "400 gbps", 5e10, "5e10", "0.05TB/s"])
def test_bandwidths_are_in_bytes_or_bits_by_the_case_of_b(value: float | str) -> None:
    assert parse_bandwidth(value) == pytest.approx(5e10)
    assert parse_bandwidths({"tp": value}) == {"tp": pytest.approx(5e10)}


@pytest.mark.parametrize("value", ["fast", "50GB", "0GB/s", -5.0])
def test_an_invalid_bandwidth_is_refused(value: float | str) -> None:
    with pytest.raises(EstimateError, match=r"450GB/s|positive"):
        parse_bandwidth(value)


@pytest.mark.parametrize("text", ["400TFLOP/s", "400 TFLOPS", "400tflops/s", "4e14", "0.4P"])
def test_rates_of_operations_have_several_spellings(text: str) -> None:
    assert parse_flops(text) == pytest.approx(4e14)


@pytest.mark.parametrize("value", ["fast", "0", -1.0])
def test_an_invalid_rate_is_refused(value: str | float) -> None:
    with pytest.raises(EstimateError, match="rate"):
        parse_flops(value)


def test_numbers_keep_three_digits_and_change_units_where_they_round_up() -> None:
    assert [format_bytes(size) for size in (0, 512, 1023, 1024, 1536, 80 * 2**30)] == [
        *("0 bytes", "512 bytes", "1023 bytes", "1.00 KiB", "1.50 KiB", "80.0 GiB"),
    ]
    assert format_bytes(1024**2 - 1) == "1.00 MiB"
    assert [format_bytes(size, "GiB") for size in (2**30, 15, 5 * 2**20)] == ["1.00 GiB", "15 bytes", "5.00 MiB"]
    assert [format_count(count) for count in (7, 226_000, 999_600, 70_553_706_496)] == [
        "7",
        "226 k",
        "1.00 M",
        "70.6 G",
    ]
    assert format_count(6.28e14, "FLOP") == "628 TFLOP"
    assert [format_seconds(time) for time in (1.62, 0.0331, 2.4e-7)] == ["1.62 s", "33.1 ms", "0.24 us"]
    assert [format_mesh(MeshSpec(tp=8, dp_shard=2).sizes), format_mesh(MeshSpec().sizes)] == [
        *("dp_shard=2 tp=8", "one rank"),
    ]
