"""Send weights to processes outside the model's mesh: metadata over the caller's channel, bytes by broadcast.

Receivers get names, dtypes and shapes over their own channel, allocate, and join a broadcast of one tensor after
another, or of a bucket as one flat byte tensor (SGLang's ``flattened_bucket``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded import ModelState, WeightInfo, all_gather_objects, flat_bytes
from fsdp_runtime.weights import Bucket, WeightExport


def send_weights(
    model: nn.Module,
    group: ProcessGroup | None,
    on_bucket: Callable[[list[WeightInfo]], object],
    *,
    export: WeightExport = WeightExport(),
    flat: bool = True,
) -> None:
    """Broadcast every weight to receivers in other processes, a bucket at a time.

    Collective over the model's ranks: one rank sends, and the other ranks take part in the gathers of their shards
    (replicas need not).  The next bucket is gathered while the current bucket is sent.

    Args:
        model: plain, sharded over ``tp``, sharded by FSDP2, or both.
        group: on the sending rank, a group of this rank and the receivers; ``None`` on the model's other ranks.
        on_bucket: called on the sending rank before each bucket is broadcast, so that the receivers can allocate and
            join; must not wait for the end of the broadcast.
        export: options of the export; ``flat`` adds about one ``bucket_bytes`` to the peak.
        flat: broadcast a bucket as one flat byte tensor, which :func:`unflatten_bucket` splits; else tensor by tensor.

    Raises:
        ConversionError, OptionError: as :class:`WeightExport`.

    Example:
        >>> import torch.distributed as dist
        >>> from torch import nn
        >>> from fsdp_runtime.sync import send_weights
        >>> send_weights(nn.Linear(2, 3), None, print)  # a rank that does not send
    """
    state = ModelState(model)
    prepared = export.prepare(state)
    sends = all_gather_objects(state.ranks, group is not None)
    senders = [rank for rank, value in sends.items() if value]
    for bucket in prepared.buckets(to=senders[0] if len(senders) == 1 else None):
        if group is None:
            continue
        on_bucket([WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket])
        group_rank = dist.get_rank(group)
        for tensor in [flatten_bucket(bucket)] if flat else [tensor for _, tensor in bucket]:
            dist.broadcast(tensor, group=group, group_src=group_rank)
        del tensor, bucket  # free before the next bucket is gathered


def flatten_bucket(bucket: Bucket) -> Tensor:
    """Return the bytes of a bucket's tensors as one tensor ``[bytes]``, uint8, without gaps.

    Args:
        bucket: names and tensors, as :meth:`WeightExport.buckets` yields them.

    Raises:
        OptionError: the bucket is empty.

    Example:
        >>> import torch
        >>> from fsdp_runtime.sync import flatten_bucket
        >>> flatten_bucket([("weight", torch.ones(2, 3))]).shape
        torch.Size([24])
    """
    if not bucket:
        raise OptionError("bucket is empty: give at least one name and tensor")
    return torch.cat([flat_bytes(tensor) for _, tensor in bucket])


def unflatten_bucket(weights: Sequence[WeightInfo], flat: Tensor) -> Bucket:
    """Return the names and tensors of a flat bucket, as views of ``flat``: the inverse of :func:`flatten_bucket`.

    Args:
        weights: metadata of the bucket, in order.
        flat: ``[bytes]``, uint8.

    Raises:
        OptionError: ``flat`` does not have the bytes of the weights.

    Example:
        >>> import torch
        >>> from fsdp_runtime.sync import WeightInfo, flatten_bucket, unflatten_bucket
        >>> flat = flatten_bucket([("weight", torch.ones(2, 3))])
        >>> unflatten_bucket([WeightInfo("weight", torch.float32, (2, 3))], flat)[0][1].shape
        torch.Size([2, 3])
    """
    nbytes = sum(weight.nbytes for weight in weights)
    if flat.dtype is not torch.uint8 or flat.shape != (nbytes,):
        raise OptionError(
            f"flat must be a uint8 tensor of the {nbytes} bytes of the weights, got {flat.dtype} of shape "
            f"{tuple(flat.shape)}"
        )
    parts = torch.split(flat, [weight.nbytes for weight in weights])
    return [(w.name, part.view(w.dtype).view(w.shape)) for w, part in zip(weights, parts, strict=True)]
