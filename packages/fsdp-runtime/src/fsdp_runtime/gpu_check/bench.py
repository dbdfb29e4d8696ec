"""``--bench``: log-probabilities, norms, attention and steps on one device beside torch and other installed packages.

Every call is timed forward, and forward and backward, as milliseconds and as a fraction of a ceiling of the same run:
the rate of a copy by the bytes that must move, or of a bfloat16 product of 8,192 cubed by its operations.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.dry_run.report.sections import markdown_table
from fsdp_runtime.gpu_check.bench_peers import (
    Contender,
    attention_contenders,
    exact_attention,
    head_contenders,
    logit_contenders,
    norm_contenders,
)
from fsdp_runtime.gpu_check.check_result import CheckResult
from fsdp_runtime.gpu_check.machine import machine, optional
from fsdp_runtime.gpu_check.step_costs import BENCH, TINY_BENCH, StepSetting
from fsdp_runtime.meters.step_meter import synchronize

#: Seconds after which no further contender is timed.
BUDGET = 300.0
#: The most seconds of one measurement, and its fewest and most repeats.
SECONDS, FEWEST, MOST = 0.4, 2, 10


@dataclass(frozen=True)
class Sizes:
    """``(tokens, columns)`` of logits, heads with their names, number and size of gradients, documents, and steps.

    Documents are ``(number, length)`` of one row, for attention of 16 heads of 128.
    """

    logits: Sequence[tuple[int, int]] = ((8192, 32_000), (8192, 151_936))
    heads: Sequence[tuple[str, int, int, int]] = (
        ("Llama-3-8B", 8192, 4096, 128_256),
        ("Qwen3-1.7B", 8192, 2048, 151_936),
        ("Gemma-2-2B", 8192, 2304, 256_000),
    )
    gradients: tuple[int, int] = (300, 7_158_278)  # 4 GiB of bfloat16
    documents: Sequence[tuple[int, int]] = ((16, 1024), (8, 4096), (64, 512))
    steps: Sequence[StepSetting] = BENCH
    copy: int = 2**32
    product: int = 8192


#: A CPU tries the logic.
SMALL = Sizes([(64, 500)], [("small", 64, 32, 300)], (20, 1000), [(3, 8)], TINY_BENCH, 2**16, 64)
HEADS, HEAD_SIZE = 16, 128


@dataclass(frozen=True)
class Row:
    """One contender of a section; a time is None where it was not measured, and ``note`` says why."""

    section: str
    what: str
    shape: str
    forward_ms: float | None = None
    both_ms: float | None = None
    forward_rate: float | None = None  # of the section's ceiling
    both_rate: float | None = None
    host_ms: float | None = None  # of both passes, until the last launch
    peak_mib: float | None = None  # above the inputs, of both passes
    error: float | None = None  # the largest difference from float64
    note: str = ""


@dataclass
class Bench:
    """The measurements of one device."""

    device: torch.device
    sizes: Sizes
    budget: float = BUDGET
    begin: float = field(default_factory=time.perf_counter)

    def run(self) -> list[Row]:
        """Measure every section, and return its rows."""
        copied, multiplied = self._copied(), self._multiplied()
        rows = [
            Row("Ceilings", "copy", f"{copied / 1e9:.0f} GB/s read and written"),
            Row("Ceilings", "bfloat16 product", f"{multiplied / 1e12:.1f} TFLOP/s"),
        ]
        sections = self._logits(copied), self._heads(multiplied), self._norms(copied), self._attention(multiplied)
        for section in (*sections, self._steps()):
            for row in section:
                rows.append(row)
                sys.stderr.write(f"  {row.section}: {row.what}, {row.shape}\n")
        return rows

    def _copied(self) -> float:
        """Return the bytes that a copy reads and writes in a second."""
        source = torch.empty(self.sizes.copy, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._timed(lambda: target.copy_(source))[0] * 1e3

    def _multiplied(self) -> float:
        size = self.sizes.product
        square = torch.randn(size, size, device=self.device).bfloat16()
        return 2 * size**3 / self._timed(lambda: square @ square)[0] * 1e3

    def _timed(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return the median milliseconds until a call is done, and until the host has launched it."""
        call()
        synchronize(self.device)
        done: list[float] = []
        launched: list[float] = []
        while len(done) < FEWEST or (len(done) < MOST and sum(done) < SECONDS):
            begin = time.perf_counter()
            kept = call()
            launched.append(time.perf_counter() - begin)
            synchronize(self.device)
            done.append(time.perf_counter() - begin)
            del kept
        return statistics.median(done) * 1e3, statistics.median(launched) * 1e3

    def _peak(self, call: Callable[[], Any]) -> float | None:
        if self.device.type != "cuda":
            return None
        synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def _contend(
        self, section: str, shape: str, contenders: Sequence[Contender], measure: Callable[[Contender], Row]
    ) -> Iterator[Row]:
        """Yield the row of each contender, or a row with the reason why it has no figures."""
        for contender in contenders:
            if time.perf_counter() - self.begin > self.budget:
                yield Row(section, contender.name, shape, note=f"not run: {self.budget:.0f} seconds are over")
                continue
            try:
                row = replace(measure(contender), section=section, shape=shape)
            except Exception as error:  # noqa: BLE001  # of a peer that does not run here
                row = Row(section, contender.name, shape, note=f"{type(error).__name__}: {str(error)[:120]}")
            yield row
            if self.device.type == "cuda":
                gc.collect()  # a model and its hooks refer to one another
                torch.cuda.empty_cache()

    def scored(self, contender: Contender, inputs: Sequence[Tensor], exact: Tensor, floors: tuple[float, float]) -> Row:
        """Return the row of a function of the inputs, with the least milliseconds of forward and of both passes.

        Its output is compared with the first values of ``exact``, unless it is a mean or has the entropy in it.
        """

        def forward() -> Any:
            with torch.no_grad():
                return contender.call(*inputs)

        def both() -> Any:
            output = contender.call(*inputs)
            return torch.autograd.grad(output.sum() if output.dim() else output, list(inputs))

        output, error = forward(), None
        if output.dim() == exact.dim() and not contender.name.endswith("with entropy"):
            error = float((output[: len(exact)].double() - exact).abs().max())
        del output
        (forward_ms, _), (both_ms, host_ms) = self._timed(forward), self._timed(both)
        rates = floors[0] / forward_ms, floors[1] / both_ms
        return Row("", contender.name, "", forward_ms, both_ms, *rates, host_ms, self._peak(both), error)

    def _logits(self, copied: float) -> Iterator[Row]:
        for tokens, columns in self.sizes.logits:
            logits = (3 * torch.randn(tokens, columns, device=self.device)).bfloat16().requires_grad_()
            targets = torch.randint(0, columns, (tokens,), device=self.device)
            with torch.no_grad():
                parts = zip(torch.split(logits, 256), torch.split(targets, 256), strict=True)
                exact = torch.cat([_exact(*part) for part in parts])
            read = logits.nbytes / copied * 1e3  # milliseconds to read the logits once
            measure = partial(self.scored, inputs=[logits], exact=exact, floors=(read, 4 * read))
            contenders = logit_contenders(targets, self.device)
            yield from self._contend("From logits", f"{tokens} x {columns}", contenders, measure)

    def _heads(self, multiplied: float) -> Iterator[Row]:
        for name, tokens, features, columns in self.sizes.heads:
            hidden = (torch.randn(tokens, features, device=self.device) / 2).bfloat16().requires_grad_()
            weight = torch.randn(columns, features, device=self.device).mul_(2 / features**0.5).bfloat16()
            targets = torch.randint(0, columns, (tokens,), device=self.device)
            some = slice(0, 256)
            with torch.no_grad():
                exact = _exact(hidden[some].float() @ weight.float().t(), targets[some])
            product = 2 * tokens * features * columns / multiplied * 1e3
            inputs = [hidden, weight.requires_grad_()]
            measure = partial(self.scored, inputs=inputs, exact=exact, floors=(product, 3 * product))
            contenders = head_contenders(targets, self.device)
            yield from self._contend("From hidden states", f"{name}, {tokens} tokens", contenders, measure)

    def _norms(self, copied: float) -> Iterator[Row]:
        number, elements = self.sizes.gradients
        for dtype in (torch.bfloat16, torch.float32):
            shape = f"{number} tensors, {str(dtype).removeprefix('torch.')}"
            size = elements * 2 // dtype.itemsize
            parameters = [torch.nn.Parameter(torch.empty(size, dtype=dtype, device=self.device)) for _ in range(number)]
            for parameter in parameters:
                parameter.grad = torch.randn(size, device=self.device).to(dtype)
            read = number * size * dtype.itemsize / copied * 1e3
            measure = partial(self._called, floor=read)
            yield from self._contend("Norm and clipping", shape, norm_contenders(parameters), measure)
            del parameters

    def _called(self, contender: Contender, floor: float) -> Row:
        done, launched = self._timed(contender.call)
        return Row("", contender.name, "", done, None, floor / done, None, launched)

    def _attention(self, multiplied: float) -> Iterator[Row]:
        for number, length in self.sizes.documents:
            shape = (1, HEADS, number * length, HEAD_SIZE)
            rows = [torch.randn(shape, device=self.device).bfloat16().requires_grad_() for _ in range(3)]
            product = 2 * number * length**2 * HEADS * HEAD_SIZE / multiplied * 1e3  # two, each with half of the pairs
            exact, floors = exact_attention(number, rows), (product, 3.5 * product)
            measure = partial(self.scored, inputs=rows, exact=exact, floors=floors)
            contenders = attention_contenders(number, length, self.device)
            yield from self._contend("Packed rows", f"{number} documents of {length}", contenders, measure)

    def _steps(self) -> Iterator[Row]:
        for setting in self.sizes.steps:
            calls: dict[str, Callable[..., Any]] = {
                "ours": setting.step_on,
                "transformers": partial(setting.step_on, plain=True),
            }
            contenders = [Contender(name, call) for name, call in calls.items()]
            measure = partial(self._stepped, tokens=math.prod(setting.tokens))
            yield from self._contend("Steps", setting.name, contenders, measure)

    def _stepped(self, contender: Contender, tokens: int) -> Row:
        step = contender.call(self.device)
        step()
        (done, launched), peak = self._timed(step), self._peak(step)
        if peak is not None:
            peak += torch.cuda.memory_allocated(self.device) / 2**20
        rate = f"{tokens / done:.1f}k tokens a second"
        return Row("", contender.name, "", None, done, None, None, launched, peak, note=rate)


