"""What breaks between a trainer and a vLLM server: both sides go on, and the next update succeeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_runtime.sync import WeightInfo, WeightSource
from vllm_gloo import EngineClient, EngineSync
from with_vllm.engine import Engine
from with_vllm.rows import bounded, compare, generate

#: Seconds of the group; every rank has to end within a few of them.
TIMEOUT_S = 10.0
BOUND_S = 6 * TIMEOUT_S


@dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Args:
        fault: what was done.
        seconds: until the trainer's last rank had its error; 0 where none was to come.
        message: the error, equal on every rank.
        problems: what should not have happened.
    """

    fault: str
    seconds: float
    message: str
    problems: list[str]

    def __str__(self) -> str:
        text = f"{self.fault:44} {self.seconds:6.1f} s  {'; '.join(self.problems) or 'survived'}"
        return f"{text}\n    {self.message}"


class _Wrong(WeightSource):
    """A source of which one tensor comes out changed, or of which the stream does something in the middle."""

    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor] | None, halfway: Callable[[], Any]) -> None:
        super().__init__(model)
        names = [weight.name for weight in super().weights]
        self._name, self._change, self._halfway = names[len(names) // 2], change or (lambda tensor: tensor), halfway

    @property
    def weights(self) -> list[WeightInfo]:
        found = []
        for weight in super().weights:
            if weight.name == self._name:
                tensor = self._change(torch.empty(weight.shape, dtype=weight.dtype))
                weight = WeightInfo(weight.name, tensor.dtype, tuple(tensor.shape))
            found.append(weight)
        return found

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().iter_full():
            if name == self._name:
                self._halfway()
                yield name, self._change(tensor)
            else:
                yield name, tensor


class Failures:
    """The faults, in order, with one model on two ranks; rank 0 has the engine.

    Args:
        model: sharded, with full logits.
        engine: a running server with two workers, on rank 0.
        versions: gives a new version each time.
        smaller: the same server with one worker, not started.
    """

    def __init__(self, model: nn.Module, engine: Engine | None, smaller: Engine | None, versions: Callable[[], str]):
        self._model, self._engine, self._smaller, self._versions = model, engine, smaller, versions
        self._sync = self._syncing(WeightSource(model))

    def run(self) -> Iterator[Outcome]:
        """Try every fault."""
        self._sync.update(self._versions())
        yield self._refused("a shape that the engine does not know", lambda tensor: tensor[:-1], "does not fit")
        yield self._refused(
            "a dtype without its scales", lambda tensor: tensor.to(torch.float8_e4m3fn), "float8_e4m3fn"
        )
        yield self._halfway("the trainer fails in the middle", _raise, "the trainer's own error")
        yield self._halfway("the engine's processes stop in the middle", self._stall, "")
        dies = "the engine dies in the middle, and one with another tp comes back"
        yield self._halfway(dies, self._die, "does not answer", dies=True)

    def _syncing(self, source: WeightSource) -> EngineSync:
        return EngineSync(source, self._client, timeout_s=TIMEOUT_S, bucket_bytes=2**14)

    @property
    def _client(self) -> EngineClient | None:
        return None if self._engine is None else self._engine.client

    def _refused(self, fault: str, change: Callable[[Tensor], Tensor], expected: str) -> Outcome:
        return self._try(fault, _Wrong(self._model, change, lambda: None), expected)

    def _halfway(self, fault: str, act: Callable[[], Any], expected: str, dies: bool = False) -> Outcome:
        halfway = act if dist.get_rank() == 0 else (lambda: None)
        return self._try(fault, _Wrong(self._model, None, halfway), expected, dies)

    def _try(self, fault: str, source: WeightSource, expected: str, dies: bool = False) -> Outcome:
        before = None if dies else generate(self._client)
        message, seconds = bounded(lambda: self._syncing(source).update(self._versions()))
        problems = self._agreed(message, seconds, expected)
        if self._engine is not None:
            self._engine.go_on()
            if dies and self._smaller is not None:
                self._engine = self._smaller.at(self._engine).start()
                self._engine.wait()
        dist.barrier()
        if before is not None and generate(self._client) != before:
            problems.append("the engine's answers changed")
        return Outcome(fault, seconds, message or "", problems + self._next())

    def _agreed(self, message: str | None, seconds: float, expected: str) -> list[str]:
        """What is wrong with the errors of the ranks."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (message, seconds))
        problems = []
        if len({text for text, _ in found}) > 1:
            problems.append(f"ranks disagree: {found}")
        if message is None or expected not in message:
            problems.append(f"no error with {expected!r}: {message}")
        if max(taken for _, taken in found) > BOUND_S:
            problems.append(f"it took {max(taken for _, taken in found):.0f} s")
        return problems

    def _next(self) -> list[str]:
        """What is wrong with the update after a fault."""
        message, _ = bounded(lambda: self._sync.update(self._versions()))
        if message is not None:
            return [f"the next update failed: {message}"]
        equal, difference = compare(self._model, self._client)
        return [] if equal and difference <= 1e-5 else [f"after the next update: {equal}, {difference:.1e}"]

    def _stall(self) -> None:
        if self._engine is not None:
            self._engine.stop()

    def _die(self) -> None:
        if self._engine is not None:
            self._engine.kill()


def _raise() -> None:
    raise RuntimeError("the trainer's own error")
