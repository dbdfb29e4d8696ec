"""The faults, and what must be true after each: all ended in time, all named it, nothing lost, the same losses."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.disk import DAMAGE, small_disk
from faults.inject import STRUCK, Fault
from faults.job import SAVE_EVERY, Settings, losses
from faults.launch import Ended, launch

STEPS = 8
#: The step in which a fault strikes, by phase: states are saved in steps 1, 3 and 5, counted from 0.
MOMENTS = {"forward": 4, "backward": 4, "save": 5, "asynchronous save": 5, "stream": 5}
UNSTAGED = tuple(MOMENTS)
#: The phases of a step over pipeline stages; ``monitor_ranks`` sees one phase until the update.
SCHEDULED = ("warm-up", "steady", "backward", "reduce")
MOMENTS |= dict.fromkeys((*SCHEDULED, "update"), 4)
#: The state that there must be then.
DUE = {"forward": 4, "backward": 4, "save": 4, "asynchronous save": 4, "stream": 6}
DUE |= dict.fromkeys((*SCHEDULED, "update"), 4)


@dataclass(frozen=True)
class Row:
    """The outcome of one fault.

    Args:
        fault: in words.
        seconds: from the fault to the end of the last of the other ranks; where nothing strikes at one moment (a
            damaged file, a disk that fills up), from the first rank's end to the last one's.
        resumed: the step that training went on from.
        lost: steps that completed states held and training did not go on from.
        problems: whatever was not as it must be.
    """

    fault: str
    seconds: float
    resumed: int
    lost: int
    problems: tuple[str, ...]


class Campaign:
    """Runs jobs in folders of one directory, and compares them with one that nothing interrupts.

    Args:
        directory: an empty one.
        timeout: of ``monitor_ranks``, in seconds; every rank must end within twice that.
        seed: for the ranks that are struck.
        axes: of the job's mesh; ``dp_shard=2, tp=2`` by default.
        levers: of the job.
    """

    def __init__(
        self, directory: Path, *, timeout: float, seed: int = 0, axes: Mapping[str, int] | None = None, levers: str = ""
    ) -> None:
        self._directory, self._timeout, self.bound = directory, timeout, 2 * timeout
        self._axes, self._levers = axes or {"dp_shard": 2, "tp": 2}, levers
        self._random = random.Random(seed)
        self._whole = directory / "uninterrupted" / "states"
        ended = self._job(directory / "uninterrupted", self._whole)
        if any(rank.status != 0 for rank in ended):
            raise RuntimeError("the uninterrupted job failed:\n" + "\n".join(rank.stderr for rank in ended))
        self._expected = losses(directory / "uninterrupted")

    def run(self, chosen: str = "") -> Iterator[Row]:
        """Try every fault whose name a regular expression finds.

        Raises:
            PermissionError: a disk cannot be made small here; the other faults have been tried by then.
        """
        for name, attempt in self._attempts().items():
            if re.search(chosen, name):
                yield attempt(self._directory / re.sub(r"\W+", "-", name), name)

    def _attempts(self) -> dict[str, Callable[[Path, str], Row]]:
        if "pp" in self._axes:
            phases = (*SCHEDULED, "update", "save")
            kinds = {"kill -9": "kill", "exception": "raise"}
            return {f"{name} during {p}": self._injected(kind, p) for name, kind in kinds.items() for p in phases}
        return {
            **{f"kill -9 during {phase}": self._injected("kill", phase) for phase in UNSTAGED},
            "kill -9 of rank 0 during backward": self._injected("kill", "backward", 0),
            "kill -9 of rank 0 during save": self._injected("kill", "save", 0),
            "kill -9 of rank 0 during asynchronous save": self._injected("kill", "asynchronous save", 0),
            "SIGSTOP during backward": self._injected("stop", "backward"),
            "SIGSTOP of rank 0 during forward": self._injected("stop", "forward", 0),
            "exception during forward": self._injected("raise", "forward"),
            "SIGTERM to one rank during backward": self._injected("terminate", "backward"),
            "one rank's files may not grow, save": self._injected("full", "save"),
            "one rank's files may not grow, asynchronous save": self._injected("full", "asynchronous save"),
            **{f"{damage}, load": self._damaged(damage) for damage in DAMAGE},
            "full disk during save": self._full_disk,
        }

    def _injected(self, kind: str, phase: str, rank: int | None = None) -> Callable[[Path, str], Row]:
        """A fault of one rank, a random one by default."""
        chosen = self._random.randrange(math.prod(self._axes.values()))
        fault = Fault(kind, phase, chosen if rank is None else rank, MOMENTS[phase])

        def attempt(folder: Path, name: str) -> Row:
            states = folder / "states"
            ended = self._job(folder / "broken", states, fault=fault)
            others = [each for rank, each in enumerate(ended) if rank != fault.rank]
            seconds = max(each.at for each in others) - (folder / "broken" / STRUCK).stat().st_mtime
            label = f"{name} (rank {fault.rank})" if rank is None else name
            if kind == "terminate":  # the step is finished, its state saved, and all leave as if it were the last
                problems = _problems(ended, "received a stop signal", f"ranks [{fault.rank}]", good=True)
                return self._resumed(label, folder, states, fault.step + 1, seconds, problems)
            seen = "schedule" if "pp" in self._axes and phase in SCHEDULED else phase
            named = f"rank {fault.rank}: OSError" if kind == "full" else f"rank {fault.rank}, in phase {seen!r}"
            words = [named, f"phase {seen!r}"]
            if kind == "raise" and phase in ("warm-up", "steady", "backward") and "pp" in self._axes:
                words.append(f"on stage {fault.rank}")
            if phase == "asynchronous save":  # training is in any phase meanwhile, and notices in the next save
                words = [f"rank {fault.rank}: OSError" if kind == "full" else f"rank {fault.rank}"]
            problems = _problems(others, *words)
            return self._resumed(label, folder, states, DUE[phase], seconds, problems)

        return attempt

    def _damaged(self, damage: str) -> Callable[[Path, str], Row]:
        """A file of the newest state is no longer what was saved, and the one before it is."""
        file, harm = DAMAGE[damage]

        def attempt(folder: Path, name: str) -> Row:
            states = shutil.copytree(self._whole, folder / "states")
            newest = _state(states, STEPS)
            harm(newest / file)
            ended = self._job(folder / "broken", states, resume=states)
            problems = _problems(ended, file, "resume from an older state", "phase 'load'")
            shutil.rmtree(newest)
            return self._resumed(name, folder, states, STEPS - SAVE_EVERY, _spread(ended), problems)

        return attempt

    def _full_disk(self, folder: Path, name: str) -> Row:
        """Two states fit on the disk, and the third one does not."""
        one = sum(file.stat().st_size for file in _state(self._whole, SAVE_EVERY).iterdir())
        disk = folder / "disk"
        with small_disk(disk, int(2.7 * one)):
            ended = self._job(folder / "broken", disk)
            states = shutil.copytree(disk, folder / "states")
        problems = _problems(ended, "rank ", "No space left on device", "phase 'save'")
        return self._resumed(name, folder, states, 2 * SAVE_EVERY, _spread(ended), problems)

    def _resumed(self, name: str, folder: Path, states: Path, due: int, seconds: float, problems: Sequence[str]) -> Row:
        """Go on from the newest state, to the end."""
        ended = self._job(folder / "resumed", states, resume=states)
        found = [*problems, *(f"resuming failed: {each.stderr[-500:]}" for each in ended if each.status != 0)]
        before, after = losses(folder / "broken"), losses(folder / "resumed")
        begun = min((step for rank in after for step in rank), default=0)
        for rank, expected in enumerate(self._expected):
            wanted = {step: loss for step, loss in expected.items() if step >= begun}
            if after[rank] != wanted or not before[rank].items() <= expected.items():
                found.append(f"losses of rank {rank} differ from those of the uninterrupted run")
        if begun != due:
            found.append(f"resumed from step {begun} and not {due}")
        if seconds > self.bound:
            found.append(f"took {seconds:.1f} s, more than the bound of {self.bound:g} s")
        return Row(name, seconds, begun, due - begun, tuple(found))

    def _job(
        self, folder: Path, states: Path, *, resume: Path | None = None, fault: Fault | None = None
    ) -> list[Ended]:
        resumed = None if resume is None else str(resume)
        settings = Settings(str(folder), str(states), resumed, STEPS, self._timeout, fault, self._axes, self._levers)
        return launch(settings, after=folder / STRUCK if fault else None, bound=1.5 * self.bound)


def _problems(ended: Sequence[Ended], *words: str, good: bool = False) -> list[str]:
    """Ranks that did not end as they must, or did not say what they must."""
    missing = [
        f"nothing of {word!r} in {each.stderr[-500:]!r}" for each in ended for word in words if word not in each.stderr
    ]
    wrong = [each for each in ended if each.status is None or (each.status == 0) != good]
    return [*missing, *(f"a rank ended with {each.status}" for each in wrong)]


def _spread(ended: Sequence[Ended]) -> float:
    moments = [each.at for each in ended]
    return max(moments) - min(moments)


def _state(states: Path, step: int) -> Path:
    return states / f"step-{step:08d}"
