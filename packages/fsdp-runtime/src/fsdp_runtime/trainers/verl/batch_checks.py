"""Checks of one rank's samples for values that make a model or loss fail on that rank alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl.verl_api import DatasetPadMode, tensordict_utils


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
