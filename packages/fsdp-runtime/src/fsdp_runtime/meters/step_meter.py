"""Time a step and its phases, and relate them to tokens, operations, memory and traffic."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import TorchDispatchMode
from fsdp_runtime.errors import OptionError
from fsdp_runtime.memory.host_copies import HELD_BYTES
from fsdp_runtime.mesh.collectives import axis_names, collective_call
from fsdp_runtime.mesh.spec import submesh
from fsdp_runtime.meters.model_flops import ModelFlops
from fsdp_runtime.values import PEAK_FLOPS


@dataclass(frozen=True)
class StepValues:
    """The measured values of one step."""

    seconds: float  # wall time on this rank
    phases: dict[str, float]  # seconds by phase
    tokens: int  # tokens of all ranks
    ranks: int  # ranks that shared the work
    flops: float  # operations that the model needs for the tokens of all ranks (:class:`ModelFlops`)
    peak_flops: float | None = None  # operations per second of one device; ``None`` if unknown
    # the largest allocated memory of this rank's device by phase; empty on a CPU
    peak_bytes: dict[str, int] = field(default_factory=dict)
    # the least bytes that this rank sent, by axis, in the last step with counted traffic
    bytes_sent: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0  # the largest number of bytes that activations of this rank took on the host
    float8_flops: float = 0.0  # the part of ``flops`` in float8

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: ``flops`` over the peak of all devices in that time; float8 has twice the peak."""
        if self.peak_flops is None:
            return None
        return (self.flops - self.float8_flops / 2) / (self.seconds * self.ranks * self.peak_flops)

    def to_dict(self) -> dict[str, float]:
        """Return flat numbers by name, for a logger."""
        values = {"seconds": self.seconds, "tokens_per_second": self.tokens_per_second}
        values["tokens_per_second_per_rank"] = self.tokens_per_second / self.ranks
        rank_seconds = self.seconds * self.ranks * 1e12
        values["tflops_per_second_per_rank"] = self.flops / rank_seconds
        if self.float8_flops:
            values["float8_tflops_per_second_per_rank"] = self.float8_flops / rank_seconds
        values |= {} if self.mfu is None else {"mfu": self.mfu}
        values |= {f"seconds/{name}": seconds for name, seconds in self.phases.items()}
        values |= {"host_bytes": float(self.host_bytes)} if self.host_bytes else {}
        values |= {f"peak_bytes/{name}": float(count) for name, count in self.peak_bytes.items()}
        return values | {f"bytes_sent/{axis}": float(count) for axis, count in self.bytes_sent.items()}


class StepMeter:
    """Measure training steps of a parallelized model.

    The end of each step and phase waits for the device, so that phases do not share time; leave ``phase`` out if the
    wait would cost overlap.  One small all-reduce over ``dp`` per step adds up tokens and operations.

    Args:
        model: the model, after ``parallelize`` or on one process.
        mesh: its mesh; ``None`` on one process.
        peak_flops: operations per second of one device for the dtype in use; by default the maker's published bfloat16
            rate, and no number for an unknown device.
        flops: the model's operations, if they should not be counted from its modules.

    Raises:
        ModelError: the operations cannot be counted; see :meth:`ModelFlops.of`.
        OptionError: ``peak_flops`` is not positive.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> model = AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=2, num_attention_heads=4, vocab_size=64))
        >>> meter = StepMeter(model, peak_flops=1e12)
        >>> tokens = torch.zeros(2, 8, dtype=torch.long)
        >>> with meter.step(lengths=[8, 8]):
        ...     with meter.phase("forward"):
        ...         loss = model(tokens, labels=tokens).loss
        ...     loss.backward()
        >>> meter.last.tokens, sorted(meter.last.to_dict())[:2]
        (16, ['mfu', 'seconds'])
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None = None,
        *,
        peak_flops: float | None = None,
        flops: ModelFlops | None = None,
    ) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise OptionError(f"peak_flops={peak_flops}: give the operations per second of one device, such as 989e12")
        self._flops = ModelFlops.of(model) if flops is None else flops
        self._mesh = mesh
        self._device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
        self._peak_flops = peak_flops or _published(self._device)
        self._phases: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._traffic: dict[str, int] = {}
        self._last: StepValues | None = None

    @property
    def last(self) -> StepValues:
        """The last finished step.

        Raises:
            OptionError: no step has finished.
        """
        if self._last is None:
            raise OptionError("no step has finished: read StepMeter.last after `with meter.step(...)`")
        return self._last

    @contextmanager
    def step(self, lengths: Collection[int], *, count_traffic: bool = False) -> Iterator[None]:
        """Measure one step; a step that raises leaves no values.

        Args:
            lengths: tokens of each sequence (in packed rows: each document) of this data-parallel rank, over all
                micro-batches. Equal on ranks of ``tp`` and ``cp``. A list may be filled while the step runs.
            count_traffic: count the bytes of every collective. The step is slower: count in one step of many.
        """
        self._phases, self._peaks = {}, {}
        counter = _CountTraffic(self._mesh) if count_traffic and self._mesh is not None else None
        synchronize(self._device)
        HELD_BYTES.peak = HELD_BYTES.now
        begin = time.perf_counter()
        with nullcontext() if counter is None else counter:
            yield
        synchronize(self._device)
        seconds = time.perf_counter() - begin
        if counter is not None:
            self._traffic = dict(counter.sent)
        counts = [sum(lengths), self._flops.step(lengths), self._flops.float8_per_token * sum(lengths)]
        total = torch.tensor(counts, dtype=torch.float64, device=self._device)
        if self._mesh is not None and (data := submesh(self._mesh, "dp")).size() > 1:
            dist.all_reduce(total, group=data.get_group())
        tokens, flops, float8_flops = total.tolist()
        self._last = StepValues(
            seconds=seconds,
            phases=self._phases,
            tokens=round(tokens),
            ranks=1 if self._mesh is None else self._mesh.size(),
            flops=flops,
            peak_flops=self._peak_flops,
            peak_bytes=self._peaks,
            bytes_sent=self._traffic,
            host_bytes=HELD_BYTES.peak,
            float8_flops=float8_flops,
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of a step; phases with one name are added up, and their largest peak counts."""
        counts = self._device.type == "cuda"
        synchronize(self._device)
        if counts:
            torch.cuda.reset_peak_memory_stats(self._device)
        begin = time.perf_counter()
        yield
        synchronize(self._device)
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - begin
        if counts:
            self._peaks[name] = max(self._peaks.get(name, 0), torch.cuda.max_memory_allocated(self._device))


class _CountTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the bytes that this rank sends by the axis of the mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()
        self._axes = axis_names(mesh)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the DTensor's local operators come here afterwards
        if (call := collective_call(func, args, kwargs or {})) is not None:
            self.sent[self._axes.get(call.ranks, f"{len(call.ranks)} ranks")] += call.bytes_sent
        return func(*args, **(kwargs or {}))


def _published(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def synchronize(device: torch.device) -> None:
    """Wait for a device; a CPU needs no wait."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
