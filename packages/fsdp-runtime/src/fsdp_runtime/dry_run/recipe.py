"""The meshes of a number of GPUs that fit one model, for full training and LoRA at several lengths, with a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_runtime.dry_run.compare import sweep
from fsdp_runtime.dry_run.parse_args import parse_bytes, parse_fsdp, require_model_source
from fsdp_runtime.dry_run.report.format import format_bytes, format_seconds
from fsdp_runtime.dry_run.report.sections import Section, candidate_errors
from fsdp_runtime.dry_run.sweep_types import Candidate, Sweep, format_mesh
from fsdp_runtime.dry_run.types import Estimate, bytes_sent_by_axis
from fsdp_runtime.errors import EstimateError

#: Tokens of a sequence for which one rank of ``cp`` is enough; longer ones are also tried on several.
_TOKENS_WITHOUT_CP = 16384

#: The dtype of parameters, gradients and moments: LoRA leaves the model in bfloat16, as it was loaded.
_TRAININGS: Mapping[str, str | None] = {"full": "fp32", "lora": None, "qlora": None}

_HEADER = ["mesh", "fits", "device memory", "time / 1M tokens", "sent per step by axis"]
_FULL_OPTIONS = (
    "fsdp=fsdp_runtime.FSDP2(",
    "    mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), master_dtype=torch.float32",
    "),",
)
_ADAPTERS = (
    'adapters = LoraConfig(r=16, target_modules="all-linear", {}task_type="CAUSAL_LM")',
    "model = get_peft_model(model, adapters, autocast_adapter_dtype=False)",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The meshes of a number of GPUs for one kind of training and length."""

    training: str  # ``"full"``, ``"lora"``, or ``"qlora"`` on a base in nf4
    seq_len: int  # tokens per sequence
    found: Sweep  # the meshes, best first
    without_adapters: tuple[str, ...] = ()  # names of linear layers without LoRA
    auto_class: str = "AutoModelForCausalLM"  # of transformers, which builds the model
    checkpoint: str = "CHECKPOINT"  # the directory of the model


def recipes(
    model: str | Path | Any,
    gpus: int,
    *,
    device_memory: int | str,
    lengths: Sequence[int] = (8192, 32768, 131072),
    trainings: Sequence[str] = ("full", "lora"),
    ep: Sequence[int] | None = None,
    hardware: str = "H100",
    every: bool = False,
    workers: int = 2,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Recipe]:
    """Find the meshes of some GPUs for each kind of training and length."""
    # The least divided meshes are tried first, up to one that fits; ``every`` sweeps them all. Blocks recompute,
    # activations are sharded over ``tp`` where it has several ranks, the loss holds no logits, and the optimizer is the
    # fused AdamW. ``"full"`` training has float32 shards, gradients and moments, ``"lora"`` bfloat16. Long sequences
    # are also tried on several ranks of ``cp``, and with ``ep=None`` mixtures on 8 ranks of ``ep`` where these divide
    # the GPUs.
    require_model_source(model)
    if unknown := [name for name in trainings if name not in _TRAININGS]:
        raise EstimateError(f"training {unknown[0]!r}: write one of {', '.join(_TRAININGS)}")
    import torch  # with the model, when a recipe is made

    from fsdp_runtime.dry_run.build_model import WithAdapters, auto_class, build_model, not_adapted
    from fsdp_runtime.steps import Quantized
    from tp_plans import CapabilityError, with_expert_parallelism

    built, most = build_model(model, torch.bfloat16), 1
    with suppress(CapabilityError):  # no stacked experts
        with_expert_parallelism(None, built)
        most = math.gcd(8, gpus)
    of_model: dict[str, Any] = {"without_adapters": not_adapted(built), "auto_class": auto_class(model)}
    if isinstance(model, (str, Path)):
        of_model["checkpoint"] = str(Path(model).parent if Path(model).is_file() else model)
    options: dict[str, Any] = {
        "device_memory": parse_bytes(device_memory),
        "ep": tuple(dict.fromkeys((most, 1))) if ep is None else ep,
        "hardware": hardware,
        "enough": None if every else 1,
        "workers": workers,
        "progress": progress,
        "dp_replicate": (1,),
        "sequence_parallel": (True,),
        "activation_checkpointing": ("block",),
        "optimizer": "adamw_fused",
        "logprobs": "linear",
    }
    answers: list[Recipe] = []
    for training in trainings:
        source = model if training == "full" else WithAdapters(model)
        options["fsdp"] = parse_fsdp(master_dtype=_TRAININGS[training])
        options["steps"] = (Quantized("nf4"),) if training == "qlora" else ()
        for length in lengths:
            longest = max(1, length // _TOKENS_WITHOUT_CP)
            cp = [size for size in (1, 2, 4, 8, 16, 32, 64) if gpus % size == 0 and size <= longest]
            meshes = sweep(source, gpus, seq_len=length, cp=cp, **options)
            answers.append(Recipe(training=training, seq_len=length, found=meshes, **of_model))
    return answers


def recipe_sections(recipes: Iterable[Recipe]) -> list[Section]:
    """Return for each recipe its meshes, best first, the refused meshes, and the call for the best mesh."""
    sections: list[Section] = []
    for recipe in recipes:
        candidates = recipe.found.candidates
        fitting = [each for each in candidates if each.estimate is not None and each.estimate.fits]
        refused = [each for each in candidates if each.estimate is None]
        heading = f"{recipe.training}, {recipe.seq_len:,} tokens: {len(fitting)} of {len(candidates)} meshes fit"
        meshes = [_row(each, each.estimate) for each in candidates if each.estimate is not None]
        rows = [_HEADER, *meshes] if meshes else ()
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


def _row(candidate: Candidate, estimate: Estimate) -> list[str]:
    sent = bytes_sent_by_axis(estimate.traffic)
    return [
        format_mesh(candidate.axes) + (", SP" if candidate.sequence_parallel else ""),
        "yes" if estimate.fits else "no",
        format_bytes(estimate.memory.device),
        "-" if candidate.seconds is None else format_seconds(candidate.seconds),
        ", ".join(f"{axis} {format_bytes(size)}" for axis, size in sent.items() if size) or "-",
    ]
