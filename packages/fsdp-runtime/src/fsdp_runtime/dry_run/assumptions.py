"""Assumptions of a dry run about the step and the checkpoint, in words."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fsdp_runtime.dry_run.report.format import format_bytes
from fsdp_runtime.dry_run.scale.summary import add_up, wildcard
from fsdp_runtime.dry_run.step import OPTIMIZERS, StepConfig
from fsdp_runtime.dry_run.types import Assumption


def untrained_assumptions(
    model: nn.Module, untrained: Mapping[str, tuple[int, ...]], step: StepConfig
) -> list[Assumption]:
    """Return the missing numbers for each part of the model that the step does not reach."""
    has_vision = getattr(getattr(model, "config", None), "vision_config", None) is not None
    trained = {wildcard(name) for name, each in model.named_parameters() if each.requires_grad} - untrained.keys()
    assumptions = []
    for part, (count, size) in add_up((_part_of(pattern), sizes) for pattern, sizes in untrained.items()).items():
        unused = has_vision and part not in map(_part_of, trained)
        reason = "the step has text and no images or other media" if unused else "the step does not use all of it"
        state = format_bytes(int(OPTIMIZERS[step.optimizer][1] * size))
        sizes = f"{format_bytes(size)} of gradients and {state} of optimizer state"
        if step.assume_gradients:
            counted = f"{sizes} are counted as if it had been trained, and its activations, traffic and work are not"
        else:
            counted = (
                f"it would have {sizes} on this rank, and activations; assume_gradients=True counts the first two, and "
                "requires_grad_(False) freezes it"
            )
        text = f"{reason}, so {count} trainable parameters have no gradient: {counted}"
        assumptions.append(Assumption(operator="", module=part, assumption=text, counted=False))
    return assumptions


def quantization_assumptions(model: nn.Module) -> list[Assumption]:
    """Return an assumption for a config with quantized weights: without ``Quantized`` they are dequantized."""
    config = getattr(model, "config", None)
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return []
    fields = quantization if isinstance(quantization, Mapping) else vars(quantization)
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method", "an unknown method")))
    text = (
        f"the config says that the checkpoint is quantized ({method}), and the numbers count dequantized weights "
        "unless steps has Quantized: load_weights refuses schemes other than nf4, int4, int8, FP8 and MXFP4"
    )
    return [Assumption(operator="", module="", assumption=text)]


def _part_of(pattern: str) -> str:
    """Return the outermost module of a parameter below the model's base: ``model.visual`` of its weights."""
    modules = pattern.split(".")[:-1]
    named = modules[: modules.index("*")] if "*" in modules else modules
    return ".".join(named[:2])
