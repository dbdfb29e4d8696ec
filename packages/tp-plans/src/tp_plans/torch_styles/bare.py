"""Parameters that no layer calls its weight, as their owner computes with them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_plans.styles import ParameterStyle
from tp_plans.torch_styles.gradients import local_view, summed_gradient, whole_view


def bare_view(rule: ParameterStyle, parameter: DTensor) -> Tensor:
    """This rank's part, or the whole, of a bare parameter; its gradient lies as the parameter does."""
    partial = rule.gradient == "partial"
    if rule.gathered:
        return whole_view(parameter, partial=partial)
    return summed_gradient(parameter) if partial else local_view(parameter)
