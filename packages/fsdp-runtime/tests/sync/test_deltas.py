"""Records of changed elements: exact to the last bit, small, and refused where they do not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_runtime.sync import WeightSyncError
from fsdp_runtime.sync.deltas import HEADER_BYTES, apply_changes, encode_changes

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8)


def _changed(old: Tensor, share: float, seed: int = 0) -> Tensor:
    """A copy in which about a share of the elements has other bits."""
    generator = torch.Generator().manual_seed(seed)
    bits = old.clone().view(-1).view(torch.uint8).view(old.numel(), -1)
    bits[torch.rand(old.numel(), generator=generator) < share, 0] ^= 1
    return bits.view(-1).view(old.dtype).view(old.shape)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@settings(max_examples=30)
@given(
    st.integers(1, 3000),
    st.sampled_from([0.0, 0.0002, 0.003, 0.05, 0.2, 0.6, 1.0]),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
def test_applying_a_record_gives_the_new_bits_in_at_most_the_bytes_of_all_values(
    count: int, share: float, dtype: torch.dtype, seed: int
) -> None:
    old = torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype)
    new = _changed(old, share, seed)
    record = encode_changes(old, new)
    assert len(record) <= HEADER_BYTES + new.nbytes
    target = old.clone()
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), record, record[:5]])  # others before and after it
    assert apply_changes(shifted, 3, target) == 3 + len(record)
    assert _same_bits(target, new)
    first = torch.empty_like(new)
    assert apply_changes(encode_changes(None, new), 0, first) == HEADER_BYTES + new.nbytes
    assert _same_bits(first, new)


def test_signed_zeros_and_payloads_of_nans_are_changes() -> None:
    old = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    new = old.clone()
    new[0] = -0.0
    new.view(torch.int32)[2] ^= 1
    target = old.clone()
    apply_changes(encode_changes(old, new), 0, target)
    assert _same_bits(target, new)


def test_gaps_of_any_length_are_exact() -> None:
    old = torch.zeros(200_000, dtype=torch.bfloat16)
    for positions in ([0], [199_999], [254, 255, 256, 511], [65534, 131070], [65535, 131071], [0, 199_999]):
        new = old.clone()
        new[positions] = 1
        target = old.clone()
        apply_changes(encode_changes(old, new), 0, target)
        assert target.nonzero().view(-1).tolist() == positions


@pytest.mark.parametrize(("share", "bound"), [(0.0002, 0.0005), (0.01, 0.017), (0.03, 0.046), (1.0, 1.0001)])
def test_wire_bytes_at_published_shares_of_changed_elements(share: float, bound: float) -> None:
    """The bounds: two bytes of value and one of gap per change, two of gap where changes are rare."""
    old = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert len(encode_changes(old, _changed(old, share))) <= bound * old.nbytes


def test_records_that_do_not_fit_are_refused() -> None:
    old = torch.zeros(100, dtype=torch.bfloat16)
    new = _changed(old, 0.1)
    record = encode_changes(old, new)
    for wrong, target in (
        (record[:10], old.clone()),
        (record[:-1], old.clone()),
        (record, old[:50].clone()),
        (encode_changes(None, new), old[:99].clone()),
        (torch.full((40,), 7, dtype=torch.uint8), old.clone()),
    ):
        with pytest.raises(WeightSyncError, match="ask for a full"):
            apply_changes(wrong, 0, target)
