"""Sizes, rates and meshes are read as their writers meant them, and written so that people can read them."""

from __future__ import annotations

import pytest

from fsdp_runtime import EstimateError, MeshError, MeshSpec
from fsdp_runtime.estimate.parse_args import bandwidths
from fsdp_runtime.estimate.report.format import (
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_mesh,
    readable_bytes,
    readable_count,
    readable_mesh,
    readable_seconds,
    split_bandwidths,
)


def test_a_mesh_is_read_with_axes_that_are_not_named_at_size_1() -> None:
    assert parse_mesh("dp_replicate=4, dp_shard=32,tp=8") == MeshSpec(dp_replicate=4, dp_shard=32, tp=8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tp", "'tp' in 'tp' is no axis=value"),
        ("tp=8,tp=4", "axis tp comes twice"),
        ("pp=4", "an axis 'pp'; the axes are dp_replicate, dp_shard, cp, tp"),
        ("tp=big", "axis tp has size 'big'"),
        ("tp=0", "axis tp has size 0"),
    ],
)
def test_a_mesh_that_cannot_be_read_is_refused_with_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(MeshError, match=told):
        parse_mesh(text)


def test_bandwidths_come_by_axis_or_as_one_for_all() -> None:
    assert split_bandwidths("tp=450GB/s,dp_shard=400Gb/s") == {"tp": "450GB/s", "dp_shard": "400Gb/s"}
    assert split_bandwidths("50GB/s") == "50GB/s"
    with pytest.raises(EstimateError, match="axis tp comes twice"):
        split_bandwidths("tp=1,tp=2")


@pytest.mark.parametrize(
    ("value", "size"), [("80GiB", 80 * 2**30), ("80 gb", 80 * 10**9), ("1.5KiB", 1536), ("4096", 4096), (7, 7)]
)
def test_sizes_are_read_in_powers_of_1024_where_there_is_an_i_and_else_of_1000(value: int | str, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", ["80G", "big", "", "-1", 0, "0GiB"])
def test_a_size_that_is_none_is_refused(value: int | str) -> None:
    with pytest.raises(EstimateError, match=r"80GiB|positive"):
        parse_bytes(value)


@pytest.mark.parametrize("value", ["50GB/s", "400Gb/s", "400Gbit/s", "400 gbps", 5e10, "5e10", "0.05TB/s"])
def test_links_are_told_in_bytes_or_in_bits_and_the_case_of_b_matters(value: float | str) -> None:
    assert parse_bandwidth(value) == pytest.approx(5e10)
    assert bandwidths({"tp": value}) == {"tp": pytest.approx(5e10)}


@pytest.mark.parametrize("value", ["fast", "50GB", "0GB/s", -5.0])
def test_a_bandwidth_that_is_none_is_refused(value: float | str) -> None:
    with pytest.raises(EstimateError, match=r"450GB/s|positive"):
        parse_bandwidth(value)


@pytest.mark.parametrize("text", ["400TFLOP/s", "400 TFLOPS", "400tflops/s", "4e14", "0.4P"])
def test_a_rate_of_operations_is_read_however_it_is_spelt(text: str) -> None:
    assert parse_flops(text) == pytest.approx(4e14)


@pytest.mark.parametrize("value", ["fast", "0", -1.0])
def test_a_rate_that_is_none_is_refused(value: str | float) -> None:
    with pytest.raises(EstimateError, match="rate"):
        parse_flops(value)


def test_numbers_keep_three_digits_and_change_units_where_they_round_up() -> None:
    assert [readable_bytes(size) for size in (0, 512, 1023, 1024, 1536, 80 * 2**30)] == [
        *("0 bytes", "512 bytes", "1023 bytes", "1.00 KiB", "1.50 KiB", "80.0 GiB"),
    ]
    assert readable_bytes(1024**2 - 1) == "1.00 MiB"
    assert [readable_count(count) for count in (7, 226_000, 999_600, 70_553_706_496)] == [
        "7",
        "226 k",
        "1.00 M",
        "70.6 G",
    ]
    assert readable_count(6.28e14, "FLOP") == "628 TFLOP"
    assert [readable_seconds(time) for time in (1.62, 0.0331, 2.4e-7)] == ["1.62 s", "33.1 ms", "0.24 us"]
    assert [readable_mesh(MeshSpec(tp=8, dp_shard=2).sizes), readable_mesh(MeshSpec().sizes)] == [
        *("dp_shard=2 tp=8", "one rank"),
    ]
