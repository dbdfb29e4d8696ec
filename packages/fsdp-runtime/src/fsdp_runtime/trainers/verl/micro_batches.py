"""Cut a batch into verl's micro-batches, the same number on every rank of ``dp``.

verl splits its batches evenly and by tokens; a rank that has fewer samples than its peers have micro-batches gets idle
ones, so that all ranks take part in each collective.  What cannot be cut is refused on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl.verl_api import (
    DatasetPadMode,
    get_device_id,
    prepare_micro_batches,
    tensordict_utils,
)

_FACTS = ("samples", "tokens", "longest sequence", "longest group")


@dataclass(frozen=True)
class CutBatch:
    """A rank's micro-batches of one batch."""

    batches: list[Any]  # the micro-batches
    indices: Any  # of dynamic micro-batches the samples of each; ``None`` for equal ones
    count: int  # the largest number on any rank; the rest are idle


def cut(data: Any, group: Any, *, cp: int) -> CutBatch:
    """Cut a batch, and write what verl's losses read of all ranks into it; one small collective."""
    # The ``cp`` ranks that share each row share the limit of tokens too.
    if tensordict_utils.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        raise OptionError("data.pad_mode must be no_padding: this engine reads nested batches")
    rules = _rules_of(data, cp)
    tensordict_utils.assign_non_tensor(data, sp_size=cp)
    own = _facts(data, rules.forced)
    batches, indices = ([], None) if _fault(own, rules) else prepare_micro_batches(data, same_micro_num_in_dp=False)
    facts = _gathered({**own, "batches": len(batches)}, group)
    for rank, each in enumerate(facts):
        if fault := _fault(each, rules):
            raise OptionError(f"dp rank {rank}: {fault}")
    count = max(each["batches"] for each in facts)
    if rules.limit and len(batches) < (most := min(count, own["samples"] // rules.forced)):
        more, indices_of_more = prepare_micro_batches(data, same_micro_num_in_dp=False, min_num_micro_batch=most)
        if len(more) <= count:  # verl cuts on where a balanced cut passes the limit of tokens; idle ones do as well
            batches, indices = more, indices_of_more
    of_all = {"dp_size": len(facts), "batch_num_tokens": sum(each["tokens"] for each in facts)}
    for each in (data, *batches):
        tensordict_utils.assign_non_tensor(each, **of_all)
    return CutBatch(batches, indices, count)


class _Rules(NamedTuple):
    """What a batch says of its cut: samples that stay together; a limit of tokens with ``cp``, or samples of each."""

    forced: int
    limit: int
    cp: int
    samples: int


def _rules_of(data: Any, cp: int) -> _Rules:
    forced = tensordict_utils.get_non_tensor_data(data, "force_group_size", 1)
    if tensordict_utils.get_non_tensor_data(data, "use_dynamic_bsz", True):
        limit = tensordict_utils.get_non_tensor_data(data, "max_token_len_per_gpu", None)
        if not limit:
            raise OptionError("use_dynamic_bsz=True needs a limit of tokens: set max_token_len_per_gpu, or False")
        return _Rules(forced, limit, cp, 1)
    samples = tensordict_utils.get_non_tensor_data(data, "micro_batch_size_per_gpu", None)
    if not samples:
        raise OptionError("use_dynamic_bsz=False needs micro_batch_size_per_gpu")
    return _Rules(forced, 0, cp, samples)


def _facts(data: Any, forced: int) -> dict[str, int]:
    samples, lengths = len(data), data["input_ids"].offsets().diff()
    if not samples:
        return dict.fromkeys(_FACTS, 0)
    groups = lengths.view(-1, forced).sum(1) if samples % forced == 0 else lengths
    values = (samples, data["loss_mask"].sum(), lengths.max(), groups.max())
    return dict(zip(_FACTS, map(int, values), strict=True))


def _gathered(own: dict[str, int], group: Any) -> list[dict[str, int]]:
    """Return the numbers of each rank of ``dp``, in one collective."""
    size, device = dist.get_world_size(group), get_device_id()
    local = torch.tensor([*own.values()], dtype=torch.int64, device=device)
    every = torch.empty(size * len(local), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(every, local, group=group)
    return [dict(zip(own, row, strict=True)) for row in every.view(size, -1).tolist()]


def _fault(facts: dict[str, int], rules: _Rules) -> str:
    """Return why a rank's batch cannot be cut, empty if it can."""
    for what in ("longest sequence", "longest group") if rules.limit else ():
        if facts[what] > rules.limit * rules.cp:
            return (
                f"the {what} has {facts[what]} tokens, more than the limit of {rules.limit} a rank"
                + (f" times cp={rules.cp}" if rules.cp > 1 else "")
                + f": set the limit (max_token_len_per_gpu) to {-(-facts[what] // rules.cp)}, or shorten samples"
            )
    if facts["samples"] % (step := rules.forced * rules.samples):
        name = f"groups of {step}" if rules.limit else f"micro-batches of {step}"
        return (
            f"{facts['samples']} samples do not divide into {name}: change the batch size, micro_batch_size_per_gpu or "
            "force_group_size, or set use_dynamic_bsz=True"
        )
    return "" if facts["samples"] else "it has no samples: give a batch of at least as many samples as ranks of dp"
