"""Values of a model before it is sharded: if the ranks' values differ, all ranks take the first rank's values.

A model, a head or an adapter with random values after ``torch.manual_seed(rank)`` differs between ranks.  Shards of one
tensor would come from several seeds, and replicas would stay different.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import wraps_tensors
from fsdp_runtime.sharded.collectives import all_reduce_over, required_device
from fsdp_runtime.sharded.hashing import hash_words

logger = logging.getLogger(__name__)

#: Names in a warning.
_SHOWN = 4
#: Elements per broadcast; an accelerator holds as many of a CPU tensor at once.
_STAGED = 2**24
_LARGEST = torch.iinfo(torch.int64).max


def has_values(model: nn.Module) -> bool:
    """Return whether any parameter has values; buffers of a model on the meta device come from the config."""
    return any(not parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def take_first_values(model: nn.Module, groups: Sequence[ProcessGroup]) -> tuple[str, ...]:
    """Give all ranks the first rank's parameters and buffers, in place; return the names that differed.  Collective."""
    # The groups, one per axis, connect all ranks. Ranks hold tensors of the same names, dtypes and shapes. A tensor on
    # the meta device of some ranks stays unchanged on all ranks: a load fills it.
    tensors = dict(sorted(_named_tensors(model), key=lambda item: item[0]))
    if not groups or not tensors:
        return ()
    if not (differing := [name for name, differs in zip(tensors, differ(tensors, groups), strict=True) if differs]):
        return ()
    for name in differing:
        for group in groups:
            _broadcast(tensors[name], group)
    if all(dist.get_rank(group) == 0 for group in groups):
        names = ", ".join(differing[:_SHOWN]) + f" and {len(differing) - _SHOWN} more" * (len(differing) > _SHOWN)
        logger.warning(
            "ranks held different values of %d of %d tensors (%s): all ranks take the values of rank %d. Draw them "
            "after the same seed on every rank, as torch.manual_seed(0)",
            *(len(differing), len(tensors), names, dist.get_rank()),
        )
    return tuple(differing)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, tied tensors once; a wrapper such as a quantized weight yields its parts."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            if not isinstance(tensor, DTensor):
                yield from _parts(name, tensor)


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    if not wraps_tensors(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def differ(tensors: dict[str, Tensor], groups: Sequence[ProcessGroup]) -> list[bool]:
    """Return for each tensor whether ranks hold different bits: one all-reduce per axis, and one device wait."""
    device = next((tensor.device for tensor in tensors.values() if tensor.device.type not in ("cpu", "meta")), None)
    device = device or required_device(groups) or torch.device("cpu")
    nowhere = torch.full((3,), _LARGEST, dtype=torch.int64, device=device)
    nowhere[2] = 0
    rows = []
    for tensor in tensors.values():
        if tensor.is_meta:
            rows.append(nowhere)
            continue
        digest = hash_words(tensor).to(device)
        # The bitwise complement turns a minimum into a maximum.
        rows.append(torch.stack([digest, ~digest, torch.ones_like(digest)]))
    lowest = all_reduce_over(groups, torch.stack(rows).flatten(), dist.ReduceOp.MIN).view(-1, 3)
    differs: list[bool] = ((lowest[:, 0] != ~lowest[:, 1]) & (lowest[:, 2] == 1)).tolist()
    return differs


def _broadcast(tensor: Tensor, group: ProcessGroup) -> None:
    target = tensor.detach()
    values = target.contiguous()
    device = required_device([group]) if tensor.device.type == "cpu" else None
    for part in torch.split(values.view(-1), _STAGED):
        sent = part.to(device or part.device)
        dist.broadcast(sent, group=group, group_src=0)
        part.copy_(sent)
    if values.data_ptr() != target.data_ptr():
        target.copy_(values)
