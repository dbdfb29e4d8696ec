"""Bytes and seconds of saves, loads and streams of weights on big meshes, for docs/weight-traffic.md.

``python -m docs.generate.weight_traffic`` counts every row and rewrites the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs.generate.recipes import config_of

from fsdp_runtime.dry_run import estimate_weights
from fsdp_runtime.dry_run.report.format import format_bytes
from fsdp_runtime.dry_run.sweep_types import format_mesh

PAGE = Path(__file__).parents[1] / "weight-traffic.md"
DISK, NETWORK = "2GB/s", "25GB/s"
COUNTED = ("read", "written", "sent", "received", "gathered", "held")
INTRODUCTION = """# Weights on big meshes

Look up what a save, a load or a stream of three large models reads, sends and holds on a rank. The numbers are those of
`fsdp_runtime.dry_run.estimate_weights`, which counts the plans that the calls make; call it for a model and a mesh of
yours. Each is that of the rank with the most. Weights are in bfloat16 under the names of the checkpoint, eight ranks
are a host, and everything else is a default.

- *Read* and *written* are bytes of files, *sent* and *received* what ranks exchange. A load reads whole rows where a
  host needs only some of their columns, unless more than 256 KiB lie between them: a disk that reads 0.8 GB/s takes 0.2
  to 0.4 ms for another read. `readers="job"` reads each byte once for all hosts.
- *Gathered* are full tensors that every rank gets beyond its shards, as a stream yields them on each rank. A
  [weight sync](guides/weight-sync.md) sends shards instead.
- *Held* is the most besides the model.
- *Messages* are those that the rank sends and receives; of columns that many ranks have, few ranks write all rows, so
  that each message has 16 KiB where a tensor is large enough.
- *Seconds* are those of the files at 2 GB/s a host, and then of the network at 25 GB/s a rank. All hosts get their rate
  at once, of which one file system may have less for many. Nothing overlaps; latency and conversions take no time.

`python -m docs.generate.weight_traffic` writes this page, in some five minutes on one core.
"""


@dataclass(frozen=True)
class Row:
    """A model on a mesh, and keywords of ``estimate_weights``."""

    model: str
    mesh: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The ranks, the mesh and the keywords."""
        ranks = math.prod(size for axis, size in self.mesh.items() if axis != "ep")
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{ranks:,}: {format_mesh(self.mesh)}{options}"


ROWS = (
    Row("Llama-3.1-405B", {"tp": 8}),
    Row("Llama-3.1-405B", {"dp_shard": 8, "tp": 8}),
    Row("Llama-3.1-405B", {"dp_shard": 64}),
    Row("Llama-3.1-405B", {"dp_shard": 64, "tp": 8}),
    Row("Llama-3.1-405B", {"dp_replicate": 8, "dp_shard": 8, "tp": 8}),
    Row("Llama-3.1-405B", {"dp_shard": 64, "tp": 8}, {"writers": "one"}),
    Row("Llama-3.1-405B", {"dp_shard": 256, "tp": 8}),
    Row("Llama-3.1-405B", {"dp_shard": 512, "tp": 8}),
    Row("Llama-3.1-405B", {"dp_replicate": 8, "dp_shard": 64, "tp": 8}),
    Row("DeepSeek-V3", {"dp_shard": 8, "ep": 8}),
    Row("DeepSeek-V3", {"dp_shard": 64, "ep": 64}),
    Row("DeepSeek-V3", {"dp_shard": 64, "ep": 8}),
    Row("DeepSeek-V3", {"dp_shard": 512, "ep": 64}),
    Row("DeepSeek-V3", {"dp_replicate": 8, "dp_shard": 64, "ep": 64}),
    Row("DeepSeek-V3", {"dp_shard": 512, "ep": 64}, {"writers": "one"}),
    Row("DeepSeek-V3", {"dp_shard": 1024, "ep": 64}),
    Row("DeepSeek-V3", {"dp_shard": 2048, "ep": 64}),
    Row("DeepSeek-V3", {"dp_shard": 4096, "ep": 64}),
    Row("DeepSeek-V3", {"dp_replicate": 8, "dp_shard": 512, "ep": 64}),
    Row("Qwen3-235B-A22B", {"dp_shard": 8, "ep": 8}),
    Row("Qwen3-235B-A22B", {"dp_shard": 64, "ep": 8}),
    Row("Qwen3-235B-A22B", {"dp_replicate": 2, "dp_shard": 32, "ep": 8}),
    Row("Qwen3-235B-A22B", {"dp_shard": 512, "ep": 8}),
    Row("Qwen3-235B-A22B", {"dp_replicate": 4, "dp_shard": 128, "ep": 8}),
    Row("Qwen3-235B-A22B", {"dp_shard": 4096, "ep": 8}),
    Row("Qwen3-235B-A22B", {"dp_replicate": 32, "dp_shard": 128, "ep": 8}),
)


def lines(row: Row) -> Iterator[str]:
    """Yield the lines of a row: a save, a load and a stream."""
    for each in estimate_weights(config_of(row.model), row.mesh, **row.options):
        cells = [format_bytes(most) if (most := each.most(counted)) else "" for counted in COUNTED]
        cells.append(f"{most:,}" if (most := each.most("messages")) else "")
        seconds = each.seconds(disk=DISK, network=NETWORK)
        yield f"| {row.label} | {each.action} | {' | '.join(cells)} | {seconds:.1f} |"


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from INTRODUCTION.splitlines()
    for model in dict.fromkeys(row.model for row in ROWS):
        yield from ("", f"## {model}", "", f"| ranks, mesh | call | {' | '.join(COUNTED)} | messages | seconds |")
        yield "| --- | --- |" + " ---: |" * (len(COUNTED) + 2)
        for row in ROWS:
            if row.model == model:
                yield from lines(row)


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()) + "\n")
