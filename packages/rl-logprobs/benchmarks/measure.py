"""Ranks, clocks and counters for the benchmarks: contenders take turns, bytes and collectives are counted."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

#: glibc keeps what it was given, as a caching GPU allocator does; page faults would flatter the lean contender.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}

Step = Callable[[], Any]


def command_line(purpose: str | None, rounds: int, vocab: Sequence[int] = ()) -> argparse.Namespace:
    """Read the command line of a benchmark: ``dtype`` (names turned into dtypes), ``rounds`` and ``vocab``."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=rounds)
    if vocab:
        parser.add_argument("--vocab", type=int, nargs="*", default=list(vocab))
    found = parser.parse_args()
    found.dtype = [getattr(torch, name) for name in found.dtype]
    return found


def run_ranks(world_size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function(*arguments)`` on gloo ranks of one thread each; only rank 0 should print."""
    os.environ.update(KEEP_MEMORY, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(world_size, os.path.join(folder, "store"), function, arguments), nprocs=world_size)


def _rank(rank: int, world_size: int, store: str, function: Callable[..., None], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    function(*arguments)
    dist.destroy_process_group()


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made under this mode that are alive at once: the peak of what a step adds."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def ignore(self, *tensors: torch.Tensor) -> LiveBytes:
        """Leave out tensors that the caller owned before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = (StorageWeakRef(storage), 0)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._alive.get(storage._cdata)
                if known is None or known[0].expired():
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@dataclass(frozen=True)
class Result:
    """Seconds of each turn, on the clock and of this rank's processor, peak extra bytes and collectives.

    On a machine with other work the clock says little; a processor's time also counts what the ranks do not wait for.
    """

    turns: tuple[float, ...]
    cpu_turns: tuple[float, ...]
    peak_bytes: int
    collectives: int


def take_turns(
    steps: Mapping[str, Step],
    owned: Callable[[], Sequence[torch.Tensor]],
    rounds: int,
    restore: Callable[[], None] = lambda: None,
) -> dict[str, Result]:
    """Time the contenders round by round, so that whatever else the machine does affects all of them.

    ``restore`` undoes, outside the clock, what a contender did to its inputs.
    """
    peaks, collectives = {}, {}
    for name, step in steps.items():
        _progress(f"counting: {name}")
        restore()
        with CommDebugMode() as counter:
            step()
        collectives[name] = counter.get_total_counts()
        restore()
        with LiveBytes().ignore(*owned()) as live:
            kept = step()
        peaks[name] = live.peak
        del kept
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            _progress(f"round {turn + 1} of {rounds}: {name}")
            restore()
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            kept = step()
            turns[name].append((time.perf_counter() - start, time.process_time() - cpu))
            del kept
    return {name: Result(*zip(*times, strict=True), peaks[name], collectives[name]) for name, times in turns.items()}


def _progress(what: str) -> None:
    """Say on a terminal what runs at present: a contender may take a minute."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        print(f"\r{what:70}", end="\r", file=sys.stderr, flush=True)


def ratio(own: Sequence[float], peer: Sequence[float]) -> float:
    """Median over the rounds of our time divided by the peer's in the same round."""
    return statistics.median(time / other for time, other in zip(own, peer, strict=True))


def table(title: str, results: Mapping[str, Result], unit_bytes: int, unit_name: str) -> None:
    """Print one line a contender; ratios are against the fastest peer (those that are not called rl_logprobs)."""
    if dist.get_rank():
        return
    peers = [name for name in results if not name.startswith("rl_logprobs")]
    best = results[min(peers or results, key=lambda name: statistics.median(results[name].cpu_turns))]
    print(f"\n{title}")
    print(f"  {'':34} {'ms':>8} {'ratio':>6} {'CPU':>6}  {'extra peak, MiB':>16} {'of ' + unit_name:>12}  collectives")
    for name, result in results.items():
        print(
            f"  {name:34} {statistics.median(result.turns) * 1e3:8.1f} {ratio(result.turns, best.turns):6.2f} "
            f"{ratio(result.cpu_turns, best.cpu_turns):6.2f}  "
            f"{result.peak_bytes / 2**20:16.1f} {result.peak_bytes / unit_bytes:12.1%}  {result.collectives:11d}"
        )
