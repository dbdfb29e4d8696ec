"""Optimizers of torch, at rates at which two steps in another order of sums stay equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from fsdp_runtime.optim import CPUOffloadAdamW

Optimizer = torch.optim.Optimizer

#: Keeps a step from growing without bound where a gradient is rounding alone.
_EPS = 1e-3


def _adamw_groups(parameters: list[nn.Parameter]) -> Optimizer:
    """AdamW with a group for each parameter."""
    groups = [{"params": [each], "lr": 1e-3 * (1 + place % 3)} for place, each in enumerate(parameters)]
    return torch.optim.AdamW(groups, eps=_EPS)


_ADAM = {"lr": 1e-3, "eps": _EPS}
#: By name.
OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "SGD, foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "AdamW": partial(torch.optim.AdamW, **_ADAM),
    "AdamW, fused": partial(torch.optim.AdamW, **_ADAM, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, **_ADAM, foreach=True),
    "AdamW, groups": _adamw_groups,
    "AdamW, on the host": partial(CPUOffloadAdamW, **_ADAM, fraction=0.6),
    "AMSGrad": partial(torch.optim.Adam, **_ADAM, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, **_ADAM),
    "RAdam": partial(torch.optim.RAdam, **_ADAM),
    "Adamax": partial(torch.optim.Adamax, **_ADAM),
    "Adagrad": partial(torch.optim.Adagrad, **_ADAM),
    "Adadelta": partial(torch.optim.Adadelta, lr=1e-2, eps=_EPS),
    "ASGD": partial(torch.optim.ASGD, lr=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4, eps=1e-2, centered=True, momentum=0.5),
}