def _exact(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0]


def bench(device: torch.device, output: Path) -> None:
    """Measure a device, and write a Markdown page to ``output`` and the same as JSON beside it."""
    if optional("rl_logprobs") is None:
        rows = [Row("From logits", "rl-logprobs", "", note="not installed")]
    else:
        rows = Bench(device, SMALL if device.type == "cpu" else Sizes()).run()
    facts = machine(device.type)
    output.write_text(page(rows, facts), encoding="utf-8")
    data = {"machine": {fact.what: fact.figure for fact in facts}, "rows": [asdict(row) for row in rows]}
    output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


_HEADER = ("what", "shape", "forward ms", "both ms", "of the ceiling", "host ms", "MiB", "error", "")


def page(rows: Sequence[Row], facts: Sequence[CheckResult]) -> str:
    """Return the Markdown page of some rows on a machine."""
    lines = ["# Times on this machine", ""]
    lines += [f"- {fact.what}: {fact.figure}" for fact in facts]
    for section in dict.fromkeys(row.section for row in rows):
        cells = [_cells(row) for row in rows if row.section == section]
        lines += ["", f"## {section}", "", *markdown_table([_HEADER, *cells], left=2)]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    rates = " / ".join(f"{rate:.2f}" for rate in (row.forward_rate, row.both_rate) if rate is not None)
    forward_ms, both_ms, host_ms = (
        "" if value is None else f"{value:.3g}" for value in (row.forward_ms, row.both_ms, row.host_ms)
    )
    peak = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
    error = "" if row.error is None else f"{row.error:.1e}"
    return [row.what, row.shape, forward_ms, both_ms, rates, host_ms, peak, error, row.note]
