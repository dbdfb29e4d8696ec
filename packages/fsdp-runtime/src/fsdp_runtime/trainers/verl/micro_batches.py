"""Cut a batch into verl's micro-batches, the same number on every rank of ``dp``.

verl splits its batches evenly and by tokens; a rank that has fewer samples than its peers have micro-batches gets idle
ones, so that all ranks take part in each collective.  What cannot be cut is refused on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl.verl_api import (
    DatasetPadMode,
    get_device_id,
    prepare_micro_batches,
    tensordict_utils,
)

_FACTS = ("tokens", "samples", "longest sequence", "longest group")


@dataclass(frozen=True)
class CutBatch:
    """A rank's micro-batches of one batch.

    Args:
        batches: the micro-batches.
        indices: of dynamic micro-batches the samples of each; ``None`` for equal ones.
        count: the largest number on any rank; the rest are idle.
    """

    batches: list[Any]
    indices: Any
    count: int


def cut(data: Any, group: Any, *, cp: int) -> CutBatch:
    """Cut a batch, and write what verl's losses read of all ranks into it.

    Args:
        data: verl's batch, nested by sample.
        group: the ranks of ``dp``.
        cp: ranks that share each row, and with it the limit of tokens.

    Raises:
        OptionError: a sequence or a forced group is longer than the limit, or samples do not divide; on every rank.
    """
    if tensordict_utils.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        raise OptionError("data.pad_mode must be no_padding: this engine reads nested batches")
    size = dist.get_world_size(group)
    samples, forced = len(data), tensordict_utils.get_non_tensor_data(data, "force_group_size", 1)
    dynamic = tensordict_utils.get_non_tensor_data(data, "use_dynamic_bsz", True)
    facts = _gathered(_facts(data, samples, forced), group, size)
    tensordict_utils.assign_non_tensor(
        data, sp_size=cp, dp_size=size, batch_num_tokens=sum(each["tokens"] for each in facts)
    )
    _check(data, facts, forced, cp if dynamic else 0)
    batches, indices = prepare_micro_batches(data, same_micro_num_in_dp=False)
    count = max(each["batches"] for each in _gathered({"batches": len(batches)}, group, size))
    if dynamic and len(batches) < (most := min(count, samples // forced)):
        more, indices_of_more = prepare_micro_batches(data, same_micro_num_in_dp=False, min_num_micro_batch=most)
        if len(more) <= count:  # verl cuts on where a balanced cut passes the limit of tokens; idle ones do as well
            batches, indices = more, indices_of_more
    return CutBatch(batches, indices, count)


def _facts(data: Any, samples: int, forced: int) -> dict[str, int]:
    lengths = data["input_ids"].offsets().diff()
    groups = lengths.view(-1, forced).sum(1) if samples % forced == 0 else lengths
    values = (data["loss_mask"].sum(), samples, lengths.max(), groups.max())
    return dict(zip(_FACTS, map(int, values), strict=True))


def _gathered(own: dict[str, int], group: Any, size: int) -> list[dict[str, int]]:
    """Return the numbers of each rank of ``dp``, in one collective."""
    device = get_device_id()
    local = torch.tensor([*own.values()], dtype=torch.int64, device=device)
    every = torch.empty(size * len(local), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(every, local, group=group)
    return [dict(zip(own, row, strict=True)) for row in every.view(size, -1).tolist()]


def _check(data: Any, facts: list[dict[str, int]], forced: int, cp: int) -> None:
    """Check what each rank has, with the numbers of all, so that all raise."""
    if cp:
        limit = tensordict_utils.get_non_tensor_data(data, "max_token_len_per_gpu", None)
        if limit is None:
            raise OptionError("use_dynamic_bsz=True needs a limit of tokens: set max_token_len_per_gpu, or False")
        for rank, each in enumerate(facts):
            for what in ("longest sequence", "longest group"):
                if each[what] > limit * cp:
                    raise OptionError(
                        f"dp rank {rank}: the {what} has {each[what]} tokens, more than the limit of {limit} a rank"
                        + (f" times cp={cp}" if cp > 1 else "")
                        + f": set the limit (max_token_len_per_gpu) to {-(-each[what] // cp)}, or shorten samples"
                    )
        step, name = forced, f"groups of {forced}"
    else:
        size = tensordict_utils.get_non_tensor_data(data, "micro_batch_size_per_gpu", None)
        if not size:
            raise OptionError("use_dynamic_bsz=False needs micro_batch_size_per_gpu")
        step, name = forced * size, f"micro-batches of {forced * size}"
    for rank, each in enumerate(facts):
        if each["samples"] % step:
            raise OptionError(
                f"dp rank {rank} has {each['samples']} samples, which do not divide into {name}: change the batch "
                "size, micro_batch_size_per_gpu or force_group_size, or set use_dynamic_bsz=True"
            )
