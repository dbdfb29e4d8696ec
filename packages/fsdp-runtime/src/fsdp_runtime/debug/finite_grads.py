"""Check that gradients are finite, on every rank at once.

A NaN on one rank reaches all other ranks with the next reduction or optimizer step; then its origin is unknown.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import GradientError
from fsdp_runtime.model.state import require_memory
from fsdp_runtime.sharded.collectives import all_gather_objects, required_device
from fsdp_runtime.sharded.model_state import ModelState

#: The most parameters that a message names; it counts further parameters.
_MAX_NAMED = 8


@torch.no_grad()
def assert_finite_gradients(model: nn.Module) -> None:
    """Raise on every rank unless every gradient of a plain or parallelized model is finite on every rank.

    Collective over the ranks of the model's mesh; call it after backward and before the optimizer's step.  One
    all-reduce of one number per mesh axis; the host waits for it.  Only a failure needs a second exchange.

    Raises:
        GradientError: some elements are infinite or NaN; names the parameters, the numbers of elements and the ranks.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import assert_finite_gradients
        >>> model = nn.Linear(2, 3)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> assert_finite_gradients(model)
    """
    ranks = ModelState(model, allow_offloaded=True).ranks
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    require_memory(gradients, "gradients")
    counts = {name: _count_nonfinite(gradient) for name, gradient in gradients.items()}
    device = next((p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)), None)
    total = torch.stack(list(counts.values())).sum() if counts else torch.zeros((), dtype=torch.int64)
    total = total.to(device or required_device(ranks.groups))
    for group in ranks.groups:
        dist.all_reduce(total, group=group)
    if not total.item():
        return
    counts_of: dict[str, list[str]] = {}
    nonzero = {name: int(count) for name, count in counts.items() if count}
    for rank, rank_counts in sorted(all_gather_objects(ranks, nonzero).items()):
        for name, count in rank_counts.items():
            counts_of.setdefault(name, []).append(f"rank {rank}: {count}")
    lines = [f"  {name} ({', '.join(by_rank)})\n" for name, by_rank in list(counts_of.items())[:_MAX_NAMED]]
    more = f"  and {len(counts_of) - _MAX_NAMED} more\n" if len(counts_of) > _MAX_NAMED else ""
    raise GradientError(
        f"{len(counts_of)} parameters have gradients that are not finite (elements by rank):\n{''.join(lines)}{more}"
        "skip this step (optimizer.zero_grad()) and inspect the batch of the ranks named; in half precision, "
        "scale the loss down"
    )


def _count_nonfinite(gradient: Tensor) -> Tensor:
    """Return the number of infinite or NaN elements of the local shard, a 0-d tensor on the collectives' device."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    device = gradient.device_mesh.device_type if isinstance(gradient, DTensor) else gradient.device
    return local.isfinite().logical_not().sum().to(device)
