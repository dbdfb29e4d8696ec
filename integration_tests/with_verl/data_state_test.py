"""verl's state of the data of SFT for another number of ranks, by the loader that verl's trainer builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from torchdata.stateful_dataloader import StatefulDataLoader  # after the check

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl.checkpoints import deal_anew

ROWS, BATCH = 50, 8


def loaders(dp: int, workers: int) -> list[Any]:
    """The loader of each rank, as ``verl.trainer.sft_trainer`` builds it."""
    samplers = [DistributedSampler(range(ROWS), dp, rank, shuffle=True, drop_last=True) for rank in range(dp)]  # type: ignore[arg-type]
    return [
        StatefulDataLoader(
            range(ROWS), batch_size=BATCH // dp, sampler=sampler, num_workers=workers, drop_last=True, collate_fn=list
        )
        for sampler in samplers
    ]


def batches(every: list[Any], count: int | None = None) -> list[list[int]]:
    """The rows of all ranks, batch by batch."""
    iterators = [iter(each) for each in every]
    found: list[list[int]] = []
    while count is None or len(found) < count:
        parts = [next(each, None) for each in iterators]
        if None in parts:
            break
        found.append(sorted(row for part in parts for row in part))
    return found


def save(folder: Path, every: list[Any]) -> None:
    for rank, each in enumerate(every):
        torch.save(each.state_dict(), folder / f"data_{rank}.pt")


def resumed(folder: Path, dp: int, workers: int) -> list[list[int]]:
    every = loaders(dp, workers)
    for rank, each in enumerate(every):
        each.load_state_dict(torch.load(folder / f"data_{rank}.pt", weights_only=False))
    return batches(every)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_together_go_on_at_the_same_row(workers: int, tmp_path: Path) -> None:
    all_batches = batches(loaders(1, 0))
    every = loaders(2, workers)
    assert batches(every, 2) == all_batches[:2]
    save(tmp_path, every)
    for dp in (2, 1, 4, 8, 2):  # one after the other, in one folder
        deal_anew(tmp_path, 2, dp)
        assert resumed(tmp_path, dp, workers) == all_batches[2:]
    deal_anew(tmp_path / "none", 2, 4)


def test_what_cannot_be_dealt_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    every = loaders(2, 0)
    batches(every, 1)
    save(tmp_path, every)
    before = (tmp_path / "data_0.pt").read_bytes()
    with pytest.raises(OptionError, match=r"saved with 2 ranks of dp and this run has 3.*counts 8 rows"):
        deal_anew(tmp_path, 2, 3)
    assert (tmp_path / "data_0.pt").read_bytes() == before
    torch.save({"anything": 1}, tmp_path / "data_0.pt")
    with pytest.raises(OptionError, match="another sampler"):
        deal_anew(tmp_path, 2, 4)
    (tmp_path / "data_0.pt").write_bytes(b"broken")
    with pytest.raises(OptionError, match="cannot be read"):
        deal_anew(tmp_path, 2, 4)
    deal_anew(tmp_path, 2, 2)
