"""Rows fetched by the ranks that compute with them, and their gradients returned."""

import pytest
import torch
import torch.distributed as dist

from harness.layers import tp_mesh
from tp_plans.layouts import compute_ranges, shard_ranges
from tp_plans.torch_styles.row_all_to_all import RowExchange

WIDTH = 3


def exchanged(size, options, dtype):
    """Whether this rank gets its rows, and its stored rows the sum of all ranks' gradients."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    used = compute_ranges(size, tp, **options)
    whole = torch.arange(size * WIDTH, dtype=torch.float64).view(size, WIDTH).to(dtype)
    stored = shard_ranges(size, tp)[rank]
    local = whole[stored.start : stored.stop].clone().requires_grad_()
    rows = RowExchange(size, used, rank)(local, tp_mesh())
    (rows * (rank + 1)).sum().backward()
    wanted = [sum(other + 1 for other in range(tp) if any(row in part for part in used[other])) for row in stored]
    index = [row for part in used[rank] for row in part]
    return (
        rows.dtype == dtype and torch.equal(rows, whole[index]),
        local.grad.dtype == dtype and local.grad[:, 0].tolist() == [float(number) for number in wanted],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (24, {"unit": 2, "pieces": (4, 1, 1), "shared": True}),
        (22, {"pieces": (1, 1)}),
        (2, {"pieces": (1, 1)}),
        (3, {"unit": 3, "shared": True}),
    ],
)
def test_rows_and_gradients_arrive_in_any_dtype_even_where_ranks_store_none(four_ranks, size, options, dtype):
    assert four_ranks.run(exchanged, size, options, dtype) == [(True, True)] * 4


@pytest.mark.parametrize(
    ("size", "tp", "options", "needed"),
    [
        (12, 2, {}, False),
        (12, 1, {"pieces": (1, 1)}, False),
        (12, 2, {"pieces": (1, 1)}, True),
        (8, 4, {"unit": 2, "shared": True}, False),
        (4, 4, {"unit": 2, "shared": True}, True),
    ],
)
def test_row_exchange_is_not_needed_where_ranks_use_their_stored_rows(size, tp, options, needed):
    assert RowExchange(size, compute_ranges(size, tp, **options), 0).needed is needed
