"""Norms of short stretches of tensors on a CPU: what torch offers for a whole tensor is inaccurate or slow there.

torch's float32 norm adds up in sequence: 1e-5 off at a million elements, 2e-4 at eight million.  Of half precision
it first makes a float32 copy, however large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rl_logprobs._torch_compat import foreach_norm

#: Elements of a stretch, over which a float32 sum is exact to rounding.
STRETCH = 1024
#: Stretches of half precision that are made float32 at once, so that they stay in the cache.
WIDENED = 64


def stretch_norms(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of all stretches of the tensors, so that the norm of these is the norm of those.

    Args:
        tensors: contiguous tensors on a CPU in float32 or half precision, none of them empty.

    Returns:
        float32 tensors, 1-d for whole stretches and 0-d for what is shorter.
    """
    norms: list[torch.Tensor] = []
    short: list[torch.Tensor] = []
    workspace = torch.empty(0)
    for tensor in tensors:
        length = tensor.numel()
        if length <= STRETCH:
            short.append(tensor)
            continue
        if rest := length % STRETCH:
            tensor, tail = torch.split(tensor.view(-1), [length - rest, rest])
            short.append(tail)
        rows = tensor.view(-1, STRETCH)
        if rows.dtype is torch.float32:
            norms.append(torch.linalg.vector_norm(rows, dim=1))
        else:
            workspace = workspace if len(workspace) else torch.empty(WIDENED, STRETCH)
            norms += _widened_norms(rows, workspace)
    return norms + (foreach_norm(short, 2, torch.float32) if short else [])


def _widened_norms(rows: torch.Tensor, workspace: torch.Tensor) -> Iterator[torch.Tensor]:
    for block in torch.split(rows, WIDENED) if len(rows) > WIDENED else (rows,):
        wide = workspace if len(block) == WIDENED else workspace[: len(block)]
        yield torch.linalg.vector_norm(wide.copy_(block), dim=1)
