"""The meshes of a number of GPUs that fit one model, for full training and LoRA at several lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_runtime.dry_run.adapters import WithAdapters, not_adapted
from fsdp_runtime.dry_run.compare import sweep
from fsdp_runtime.dry_run.parse_args import parse_bytes, parse_fsdp, require_model_source
from fsdp_runtime.dry_run.sweep_types import Recipe
from fsdp_runtime.errors import EstimateError

#: Tokens of a sequence for which one rank of ``cp`` is enough; longer ones are also tried on several.
_TOKENS_WITHOUT_CP = 16384

#: The dtype of parameters, gradients and moments: LoRA leaves the model in bfloat16, as it was loaded.
_TRAININGS: Mapping[str, str | None] = {"full": "fp32", "lora": None, "qlora": None}


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
    sizes_of_ep, without_adapters, name_of_class = _ask(model, gpus)
    checkpoint = "CHECKPOINT"
    if isinstance(model, (str, Path)):
        checkpoint = str(Path(model).parent if Path(model).is_file() else model)
    options: dict[str, Any] = {
        "device_memory": parse_bytes(device_memory),
        "ep": sizes_of_ep if ep is None else ep,
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
    return [
        Recipe(
            training=training,
            seq_len=length,
            found=sweep(
                model if training == "full" else WithAdapters(model),
                gpus,
                seq_len=length,
                cp=_sizes_of_cp(gpus, length),
                fsdp=parse_fsdp(master_dtype=_TRAININGS[training]),
                **_steps(training),
                **options,
            ),
            without_adapters=without_adapters,
            auto_class=name_of_class,
            checkpoint=checkpoint,
        )
        for training in trainings
        for length in lengths
    ]


def _steps(training: str) -> dict[str, Any]:
    """Return the keyword ``steps`` of a kind of training, if it has steps."""
    from fsdp_runtime.steps import Quantized  # torch, when a recipe is made

    return {"steps": (Quantized("nf4"),)} if training == "qlora" else {}


def _ask(model: str | Path | Any, gpus: int) -> tuple[tuple[int, ...], tuple[str, ...], str]:
    """Return the sizes of ``ep`` for a model, the layers without LoRA, and the auto class."""
    import torch  # with the model, when a recipe is made

    from fsdp_runtime.dry_run.build_model import auto_class, build_model
    from tp_plans import CapabilityError, with_expert_parallelism

    built, ep = build_model(model, torch.bfloat16), 1
    with suppress(CapabilityError):  # no stacked experts
        with_expert_parallelism(None, built)
        ep = math.gcd(8, gpus)
    return tuple(dict.fromkeys((ep, 1))), not_adapted(built), auto_class(model)


def _sizes_of_cp(gpus: int, seq_len: int) -> list[int]:
    longest = max(1, seq_len // _TOKENS_WITHOUT_CP)
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if gpus % size == 0 and size <= longest]
