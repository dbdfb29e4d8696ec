"""Walking over logits: every token once, in order, and never a copy."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.tensors import assume_accelerator


@settings(max_examples=80)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    rows=st.integers(1, 7),
    dropped=st.integers(0, 4),
    transpose=st.booleans(),
)
def test_blocks_are_views_of_all_tokens_in_order(shape, rows, dropped, transpose):
    full = torch.arange(torch.Size(shape).numel() * 3).view(*shape, 3)
    view = full.transpose(0, -2) if transpose else full
    view = view[..., dropped % view.shape[-2] :, :]
    spans, blocks = zip(*((span, pair) for span, pair in row_blocks(rows, view, view.clone())), strict=True)
    assert [index for span in spans for index in range(span.start, span.stop)] == list(range(view.shape[:-1].numel()))
    assert torch.equal(torch.cat([first for first, _ in blocks]), view.reshape(-1, 3))
    assert all(torch.equal(first, second) for first, second in blocks)
    assert all(first.untyped_storage().data_ptr() == full.untyped_storage().data_ptr() for first, _ in blocks)
    assert max(len(first) for first, _ in blocks) <= rows


def test_one_row_fits_however_wide():
    assert rows_per_workspace(10**9, torch.device("cpu")) == 1
    assert rows_per_workspace(0, torch.device("cpu")) >= 1
    assert rows_per_workspace(1024, torch.device("cpu"), fraction=0.5) == rows_per_workspace(2048, torch.device("cpu"))


def test_cpu_tensors_that_stand_for_others_get_an_accelerators_workspace():
    cpu, cuda = (rows_per_workspace(1024, torch.device(kind)) for kind in ("cpu", "cuda"))
    with assume_accelerator():
        assert rows_per_workspace(1024, torch.device("cpu")) == cuda
    assert rows_per_workspace(1024, torch.device("cpu")) == cpu < cuda
