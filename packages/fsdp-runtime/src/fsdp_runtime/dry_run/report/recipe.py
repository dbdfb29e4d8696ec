"""A recipe as sections, and sections as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fsdp_runtime.dry_run.report.format import format_bytes, format_seconds
from fsdp_runtime.dry_run.report.sections import Section, candidate_errors
from fsdp_runtime.dry_run.sweep_types import Candidate, Recipe, format_mesh
from fsdp_runtime.dry_run.traffic_totals import bytes_sent_by_axis

_FULL_OPTIONS = (
    "fsdp=fsdp_runtime.FSDP2(",
    "    mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), master_dtype=torch.float32",
    "),",
)
_ADAPTERS = (
    'adapters = LoraConfig(r=16, target_modules="all-linear", {}task_type="CAUSAL_LM")',
    "model = get_peft_model(model, adapters, autocast_adapter_dtype=False)",
)


def recipe_sections(recipes: Iterable[Recipe]) -> list[Section]:
    """Return for each recipe its meshes, best first, the refused meshes, and the call for the best mesh."""
    sections: list[Section] = []
    for recipe in recipes:
        candidates = recipe.found.candidates
        fitting = [each for each in candidates if each.estimate is not None and each.estimate.fits]
        refused = [each for each in candidates if each.estimate is None]
        heading = f"{recipe.training}, {recipe.seq_len:,} tokens: {len(fitting)} of {len(candidates)} meshes fit"
        rows = [_HEADER, *map(_row, recipe.found.estimated)] if recipe.found.estimated else ()
        lines = [f"refused: {line}" for line in candidate_errors(refused)]
        sections.append(Section(heading=heading, rows=rows, left=2, lines=lines, status="" if fitting else "bad"))
        if recipe.found.best is not None:
            options = (recipe.without_adapters, recipe.auto_class, recipe.checkpoint)
            call = program(recipe.training, recipe.found.best, *options)
            sections.append(Section(heading=f"Program for {recipe.found.best.label}", lines=call, code=True))
    return sections


def program(
    training: str,
    candidate: Candidate,
    without_adapters: Sequence[str] = (),
    auto_class: str = "AutoModelForCausalLM",
    checkpoint: str = "CHECKPOINT",
) -> list[str]:
    """Return the lines that build, parallelize and load a model with the options of a recipe's candidate."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in candidate.axes.items() if size != 1)
    options = [
        *(["sequence_parallel=True,"] if candidate.sequence_parallel else []),
        f'activation_checkpointing="{candidate.activation_checkpointing}",',
        *(_FULL_OPTIONS if training == "full" else ("fsdp=fsdp_runtime.FSDP2(),",)),
        *(('steps=(Quantized("nf4"),),',) if training == "qlora" else ()),
    ]
    excluded = f"exclude_modules={[*without_adapters]}, " if without_adapters else ""
    lora = training != "full"
    build = f"model = {auto_class}.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.bfloat16)"
    return [
        "import torch",
        *(["from peft import LoraConfig, get_peft_model"] if lora else []),
        *([] if lora else ["from torch.distributed.fsdp import MixedPrecisionPolicy"]),
        f"from transformers import AutoConfig, {auto_class}",
        "",
        "import fsdp_runtime",
        *(["from fsdp_runtime.steps import Quantized"] if training == "qlora" else []),
        "",
        f'checkpoint = "{checkpoint}"  # a directory with config.json and safetensors files',
        f"mesh = fsdp_runtime.MeshSpec({sizes}).build()",
        "with fsdp_runtime.meta_device():",
        f"    {build}",
        *(f"    {line.format(excluded)}" for line in _ADAPTERS if lora),
        "fsdp_runtime.parallelize(",
        *(f"    {line}" for line in ("model,", "mesh,", *options)),
        ")",
        *(["fsdp_runtime.init_adapters(model, seed=0)"] if lora else []),
        "fsdp_runtime.load_weights(model, checkpoint)",
    ]


def markdown_lines(sections: Iterable[Section]) -> Iterator[str]:
    """Yield sections as Markdown: headings, tables, lists, code."""
    for section in sections:
        yield from (f"## {section.heading}", "")
        if section.rows:
            yield from (*markdown_table(section.rows, left=section.left), "")
        if section.code:
            yield from ("```python", *section.lines, "```", "")
        elif section.lines:
            yield from (*(f"- {line}" for line in section.lines), "")


def markdown_table(rows: Sequence[Sequence[str]], *, left: int) -> Iterator[str]:
    """Yield the lines of a table, its header first; columns from ``left`` on are right-aligned."""
    rules = ["---" if column < left else "---:" for column in range(len(rows[0]))]
    for row in (rows[0], rules, *rows[1:]):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"


_HEADER = ["mesh", "fits", "device memory", "time / 1M tokens", "sent per step by axis"]


def _row(candidate: Candidate) -> list[str]:
    estimate = candidate.estimate
    if estimate is None:
        raise ValueError(f"{candidate.label} has no estimate")
    sent = bytes_sent_by_axis(estimate.traffic)
    return [
        format_mesh(candidate.axes) + (", SP" if candidate.sequence_parallel else ""),
        "yes" if estimate.fits else "no",
        format_bytes(estimate.memory.device),
        "-" if candidate.seconds is None else format_seconds(candidate.seconds),
        ", ".join(f"{axis} {format_bytes(size)}" for axis, size in sent.items() if size) or "-",
    ]
