"""Measure a training step while it runs: speed, work, memory and traffic, as plain numbers for any logger.

``StepMeter``   times steps and phases; ``StepValues`` has its values of one step
``ModelFlops``  floating-point operations of a model for given lengths, as model FLOPs utilization counts them
"""

from __future__ import annotations

from fsdp_runtime.meters.model_flops import AttentionFlops, ModelFlops
from fsdp_runtime.meters.step_meter import StepMeter, StepValues

__all__ = ["AttentionFlops", "ModelFlops", "StepMeter", "StepValues"]
