"""Update real vLLM servers from sharded trainers, and break what can break; two ranks under torchrun.

torchrun --standalone --nproc-per-node 2 -m with_vllm.run --engine-python ENV/bin/python
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_runtime
from fsdp_runtime.sync import WeightExport, WeightSource
from vllm_gloo import EngineSync
from with_vllm import models
from with_vllm.engine import Engine
from with_vllm.failures import Failures
from with_vllm.rows import Row, bounded, compare, train, updates

MESHES = {"tp=2": {"tp": 2}, "dp_shard=2": {"dp_shard": 2}}
#: Families whose update would be wrong without packing anew, by the modules that need it.
STALE = {"Qwen3, tied": "lm_head", "Gemma 3": "lm_head", "Qwen3-MoE": "experts", "gpt-oss": "experts"}
#: The engine's workers for each family where not all sizes are tried.  The faults need two workers.
WORKERS = {"Llama": 2, "Gemma 3": 1, "Qwen3-MoE": 2, "gpt-oss": 1, "Qwen3, tied": 2}
FAULTS = ("Qwen3, tied", 2)


class Session:
    """Everything that is tried; every rank runs it, and rank 0 has the servers.

    Args:
        python: the interpreter of the engine's environment.
        folder: for checkpoints and logs.
        only: a regular expression for ``FAMILY tp=N``; empty for one engine size of each family.
    """

    def __init__(self, python: str, folder: Path, only: str) -> None:
        self._python, self._folder, self._only = python, folder, only
        self._count = itertools.count(1)
        self._is_first = dist.get_rank() == 0
        self.rows: list[Row] = []
        self.notes: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def run(self, failures: bool) -> None:
        """The families on their engines, the next server starting meanwhile; the faults on one of them."""
        pairs = WORKERS.items() if not self._only else itertools.product(WORKERS, (1, 2))
        wanted = [(family, tp) for family, tp in pairs if re.search(self._only, f"{family} tp={tp}")]
        self._say(Row.HEAD)
        for (family, tp), engine in zip(wanted, self._servers(wanted), strict=True):
            self._family(family, tp, engine)
            if failures and (family, tp) == FAULTS:
                self._failures(family, engine)

    def _servers(self, wanted: list[tuple[str, int]]) -> Iterator[Engine | None]:
        """The servers in turn, each started while the one before is in use."""
        following = self._start(*wanted[0]) if wanted else None
        for index in range(len(wanted)):
            current, following = following, None
            try:
                if current is not None:
                    current.wait()
                    if index + 1 < len(wanted):
                        following = self._start(*wanted[index + 1])
                dist.barrier()
                yield current
            finally:
                if current is not None:
                    current.kill()

    def _start(self, family: str, tp: int) -> Engine | None:
        return self._server(family, tp).start() if self._is_first else None

    def _server(self, family: str, tp: int) -> Engine:
        name = re.sub(r"\W+", "-", f"{family}-{tp}")
        checkpoint = models.write(family, self._folder / name)
        extension = ("--worker-extension-cls", "with_vllm.worker_extension.Questions")
        return Engine(self._python, checkpoint, tp, self._folder / f"{name}.log", *extension)

    def _family(self, family: str, tp: int, engine: Engine | None) -> None:
        client = None if engine is None else engine.client
        for mesh, sizes in MESHES.items():
            try:
                model = self._model(family, sizes)
                optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
                sync = EngineSync(WeightSource(model), client)
                rows = updates(model, optimizer, sync, client, (family, mesh, f"tp={tp}"), self._version)
            except Exception as error:
                self._problem(f"{family}, {mesh}, engine tp={tp}: {type(error).__name__}: {error}")
                continue
            for row in rows:
                self.rows.append(row)
                self._say(str(row))
                for problem in row.problems:
                    self._problem(f"{family}, {mesh}, engine tp={tp}, update {row.update}: {problem}")
        if engine is not None:
            self._layouts(family, tp, model, engine)
        self._stale(family, model, optimizer, sync, engine)

    def _model(self, family: str, sizes: dict[str, int]) -> nn.Module:
        mesh = fsdp_runtime.MeshSpec(**sizes).build(device_type="cpu")
        return fsdp_runtime.parallelize(models.build(family), mesh, logits="full")

    def _layouts(self, family: str, tp: int, model: nn.Module, engine: Engine) -> None:
        """Compare ``engine_layout`` with what vLLM's own loaders store."""
        shapes = {weight.name: list(weight.shape) for weight in WeightExport().describe(model)}
        results: list[list[str]] = []
        message, _ = bounded(lambda: results.extend(engine.ask("compare_layout", json.dumps(shapes))))
        if message is not None:
            self._problem(f"{family}, engine tp={tp}: layouts not compared: {message}")
        for worker, (*different, count) in enumerate(results):
            self._say(f"    engine_layout, tp={tp}, worker {worker}: {count} as vLLM's loaders store them")
            self.notes.append({"layout": family, "tp": tp, "worker": worker, "compared": count, "problems": different})
            for problem in different:
                self._problem(f"{family}, engine tp={tp}, worker {worker}: layout: {problem}")

    def _stale(
        self, family: str, model: nn.Module, optimizer: torch.optim.Optimizer, sync: EngineSync, engine: Engine | None
    ) -> None:
        """State the CPU backend's two defects: without packing anew the engine's answers are wrong, with it right."""
        client, repacked = None, None
        if engine is not None:
            client = engine.client
            engine.ask("repack", "off")
        train(model, optimizer, seed=3)
        sync.update(self._version())
        equal, difference = compare(model, client)
        if engine is not None:
            engine.ask("repack", "on")
        sync.update(self._version())
        cured, remains = compare(model, client)
        if engine is not None:
            repacked = engine.ask("repacked")[0]
        expected = family in STALE
        self._say(
            f"    without packing anew: {difference:.1e}, {'equal' if equal else 'DIFFERENT'}; with: {remains:.1e}; "
            f"packed: {repacked}"
        )
        self.notes.append({"stale": family, "without": difference, "with": remains, "modules": repacked})
        if expected is (difference <= 1e-5):
            self._problem(f"{family}: without packing anew the difference is {difference:.1e}: is the defect cured?")
        if not cured or remains > 1e-5:
            self._problem(f"{family}: with packing anew the difference is {remains:.1e}")
        if self._is_first and bool(repacked) is not expected:
            self._problem(f"{family}: packed anew are {repacked}")

    def _failures(self, family: str, engine: Engine | None) -> None:
        model = self._model(family, MESHES["tp=2"])
        smaller = self._server(family, 1) if self._is_first else None
        try:
            for outcome in Failures(model, engine, smaller, self._version).run():
                self._say(str(outcome))
                self.notes.append(asdict(outcome))
                for problem in outcome.problems:
                    self._problem(f"{outcome.fault}: {problem}")
        finally:
            if smaller is not None:
                smaller.kill()

    def _version(self) -> str:
        return f"v{next(self._count)}"

    def _say(self, text: str) -> None:
        if self._is_first:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _problem(self, text: str) -> None:
        self._say(f"PROBLEM: {text}")
        self.problems.append(text)


def main() -> int:
    """Run the session; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(prog="with_vllm.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--engine-python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--only", default="", help="a regular expression for 'FAMILY tp=N'; '.' for all")
    parser.add_argument("--failures", action=argparse.BooleanOptionalAction, default=True, help="try the faults, too")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--server-logs", type=Path, help="folder for the servers' logs; else a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="with-vllm-") as temporary:
        folder = options.server_logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        session = Session(options.engine_python, folder, options.only)
        session.run(options.failures)
    if dist.get_rank() == 0:
        if options.json:
            rows = [{**asdict(row), "report": asdict(row.report)} for row in session.rows]
            options.json.write_text(json.dumps({"rows": rows, "notes": session.notes}, indent=1) + "\n")
        seconds = time.monotonic() - start
        sys.stdout.write(f"{len(session.rows)} updates, {len(session.problems)} problems, {seconds:.0f} s\n")
    dist.destroy_process_group()
    return int(bool(session.problems))


if __name__ == "__main__":
    sys.exit(main())
