"""Contenders that take turns in one run on four gloo ranks, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def take_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run every step once a round; return the medians over rounds.

    Returns:
        By contender the seconds of the slowest rank on the clock and of the mean rank's processor.
    """
    turns: dict[str, list[list[float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            step()
            slowest = torch.tensor(time.perf_counter() - clock)
            busy = torch.tensor(time.process_time() - processor)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(busy)
            turns[name].append([slowest.item(), busy.item() / dist.get_world_size()])
    return {name: [statistics.median(each) for each in zip(*seconds, strict=True)] for name, seconds in turns.items()}
