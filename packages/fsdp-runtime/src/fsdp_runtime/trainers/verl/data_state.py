"""Convert verl's SFT data state, one file per rank of dp, to another number of ranks.

verl's sampler deals one permutation: rank r of n reads its rows r, r + n, and so on.  After as many global batches all
ranks together have read the same rows for every n; only the number of rows per rank differs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime.errors import OptionError

_COUNT = "samples_yielded"  # of torchdata's iterator of batches
_DEALT_TO = "fsdp_runtime_dp"  # of a file that was rewritten; StatefulDataLoader reads its own keys only


def deal_anew(folder: Path, saved: int, dp: int) -> None:
    """Rewrite the files of a checkpoint for ``dp`` ranks; nothing if they fit or are missing.  One process."""
    first = folder / "data_0.pt"
    if not first.is_file():
        return
    try:
        state = torch.load(first, weights_only=True)
    except Exception as error:
        if saved == dp:
            return  # verl reads it as it is
        raise _refused(folder, saved, dp, f"cannot be read ({error})") from error
    saved = state.get(_DEALT_TO, saved) if isinstance(state, dict) else saved
    if saved == dp:
        return
    holders = list(_holders(state))
    if not holders or any(len(holder) > 1 for holder in holders):  # a sampler's own state counts too
        raise _refused(folder, saved, dp, "has a state of another sampler than verl's")
    for holder in holders:
        rows = holder[_COUNT] * saved
        if rows % dp:
            raise _refused(folder, saved, dp, f"counts {rows} rows, which do not divide")
        holder[_COUNT] = rows // dp
    state[_DEALT_TO] = dp
    for rank in reversed(range(dp)):  # the first file comes last: it shows that all files are written
        written = folder / f".data_{rank}.pt"
        torch.save(state, written)
        os.replace(written, folder / f"data_{rank}.pt")


def _holders(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the dicts that count samples; their place depends on the number of workers."""
    if isinstance(state, dict):
        if _COUNT in state:
            yield state
        for value in state.values():
            yield from _holders(value)


def _refused(folder: Path, saved: int, dp: int, why: str) -> OptionError:
    return OptionError(
        f"{folder} was saved with {saved} ranks of dp and this run has {dp}: verl's data_0.pt {why}, so that its loop "
        f"would end early or read samples twice. Resume on a mesh with dp={saved} (tp, cp and ep may change), or move "
        "data_*.pt away, which restarts the data"
    )
