"""Measure a training step while it runs: speed, work, memory and traffic, as plain numbers for any logger.

``StepMeter``   times steps and phases; ``StepValues`` has its values of one step
``ModelFlops``  floating-point operations of a model for given lengths, as model FLOPs utilization counts them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_runtime._lazy import lazy_names

if TYPE_CHECKING:
    from fsdp_runtime.meters.model_flops import AttentionFlops, ModelFlops
    from fsdp_runtime.meters.step_meter import StepMeter, StepValues

__all__ = ["AttentionFlops", "ModelFlops", "StepMeter", "StepValues"]

_FLOPS, _METER = f"{__name__}.model_flops", f"{__name__}.step_meter"

__getattr__, __dir__ = lazy_names(
    __name__, {"AttentionFlops": _FLOPS, "ModelFlops": _FLOPS, "StepMeter": _METER, "StepValues": _METER}
)  # the dry run reads published rates without torch
