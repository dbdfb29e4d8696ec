"""The meshes of a number of GPUs that one model fits, for full training and LoRA at several lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_runtime.dry_run.candidates import rank_candidates
from fsdp_runtime.dry_run.compare import sweep
from fsdp_runtime.dry_run.parse_args import parse_bytes, require_model_source
from fsdp_runtime.dry_run.sweep_types import Recipe, Sweep
from fsdp_runtime.errors import EstimateError

if TYPE_CHECKING:
    from torch import nn

#: Tokens of a sequence for which one rank of ``cp`` is enough; longer ones are also tried on several.
_TOKENS_WITHOUT_CP = 16384

#: What differs between kinds of training: LoRA leaves the model in bfloat16, as it was loaded.
_TRAININGS: Mapping[str, Mapping[str, Any]] = {"full": {"master_dtype": "fp32"}, "lora": {}}


@dataclass(frozen=True)
class WithAdapters:
    """Builds a model with LoRA of rank 16 on every linear layer but the head; stacked experts get none.

    Args:
        source: what ``estimate`` takes as its model.
    """

    source: Any

    def __call__(self) -> nn.Module:
        """Return the adapted model."""
        from fsdp_runtime.dry_run.build_model import model_builder

        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise EstimateError("a recipe of LoRA needs peft: pip install peft, or leave lora out") from error
        adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model: nn.Module = get_peft_model(model_builder(self.source)(), adapters)
        return model


def recipes(
    model: str | Path | Any,
    gpus: int,
    *,
    device_memory: int | str,
    lengths: Sequence[int] = (8192, 32768, 131072),
    trainings: Sequence[str] = ("full", "lora"),
    ep: Sequence[int] = (1,),
    hardware: str = "H100",
    workers: int = 2,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Recipe]:
    """Sweep the meshes of some GPUs for each kind of training and length.

    Blocks recompute, activations are sharded over ``tp`` where it has several ranks, the loss holds no logits, and the
    optimizer is the fused AdamW.

    Args:
        model: as in ``sweep``.
        gpus: number of ranks.
        device_memory: bytes of a GPU, or ``"80GiB"``.
        lengths: tokens per sequence; long ones are also tried on several ranks of ``cp``.
        trainings: ``"full"`` (float32 shards, gradients and moments), ``"lora"`` (bfloat16).
        ep: sizes of the axis that a mixture's experts are divided over.
        hardware: whose expected time orders meshes that fit.
        workers: as in ``sweep``.
        progress: as in ``sweep``, for one length and kind of training after the other.

    Raises:
        EstimateError: a kind of training is unknown, or what ``sweep`` raises.
    """
    require_model_source(model)
    if unknown := [name for name in trainings if name not in _TRAININGS]:
        raise EstimateError(f"training {unknown[0]!r}: write one of {', '.join(_TRAININGS)}")
    options = {
        "device_memory": parse_bytes(device_memory),
        "ep": ep,
        "hardware": hardware,
        "workers": workers,
        "progress": progress,
    }
    return [
        Recipe(
            training=training,
            seq_len=length,
            found=_every_mesh(
                WithAdapters(model) if training == "lora" else model,
                gpus,
                seq_len=length,
                **_TRAININGS[training],
                **options,
            ),
        )
        for training in trainings
        for length in lengths
    ]


def _every_mesh(model: Any, gpus: int, *, seq_len: int, **options: Any) -> Sweep:
    """Return the meshes without ``tp``, and those with it and sequence parallelism."""
    cp = [
        size for size in (1, 2, 4, 8, 16, 32, 64) if gpus % size == 0 and size <= max(1, seq_len // _TOKENS_WITHOUT_CP)
    ]
    step = {"activation_checkpointing": ("block",), "optimizer": "adamw_fused", "logprobs": "linear"}
    common = {"seq_len": seq_len, "cp": cp, "dp_replicate": (1,), **step, **options}
    found = [*sweep(model, gpus, max_tp=1, sequence_parallel=(False,), **common).candidates]
    if any(gpus % tp == 0 for tp in range(2, 9)):
        found += sweep(model, gpus, max_tp=8, sequence_parallel=(True,), **common).candidates
    return rank_candidates(gpus, found)
