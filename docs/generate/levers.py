"""Bytes of models with and without each lever of memory, for the table of docs/guides/fitting.md.

``python docs/generate/levers.py --run`` runs the dry runs that docs/levers.json lacks and keeps each there; without
``--run`` the table of the page is only rewritten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from recipes import config_of

from fsdp_runtime.dry_run import estimate
from fsdp_runtime.dry_run.build_model import WithAdapters
from fsdp_runtime.steps import ActivationCheckpointing, Quantized

DOCS = Path(__file__).parents[1]
KEPT = DOCS / "levers.json"
PAGE = DOCS / "guides/fitting.md"
HEADING, AFTER = "| model, mesh, tokens |", "\n\n"
MODELS: Mapping[str, Mapping[str, int]] = {
    "Qwen3-8B": {"dp_shard": 2},
    "Qwen3-30B-A3B": {"dp_shard": 8, "ep": 8},
    "gpt-oss-20b": {"dp_shard": 4, "ep": 4},
}
LENGTHS = (8192, 32_768, 131_072)
ROWS = [*product(MODELS, LENGTHS)]
_BLOCKS = {"activation_checkpointing": "block", "optimizer": "adamw_fused"}
_INPUTS = {**_BLOCKS, "activation_checkpointing": ActivationCheckpointing("block", offload=True)}
#: Keywords of ``estimate`` by column; columns of LoRA have adapters of rank 16.
LEVERS: Mapping[str, Mapping[str, Any]] = {
    '`"block"`': _BLOCKS,
    "inputs": _INPUTS,
    "8 bits": {**_INPUTS, "optimizer": "adamw_8bit"},
    "AdamW": {**_INPUTS, "optimizer": "adamw_cpu_offload"},
    "LoRA": _INPUTS,
    "LoRA, nf4": {**_INPUTS, "steps": (Quantized("nf4"),)},
}
_GIB = 2**30


def measured(model: str, tokens: int, lever: str) -> dict[str, int]:
    """Return the peak of the device, the bytes on the host and the bytes copied per step, of one rank."""
    config = config_of(model)
    source = WithAdapters(config) if "LoRA" in lever else config
    memory = estimate(source, MODELS[model], seq_len=tokens, logprobs="linear", **LEVERS[lever]).memory
    state = memory.host.optimizer_state
    # Activations leave and return; gradients leave, and as many bytes of parameters return.
    copied = 2 * memory.host.activations + (2 * memory.resident.parameters if state else 0)
    return {"peak": memory.peak.total, "activations": memory.host.activations, "state": state, "copied": copied}


def table(kept: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield f"{HEADING} {' | '.join(LEVERS)} | on the host | copied per step |"
    yield f"|---|{'---:|' * (len(LEVERS) + 2)}"
    for model, tokens in ROWS:
        cells = {lever: kept.get(key(model, tokens, lever)) for lever in LEVERS}
        if not all(cells.values()):
            continue
        mesh = ", ".join(f"`{axis}={size}`" for axis, size in MODELS[model].items())
        name = f"{model}, {mesh}, {tokens:,}" if tokens == LENGTHS[0] else f"{tokens:,}"
        peaks = [f"{cell['peak'] / _GIB:.1f}" for cell in cells.values() if cell]
        host = cells["AdamW"] or {}
        on_host = f"{host['activations'] / _GIB:.1f} + {host['state'] / _GIB:.1f}"
        yield f"| {name} | {' | '.join(peaks)} | {on_host} | {host['copied'] / _GIB:.0f} |"


def key(model: str, tokens: int, lever: str) -> str:
    """Return the name of a dry run."""
    return f"{model}, {tokens}, {lever}"


def rewritten(page: str, kept: Mapping[str, Mapping[str, int]]) -> str:
    """Return the page with a new table."""
    before, _, rest = page.partition(HEADING)
    _, _, after = rest.partition(AFTER)
    return f"{before}{chr(10).join(table(kept))}{AFTER}{after}"


def run(kept: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Run each dry run that is missing."""
    for (model, tokens), lever in product(sorted(ROWS, key=lambda row: row[1]), LEVERS):
        if key(model, tokens, lever) not in kept:
            kept[key(model, tokens, lever)] = measured(model, tokens, lever)
            keep(kept)


def main() -> None:
    """Run the script."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if "--run" in sys.argv:
        run(kept, lambda results: KEPT.write_text(json.dumps(results, indent=1) + "\n") and None)
    PAGE.write_text(rewritten(PAGE.read_text(), kept))


if __name__ == "__main__":
    main()
