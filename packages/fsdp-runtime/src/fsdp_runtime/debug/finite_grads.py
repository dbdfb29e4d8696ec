"""Whether gradients are numbers, asked on every rank at once.

A NaN on one rank reaches all of them with the next reduction or optimizer step, and by then nothing says where it
came from.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import GradientError
from fsdp_runtime.sharded.collectives import ranks_of, tell_all

#: Parameters that a message names; the rest are counted.
_NAMED = 8


@torch.no_grad()
def assert_finite_gradients(model: nn.Module) -> None:
    """Raise on every rank unless every gradient on every rank is finite.

    Collective: every rank of the model's mesh calls it, after backward and before the optimizer's step.  One
    all-reduce of a number for each mesh axis, which the host waits for; a second exchange only where there is
    something to tell.

    Raises:
        GradientError: some elements are infinite or NaN; names the parameters, how many elements and on which ranks.
    """
    counts = {
        name: _not_finite(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    ranks = ranks_of(model)
    device = next((p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)), None)
    total = torch.stack(list(counts.values())).sum() if counts else torch.zeros((), dtype=torch.int64)
    total = total.to(device)
    for group in ranks.groups:
        dist.all_reduce(total, group=group)
    if not total.item():
        return
    found: dict[str, list[str]] = {}
    for rank, told in sorted(tell_all(ranks, {name: int(count) for name, count in counts.items() if count}).items()):
        for name, count in told.items():
            found.setdefault(name, []).append(f"rank {rank}: {count}")
    lines = [f"  {name} ({', '.join(where)})" for name, where in list(found.items())[:_NAMED]]
    more = [f"  and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    raise GradientError(
        "\n".join([f"{len(found)} parameters have gradients that are not finite (elements by rank):", *lines, *more])
        + "\nleave this step out (optimizer.zero_grad()), and look at the batch of the ranks named; in half precision, "
        "scale the loss down"
    )


def _not_finite(gradient: Tensor) -> Tensor:
    """How many elements of this rank's part are infinite or NaN, as a 0-d tensor where collectives run."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    device = gradient.device_mesh.device_type if isinstance(gradient, DTensor) else gradient.device
    return local.isfinite().logical_not().sum().to(device)
