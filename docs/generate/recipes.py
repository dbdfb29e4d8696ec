"""Recipes of the models that people train, for the pages in docs/recipes.

``python docs/generate/recipes.py MODEL ...`` runs the dry runs that docs/recipes.json lacks of these models, keeps each
there as soon as it is done, and rewrites the pages; without names it only rewrites the pages.  ``--config MODEL``
prints a model's config.json, from the sizes in model_sizes.json, for ``fsdp-runtime recipe``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fsdp_runtime.dry_run.build_model import auto_class
from fsdp_runtime.dry_run.recipe import program, recipes
from fsdp_runtime.dry_run.report.format import format_bytes, format_seconds
from fsdp_runtime.dry_run.sweep_types import Candidate, format_mesh
from fsdp_runtime.dry_run.types import bytes_sent_by_axis
from fsdp_runtime.mesh.spec import MeshSpec

DOCS = Path(__file__).parents[1]
SIZES = Path(__file__).with_name("model_sizes.json")
FOUND = DOCS / "recipes.json"
PAGES = DOCS / "recipes"
LENGTHS = (8192, 32768, 131072)
GPUS = (1, 8, 16, 64)
#: GiB of an H100 of 80 GB and of an H200 of 141 GB.
MEMORIES = (79, 139)
TRAININGS = ("full", "lora")
#: Bytes of state that no mesh avoids, for each parameter.
_STATE = {"full": 12, "lora": 2}

FAMILIES: Mapping[str, Sequence[str]] = {
    "Qwen3": (
        "Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B",
        "Qwen3-VL-8B", "Qwen3-VL-30B-A3B",
    ),
    "Qwen3.5": ("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B"),
    "Llama": ("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B", "Llama-4-Scout"),
    "gpt-oss": ("gpt-oss-20b", "gpt-oss-120b"),
    "DeepSeek and Kimi": ("DeepSeek-V3", "Kimi-K2"),
    "GLM": ("GLM-4.7-Flash", "GLM-4.5-Air", "GLM-4.6"),
    "Gemma": ("Gemma-3-12B", "Gemma-3-27B", "Gemma-4-31B", "Gemma-4-26B-A4B"),
    "Mistral": ("Mistral-Small-24B", "Mistral-Large-123B"),
    "Nemotron": ("Nemotron-3-Nano-30B-A3B",),
    "MiniMax": ("MiniMax-M2",),
}  # fmt: skip


def config_of(name: str) -> Any:
    """Return a model's config, of its published sizes."""
    import transformers

    sizes = json.loads(SIZES.read_text())[name]
    return getattr(transformers, sizes["config"])(**sizes["fields"])


def parameters_of(config: Any) -> int:
    """Return the number of parameters of a config's model."""
    import torch

    from fsdp_runtime.dry_run.build_model import build_model

    return sum(each.numel() for each in build_model(config, torch.bfloat16).parameters())


def run(name: str) -> None:
    """Run what is missing of a model: for each training, length and memory the fewest GPUs and their mesh."""
    config = config_of(name)
    parameters = parameters_of(config)
    for training, length in product(TRAININGS, LENGTHS):
        found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
        rows = found.setdefault(name, {"parameters": parameters, "rows": []})["rows"]
        if not any((row["training"], row["tokens"]) == (training, length) for row in rows):
            rows += fewest(config, training, length, parameters)
            FOUND.write_text(json.dumps(found, indent=1) + "\n")


def fewest(
    config: Any, training: str, length: int, parameters: int, gpus: Sequence[int] = GPUS
) -> list[dict[str, Any]]:
    """Return for each memory the row of the smallest number of GPUs that fits, by dry runs of those that may."""
    rows: list[dict[str, Any]] = []
    for memory in sorted(MEMORIES, reverse=True):
        row = {"training": training, "tokens": length, "memory": memory}
        larger = rows[0] if rows else None
        if larger and (larger["gpus"] is None or larger["takes"] <= memory * 2**30):
            rows.insert(0, larger | row)  # the search is the same one
            continue
        least = larger["gpus"] if larger else 1
        counts = [count for count in gpus if count >= least]
        rows.insert(0, _row(row, config, parameters, counts))
    return rows


def _row(row: dict[str, Any], config: Any, parameters: int, gpus: Sequence[int]) -> dict[str, Any]:
    row = row | {"gpus": None, "refused": []}
    training, length, memory = row["training"], row["tokens"], row["memory"]
    for count in gpus:
        if parameters * _STATE[training] / count / 2**30 > memory:
            continue
        options: dict[str, Any] = {"lengths": (length,), "trainings": (training,), "workers": 0}
        (recipe,) = recipes(config, count, device_memory=f"{memory}GiB", **options)
        row["refused"] += [f"{each.label}: {each.error}" for each in recipe.found.candidates if each.error]
        print(training, length, memory, count, [each.label for each in recipe.found.candidates], flush=True)
        if (best := recipe.found.best) is not None:
            return row | _numbers(best) | {"gpus": count}
    return row


