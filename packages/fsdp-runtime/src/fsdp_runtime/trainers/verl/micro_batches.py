"""Check a batch and cut it into verl's micro-batches, the same number on every rank of ``dp``.

verl splits its batches evenly and by tokens; a rank that has fewer samples than its peers have micro-batches gets idle
ones, so that all ranks take part in each collective.  Every rank refuses a batch that cannot be cut, and values that
make a model or loss fail on one rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_runtime.errors import FsdpRuntimeError, OptionError
from fsdp_runtime.trainers.verl.verl_api import DatasetPadMode, prepare_micro_batches, tensordict_utils


@dataclass(frozen=True)
class CutBatch:
    """A rank's micro-batches of one batch."""

    batches: Sequence[Any]  # the micro-batches
    indices: Any  # samples of each dynamic micro-batch; ``None`` for equal micro-batches
    count: int  # the largest number on any rank; the rest are idle


def cut(data: Any, group: Any, *, cp: int, words: int | None) -> CutBatch:
    """Cut a batch, and write values of all ranks for verl's losses into it; one collective of small objects."""
    # The ``cp`` ranks that share each row share the limit of tokens too.
    own = _own(data, cp, words)
    names = sorted(name for name, value in data.items() if isinstance(value, Tensor))
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (own.tokens, len(own.batches), own.problem, names), group=group)
    tokens, numbers, problems, fields = zip(*every, strict=True)
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise OptionError(f"dp rank {rank}: {problem}") from own.error
    for rank, rank_names in enumerate(fields):
        if rank_names != fields[0]:
            extra, fewer = ({*one} - {*other} for one, other in ((rank_names, fields[0]), (fields[0], rank_names)))
            raise OptionError(
                f"dp rank {rank}: its batch has {', '.join(sorted(extra)) or 'nothing'} more and "
                f"{', '.join(sorted(fewer)) or 'nothing'} less than dp rank 0's batch: give every rank the same fields"
            )
    batches, indices, count = own.batches, own.indices, max(numbers)
    if own.limit and len(batches) < (most := min(count, len(data) // own.forced)):
        more, indices_of_more = prepare_micro_batches(data, same_micro_num_in_dp=False, min_num_micro_batch=most)
        if len(more) <= count:  # verl cuts further if a balanced cut passes the token limit; idle ones serve too
            batches, indices = more, indices_of_more
    of_all = {"dp_size": len(every), "batch_num_tokens": sum(tokens)}
    for each in (data, *batches):
        tensordict_utils.assign_non_tensor(each, **of_all)
    return CutBatch(batches, indices, count)


def _number(data: Any, name: str) -> int | None:
    value: int | None = tensordict_utils.get_non_tensor_data(data, name, None)
    if value is not None and (type(value) is not int or value < 1):
        raise OptionError(f"{name}={value!r}: give a positive whole number")
    return value


class _Own(NamedTuple):
    """One rank's cut of its batch, or its error."""

    forced: int = 1  # samples that stay together
    limit: int = 0  # of tokens; 0 for a fixed number of samples
    batches: Sequence[Any] = ()
    indices: Any = None
    tokens: int = 0  # that count
    problem: str | None = None
    error: Exception | None = None


def _own(data: Any, cp: int, words: int | None) -> _Own:
    """Cut a rank's batch; return its error, because its peers do not wait for a rank that has raised."""
    try:
        require_sound(data, words)
        forced, limit = _require_divides(data, cp)
        tensordict_utils.assign_non_tensor(data, sp_size=cp)
        batches, indices = prepare_micro_batches(data, same_micro_num_in_dp=False)
        return _Own(forced, limit, batches, indices, int(data["loss_mask"].sum()))
    except Exception as error:  # noqa: BLE001  # whatever is wrong with one rank's batch
        known = isinstance(error, FsdpRuntimeError)
        problem = str(error) if known else f"its batch cannot be read: {type(error).__name__}: {error}"
        return _Own(problem=problem, error=error)


def _require_divides(data: Any, cp: int) -> tuple[int, int]:
    """Check that a batch divides into micro-batches; return the samples that stay together and the limit of tokens."""
    forced, limit, step = _number(data, "force_group_size") or 1, 0, 1
    if tensordict_utils.get_non_tensor_data(data, "use_dynamic_bsz", True):
        if (limit := _number(data, "max_token_len_per_gpu") or 0) == 0:
            raise OptionError("use_dynamic_bsz=True needs a limit of tokens: set max_token_len_per_gpu, or False")
    elif (step := _number(data, "micro_batch_size_per_gpu") or 0) == 0:
        raise OptionError("use_dynamic_bsz=False needs micro_batch_size_per_gpu")
    samples, lengths = len(data), data["input_ids"].offsets().diff()
    groups = lengths.view(-1, forced).sum(1) if samples % forced == 0 else lengths
    for what, counts in {"sequence": lengths, "group": groups}.items() if limit else ():
        if (longest := int(counts.max())) > limit * cp:
            raise OptionError(
                f"the longest {what} has {longest} tokens, more than the limit of {limit} a rank"
                + (f" times cp={cp}" if cp > 1 else "")
                + f": set the limit (max_token_len_per_gpu) to {-(-longest // cp)}, or shorten samples"
            )
    if samples % (step := forced * step):
        name = f"groups of {step}" if limit else f"micro-batches of {step}"
        raise OptionError(
            f"{samples} samples do not divide into {name}: change the batch size, micro_batch_size_per_gpu or "
            "force_group_size, or set use_dynamic_bsz=True"
        )
    return forced, limit


def vocabulary_of(hf_config: Any) -> int | None:
    """Return the number of token ids that a model takes, ``None`` if its config has no number."""
    words = getattr(hf_config.get_text_config(), "vocab_size", None)
    # Some models have placeholders of images and sounds after their vocabulary, and replace them before they embed.
    named = [f"{kind}_token_{number}" for kind in ("image", "video", "audio") for number in ("id", "index")]
    placeholders = [getattr(hf_config, name, None) for name in named]
    return words and max(words, *(1 + value for value in placeholders if value is not None), 0)


def require_sound(data: Any, words: int | None) -> None:
    """Check samples, their tokens and temperatures; ``words`` as :func:`vocabulary_of` returns it."""
    ids = data["input_ids"]
    no_padding = DatasetPadMode.NO_PADDING
    if tensordict_utils.get_non_tensor_data(data, "pad_mode", no_padding) != no_padding or not ids.is_nested:
        raise OptionError("data.pad_mode must be no_padding: this engine reads nested batches")
    if not len(data):
        raise OptionError("it has no samples: give a batch of at least as many samples as ranks of dp")
    lengths = ids.offsets().diff()
    _require("has no tokens: leave it out", lengths > 0)
    of_samples = data["loss_mask"].is_nested and "response_mask" not in data  # else the mask covers responses only
    for name in ("position_ids", "loss_mask") if of_samples else ("position_ids",):
        counts = data[name].offsets().diff()
        _require(f"has {{}} {name} for {{}} tokens: give one a token", counts == lengths, counts, lengths)
    flat, samples = ids.values(), torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    if flat.is_floating_point():
        raise OptionError(f"input_ids are {flat.dtype}: give token ids as int64")
    inside = (flat >= 0) & (flat < words) if words else flat >= 0
    problem = f"has the token id {{}}, outside of the model's vocabulary of {words}: tokenize it for this model"
    _require(problem, inside, flat, samples=samples)
    given = tensordict_utils.get_non_tensor_data(data, "temperature", 1.0)  # a batch of SFT has no temperature
    given = torch.as_tensor(given, dtype=torch.float32)
    if given.shape not in ((), lengths.shape):
        raise OptionError(f"temperature has shape {[*given.shape]}: give a number, or one of each sample")
    given = given.expand(len(lengths))
    fine = (given > 0) & given.isfinite()
    _require("has the temperature {:g}: give a positive one, 1 where greedy tokens are scored", fine, given)
    prompts, mask = data.get("prompts", None), data.get("attention_mask", None)
    if prompts is not None and (prompts.is_nested or mask is not None):
        counts = prompts.offsets().diff() if prompts.is_nested else mask[:, : prompts.shape[1]].sum(1)
        _require("has an empty prompt, so that nothing scores its first token: give it a token", counts > 0)


def _require(problem: str, fine: Tensor, *values: Tensor, samples: Tensor | None = None) -> None:
    """Raise for the first invalid entry, with its values; ``samples``: the sample of each entry."""
    if not fine.all():
        at = int(fine.logical_not().nonzero()[0])
        sample = at if samples is None else int(samples[at])
        raise OptionError(f"sample {sample} " + problem.format(*(each[at].item() for each in values)))
