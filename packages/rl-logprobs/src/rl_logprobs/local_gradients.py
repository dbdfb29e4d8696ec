"""This rank's part of every gradient, and how the whole of each lies over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from rl_logprobs.errors import DtypeError
from rl_logprobs.reduction import Layout


@dataclass(frozen=True)
class LocalGradients:
    """This rank's parts of gradients, by the ``id`` of their parameters, and the ids of those that lie alike.

    Looking at a DTensor takes as long as adding up a small one, so that each is looked at once.
    """

    parts: dict[int, torch.Tensor]
    alike: dict[Layout | None, list[int]]


def local_gradients(parameters: Iterable[torch.Tensor]) -> LocalGradients:
    """This rank's parts of the gradients that are there, sharing their memory; call it without autograd.

    Raises:
        DtypeError: a gradient is sparse or not floating point.
    """
    parts: dict[int, torch.Tensor] = {}
    alike: dict[Layout | None, list[int]] = {}
    for index, parameter in enumerate(parameters):
        part, layout = parameter.grad, None
        if part is None:
            continue
        if isinstance(part, DTensor):
            layout = Layout(part.device_mesh, part.placements)
            part = part.to_local()
        if part.layout is not torch.strided or not part.is_floating_point():
            raise DtypeError(
                f"gradient {index} of shape {tuple(part.shape)} is {part.layout} {part.dtype}; norms need dense "
                f"floating-point gradients"
            )
        parts[id(parameter)] = part
        if layout in alike:
            alike[layout].append(id(parameter))
        else:
            alike[layout] = [id(parameter)]
    return LocalGradients(parts, alike)