def _numbers(best: Candidate) -> dict[str, Any]:
    estimate = best.estimate
    if estimate is None:
        raise ValueError(f"{best.label} has no estimate")
    return {
        "mesh": best.axes,
        "sequence_parallel": best.sequence_parallel,
        "takes": estimate.memory.device,
        "seconds": best.seconds,
        "sent": {axis: size for axis, size in bytes_sent_by_axis(estimate.traffic).items() if size},
    }


def families(found: Mapping[str, Any]) -> list[str]:
    """Return the families of which a model was run."""
    return [family for family, names in FAMILIES.items() if any(name in found for name in names)]


def path_of(family: str) -> Path:
    """Return the file of a family's page."""
    return PAGES / f"{family.lower().replace(' ', '-')}.md"


def page(family: str, found: Mapping[str, Any]) -> str:
    """Return the page of a family."""
    lines = [f"# {family}", "", *_INTRODUCTION]
    for name in FAMILIES[family]:
        lines += ["", f"## {name}", ""]
        if name not in found:
            lines.append("Not run yet.")
            continue
        lines += [f"{found[name]['parameters'] / 1e9:.1f} billion parameters.", "", *_table(found[name]["rows"])]
        lines += _refused(found[name]["rows"])
        lines += _call(name, found[name]["rows"])
    return "\n".join(lines) + "\n"


_INTRODUCTION = (
    "The fewest of 1, 8, 16 and 64 GPUs on which one sequence a data-parallel rank fits, by",
    "[dry runs](../guides/dry-run.md): the least divided mesh is tried first. A GPU of 79 GiB is an H100 of 80 GB,",
    "a GPU of 139 GiB an H200. *Device memory* is the allocator's reserved memory, a context and NCCL's buffers. Full",
    "training has float32 shards and moments, LoRA (rank 16) bfloat16 ones; blocks recompute, the loss holds no",
    "logits, AdamW is fused.",
    "Time is the expected one on H100, without launches. Mixtures are tried with `ep=8` first. Text only: towers",
    "get no images. More GPUs make `dp_shard` larger.",
)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| training | tokens | GPU | GPUs, mesh | device memory | time / 1M tokens | sent per step by axis |"
    yield "| --- | ---: | --- | --- | ---: | ---: | --- |"
    devices: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        devices.setdefault((f"{row['training']} | {row['tokens']:,}", _cells(row)), []).append(str(row["memory"]))
    for (training, cells), names in devices.items():
        yield f"| {training} | {' and '.join(names)} GiB | {cells} |"


def _cells(row: Mapping[str, Any]) -> str:
    if row["gpus"] is None:
        return "none of up to 64 | - | - | -"
    mesh = format_mesh(row["mesh"]) + (", SP" if row["sequence_parallel"] else "")
    sent = ", ".join(f"{axis} {format_bytes(size)}" for axis, size in row["sent"].items() if size >= 1024) or "-"
    seconds = "-" if row["seconds"] is None else format_seconds(row["seconds"])
    return f"{row['gpus']}: {mesh} | {format_bytes(row['takes'])} | {seconds} | {sent}"


def _refused(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    refused = list(dict.fromkeys(each for row in rows for each in row["refused"]))
    if refused:
        yield from ("", "Refused:", "")
        yield from (f"- {each}" for each in refused)


def _call(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    first = next((row for row in rows if row["gpus"]), None)
    if first is None:
        return
    mesh = MeshSpec(**first["mesh"])
    sp = first["sequence_parallel"]
    candidate = Candidate(mesh=mesh, sequence_parallel=sp, activation_checkpointing="block")
    yield from ("", "The program of the first row, and the command that compares its meshes:", "", "```py")
    yield from program(first["training"], candidate, auto_class=auto_class(config_of(name)))
    yield from ("```", "", "```bash", f"python docs/generate/recipes.py --config {name} > config.json")
    yield f"fsdp-runtime recipe config.json --gpus {first['gpus']} --device-memory {first['memory']}GiB --every"
    yield "```"


def main() -> int:
    """Run models and rewrite pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--config", metavar="MODEL", help="print this model's config.json")
    options = parser.parse_args()
    if options.config:
        print(config_of(options.config).to_json_string(use_diff=False))
        return 0
    for name in options.names:
        run(name)
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    PAGES.mkdir(exist_ok=True)
    for family in families(found):
        path_of(family).write_text(page(family, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
