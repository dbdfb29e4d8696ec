"""Several jobs that save into one directory, some of them killed at random moments and replaced."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

import fsdp_runtime
from harness.processes import preloaded_context

#: Bytes of a shard; the model has several.
_SHARD = 600


def _model(value: float) -> nn.Module:
    """A model of which every parameter has one value, so that a mixture of two saves shows."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return _filled(model, value)


def _filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _adapted(value: float) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["0", "1", "2", "3"])
    return _filled(peft.get_peft_model(_model(value), config), value)  # type: ignore[arg-type]


def _save_state(directory: Path, value: float) -> Path:
    return fsdp_runtime.save_training_state(directory, _model(value), step=int(value) % 1000)


def _load_state(directory: Path) -> nn.Module:
    model = _model(-1)
    fsdp_runtime.load_training_state(directory, model)
    return model


def _save_weights(directory: Path, value: float) -> Path:
    fsdp_runtime.save_weights(_model(value), directory, max_shard_size=_SHARD)
    return directory


def _save_either(directory: Path, value: float) -> Path:
    fsdp_runtime.save_weights(_model(value), directory, max_shard_size=_SHARD if int(value) % 2 else 10**9)
    return directory


def _load_weights(directory: Path) -> nn.Module:
    model = _model(-1)
    while True:
        try:
            fsdp_runtime.load_weights(model, directory)
        except fsdp_runtime.WeightsError as error:
            if "load it again" not in str(error):  # another writer has replaced the checkpoint while it was read
                raise
        else:
            return model


def _save_adapter(directory: Path, value: float) -> Path:
    fsdp_runtime.save_adapter(_adapted(value), directory)
    return directory


def _load_adapter(directory: Path) -> nn.Module:
    model = _adapted(-1)
    fsdp_runtime.load_adapter(model, directory)
    return nn.ParameterList(parameter for name, parameter in model.named_parameters() if ".lora_" in name)


@dataclass(frozen=True)
class Kind:
    """How to save, and how to load: the directory of a save or the one that all save into."""

    save: Callable[[Path, float], Path]
    load: Callable[[Path], nn.Module]


KINDS = {
    "training states": Kind(_save_state, _load_state),
    "weights in shards": Kind(_save_weights, _load_weights),
    "weights in one file or in shards": Kind(_save_either, _load_weights),
    "adapters": Kind(_save_adapter, _load_adapter),
}


def _write(kind: str, directory: Path, number: int, journal: Path) -> None:
    """Save and load until killed, and note every save that returned and every error."""
    torch.set_num_threads(1)
    for count in range(1000):
        value = number * 1000 + count
        try:
            saved = KINDS[kind].save(directory, value)
            _note(journal, f"saved {value} {saved}")
            _value(KINDS[kind].load(directory))
        except Exception as error:
            _note(journal, f"error {number} {type(error).__name__}: {error}".replace("\n", " | "))


def _note(journal: Path, line: str) -> None:
    with journal.open("a") as file:
        file.write(line + "\n")


def _value(model: nn.Module) -> float:
    """The one value of all parameters."""
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    if len(values) != 1:
        raise RuntimeError(f"a mixture of saves: {sorted(values)}")
    return float(values.pop())


class Writers:
    """Processes that save into one directory.

    Args:
        kind: what they save.
        directory: that they save into.
        count: how many live at a time.
        seed: for the moments of the kills.
    """

    def __init__(self, kind: str, directory: Path, *, count: int, seed: int) -> None:
        self._kind, self._directory, self._count = kind, directory, count
        self._random = random.Random(seed)
        self._journals = directory.with_name(f"{directory.name}-journals")
        self._journals.mkdir()
        self._started = self.kills = 0

    def run(self, *, seconds: float, kill_every: float) -> None:
        """Let them save, and kill one now and then, from the first save that returned on."""
        writers = [self._start() for _ in range(self._count)]
        while not self.returned and all(writer.is_alive() for writer in writers):
            time.sleep(0.1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self._random.uniform(0, 2 * kill_every))
            struck = self._random.randrange(self._count)
            _kill(writers[struck])
            self.kills += 1
            writers[struck] = self._start()
        for writer in writers:
            _kill(writer)

    @property
    def returned(self) -> dict[float, Path]:
        """The saves that returned: where, by their value."""
        noted = (line.split(" ", 2) for line in self._lines() if line.startswith("saved "))
        return {float(value): Path(path) for _, value, path in noted}

    def problems(self) -> list[str]:
        """Say what is lost, mixed or left over, after one more save."""
        problems = [line for line in self._lines() if line.startswith("error ")]
        last = KINDS[self._kind].save(self._directory, 999)
        for value, path in {**self.returned, 999.0: last}.items():
            if path == self._directory and value != 999:  # the last one is in effect
                continue
            try:
                if (found := _value(KINDS[self._kind].load(path))) != value:
                    problems.append(f"{path} has {found}, saved was {value}")
            except Exception as error:
                problems.append(f"{path}: {error}")
            index = self._directory / "training_states.json"
            if path != self._directory and f'"{path.name}"' not in index.read_text():
                problems.append(f"{index} lacks {path.name}")
        problems += [f"left over: {path}" for path in self._directory.glob(".*")]
        if (index := self._directory / "model.safetensors.index.json").is_file():
            used = index.read_text()
            shards = self._directory.glob("model-*.safetensors")
            problems += [f"left over: {path}" for path in shards if path.name not in used]
        return problems

    def _start(self) -> BaseProcess:
        self._started += 1
        arguments = (self._kind, self._directory, self._started, self._journals / str(self._started))
        writer = preloaded_context().Process(target=_write, args=arguments, daemon=True)
        writer.start()
        return writer

    def _lines(self) -> list[str]:
        return [line for file in sorted(self._journals.iterdir()) for line in file.read_text().splitlines()]


def _kill(writer: BaseProcess) -> None:
    writer.kill()
    writer.join()


def campaign(directory: Path, *, seconds: float, seed: int) -> list[str]:
    """Let eight jobs save into one directory, for each kind; return the problems."""
    problems = []
    for kind in KINDS:
        writers = Writers(kind, directory / kind.replace(" ", "-"), count=8, seed=seed)
        writers.run(seconds=seconds, kill_every=0.5)
        found = writers.problems()
        problems += [f"{kind}: {problem}" for problem in found]
        sys.stdout.write(f"{kind}: {len(writers.returned)} saves, {writers.kills} kills, {len(found)} problems\n")
    return problems
