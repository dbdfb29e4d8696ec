"""Cut a batch into verl's micro-batches, the same number on every rank of ``dp``.

verl splits its batches evenly and by tokens; a rank that has fewer samples than its peers have micro-batches gets idle
ones, so that all ranks take part in each collective.  Every rank refuses a batch that cannot be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_runtime.errors import FsdpRuntimeError, OptionError
from fsdp_runtime.trainers.verl.batch_checks import require_sound
from fsdp_runtime.trainers.verl.verl_api import get_device_id, prepare_micro_batches, tensordict_utils


@dataclass(frozen=True)
class CutBatch:
    """A rank's micro-batches of one batch."""

    batches: Sequence[Any]  # the micro-batches
    indices: Any  # samples of each dynamic micro-batch; ``None`` for equal micro-batches
    count: int  # the largest number on any rank; the rest are idle


def cut(data: Any, group: Any, *, cp: int, words: int | None) -> CutBatch:
    """Cut a batch, and write values of all ranks for verl's losses into it; one small collective."""
    # The ``cp`` ranks that share each row share the limit of tokens too.
    own, names = _own(data, cp, words), sorted(name for name, value in data.items() if isinstance(value, Tensor))
    facts = _gathered([own.tokens, len(own.batches), own.error is not None, crc32(" ".join(names).encode())], group)
    tokens, numbers, errors, fields = zip(*facts, strict=True)
    if any(errors) or len({*fields}) > 1:
        _refuse(own.error, names, group)
    batches, indices, count = own.batches, own.indices, max(numbers)
    if own.rules.limit and len(batches) < (most := min(count, len(data) // own.rules.forced)):
        more, indices_of_more = prepare_micro_batches(data, same_micro_num_in_dp=False, min_num_micro_batch=most)
        if len(more) <= count:  # verl cuts further if a balanced cut passes the token limit; idle ones serve too
            batches, indices = more, indices_of_more
    of_all = {"dp_size": len(facts), "batch_num_tokens": sum(tokens)}
    for each in (data, *batches):
        tensordict_utils.assign_non_tensor(each, **of_all)
    return CutBatch(batches, indices, count)


class _Rules(NamedTuple):
    """A batch's settings for its cut: samples that stay together; a token limit with ``cp``, or samples per part."""

    forced: int
    limit: int
    cp: int
    samples: int


def _rules_of(data: Any, cp: int) -> _Rules:
    forced = _number(data, "force_group_size") or 1
    if tensordict_utils.get_non_tensor_data(data, "use_dynamic_bsz", True):
        limit = _number(data, "max_token_len_per_gpu")
        if limit is None:
            raise OptionError("use_dynamic_bsz=True needs a limit of tokens: set max_token_len_per_gpu, or False")
        return _Rules(forced, limit, cp, 1)
    samples = _number(data, "micro_batch_size_per_gpu")
    if samples is None:
        raise OptionError("use_dynamic_bsz=False needs micro_batch_size_per_gpu")
    return _Rules(forced, 0, cp, samples)


def _number(data: Any, name: str) -> int | None:
    value: int | None = tensordict_utils.get_non_tensor_data(data, name, None)
    if value is not None and (type(value) is not int or value < 1):
        raise OptionError(f"{name}={value!r}: give a positive whole number")
    return value


class _Own(NamedTuple):
    """One rank's cut of its batch with the number of counted tokens, or its error."""

    rules: _Rules = _Rules(1, 0, 1, 1)
    batches: Sequence[Any] = ()
    indices: Any = None
    tokens: int = 0
    error: Exception | None = None


def _own(data: Any, cp: int, words: int | None) -> _Own:
    """Cut a rank's batch; return its error, because its peers do not wait for a rank that has raised."""
    try:
        require_sound(data, words)
        rules = _rules_of(data, cp)
        _require_divides(data, rules)
        tensordict_utils.assign_non_tensor(data, sp_size=cp)
        batches, indices = prepare_micro_batches(data, same_micro_num_in_dp=False)
        return _Own(rules, batches, indices, int(data["loss_mask"].sum()))
    except Exception as error:  # noqa: BLE001  # whatever is wrong with one rank's batch
        return _Own(error=error)


def _gathered(own: list[int], group: Any) -> list[list[int]]:
    """Return the numbers of each rank of ``dp``, in one collective."""
    size, device = dist.get_world_size(group), get_device_id()
    local = torch.tensor(own, dtype=torch.int64, device=device)
    every = torch.empty(size * len(local), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(every, local, group=group)
    counts: list[list[int]] = every.view(size, -1).tolist()
    return counts


def _refuse(error: Exception | None, names: list[str], group: Any) -> NoReturn:
    """Raise the first rank's error, or the difference of fields, on every rank; one more collective."""
    known = isinstance(error, FsdpRuntimeError)
    text = str(error) if known else error and f"its batch cannot be read: {type(error).__name__}: {error}"
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (text, names), group=group)
    for rank, (problem, _) in enumerate(every):
        if problem is not None:
            raise OptionError(f"dp rank {rank}: {problem}") from error
    first = every[0][1]
    rank = next(rank for rank, (_, each) in enumerate(every) if each != first)
    more, fewer = ({*one} - {*other} for one, other in ((every[rank][1], first), (first, every[rank][1])))
    raise OptionError(
        f"dp rank {rank}: its batch has {', '.join(sorted(more)) or 'nothing'} more and "
        f"{', '.join(sorted(fewer)) or 'nothing'} less than dp rank 0's batch: give every rank the same fields"
    )


def _require_divides(data: Any, rules: _Rules) -> None:
    """Check that a batch of samples divides into micro-batches."""
    samples, lengths = len(data), data["input_ids"].offsets().diff()
    groups = lengths.view(-1, rules.forced).sum(1) if samples % rules.forced == 0 else lengths
    for what, counts in {"sequence": lengths, "group": groups}.items() if rules.limit else ():
        if (longest := int(counts.max())) > rules.limit * rules.cp:
            raise OptionError(
                f"the longest {what} has {longest} tokens, more than the limit of {rules.limit} a rank"
                + (f" times cp={rules.cp}" if rules.cp > 1 else "")
                + f": set the limit (max_token_len_per_gpu) to {-(-longest // rules.cp)}, or shorten samples"
            )
    if samples % (step := rules.forced * rules.samples):
        name = f"groups of {step}" if rules.limit else f"micro-batches of {step}"
        raise OptionError(
            f"{samples} samples do not divide into {name}: change the batch size, micro_batch_size_per_gpu or "
            "force_group_size, or set use_dynamic_bsz=True"
        )
