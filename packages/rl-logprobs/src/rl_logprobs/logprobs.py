"""Log-probabilities of chosen tokens, from logits that are whole or sharded on the vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import assert_on_device
from rl_logprobs.backends import Backend, kernels
from rl_logprobs.errors import OptionError, ShapeError
from rl_logprobs.layout import locate_logits
from rl_logprobs.sampling_filter import SamplingFilter, sampling_floor
from rl_logprobs.targets import ignored_targets, local_targets
from rl_logprobs.vocab_parallel import SoftmaxOptions, SoftmaxStatistics, softmax_statistics


@dataclass(frozen=True)
class TokenStatistics:
    """What one pass over the logits says of each token; float32 (float64 for float64 logits), in nats.

    Every field has the shape of the logits' leading dims and is 0 where the target is ``ignore_index``.

    Attributes:
        logprobs: log-probability of the target.
        logsumexp: log of the partition sum; its square is the z-loss of PaLM (arXiv:2204.02311, section 5).
        entropy: entropy of the distribution, or None if it was not asked for.
        argmax: the most probable vocabulary id (the lowest of several), int64, or None if it was not asked
            for.
        rank: how many tokens have a larger logit than the target (0: none is more probable), int64, or None if it
            was not asked for.
    """

    logprobs: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    rank: torch.Tensor | None = None


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    shift: bool = False,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    sampling: SamplingFilter | None = None,
    inplace_backward: bool = False,
    inplace_forward: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Log-probability of each target under ``softmax(logits / temperature)``.

    One pass over the local logits and one collective forward, none backward; each rank's gradient is that of
    its own columns.  The logits keep their dtype, and no float32 copy of them is made.

    Args:
        logits: ``[batch, seq, vocab]`` or packed ``[tokens, vocab]`` (any leading dims), float16, bfloat16,
            float32 or float64.  A plain tensor; a DTensor whose vocabulary is sharded over one axis of any
            mesh (any vocabulary size; tokens may be sharded over other axes); or, with ``group``, a local
            shard.
        targets: integers of the logits' leading shape: the full batch, or this rank's part where a DTensor
            shards the tokens.  Plain or DTensor.
        group: for a local shard: the process group over which the vocabulary is split.
        vocab_size: tokens in the vocabulary; columns at or beyond it are padding and get probability 0.
            Needed with ``group``, optional otherwise.
        vocab_start: for a local shard: its first vocabulary id, where the layout is neither DTensor's (chunks
            of ceil(vocab / ranks)) nor Megatron's (all ranks padded to one width).
        shift: take ``targets`` as token ids and score position ``i`` against token ``i + 1``; the last
            position gets 0.
        temperature: positive number, or positive tensor that broadcasts to the targets of this rank.
        ignore_index: target of tokens that are not scored: value 0 and gradient 0, whatever their logits.
        sampling: score under the filtered and renormalised distribution that a sampler with these settings draws
            from.  A target that the filter removes has ``-inf`` and no gradient.  Takes a few collectives more.
        inplace_backward: write the gradient over the logits' memory, so that no second tensor of their size
            exists.  The logits are then lost after the backward pass.
        inplace_forward: if the logits need a gradient, overwrite them already here, by what the backward pass would
            compute again: faster, but lost at once, and gradients of half-precision logits are rounded twice.
        backend: ``"triton"`` for Triton kernels on a GPU, ``"torch"`` for torch's own operations; if left out, what
            the environment variable ``RL_LOGPROBS_BACKEND`` says, or else torch.

    Returns:
        This rank's tokens as a plain tensor of the logits' leading shape, float32 (float64 for float64), the
        same on every rank that shares those tokens.

    Raises:
        ShapeError, PlacementError, DtypeError, OptionError, TargetError: input that cannot be scored, found
            before any collective starts.
    """
    return token_statistics(
        logits,
        targets,
        group=group,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        shift=shift,
        temperature=temperature,
        ignore_index=ignore_index,
        sampling=sampling,
        inplace_backward=inplace_backward,
        inplace_forward=inplace_forward,
        backend=backend,
    ).logprobs


def token_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool = False,
    argmax: bool = False,
    rank: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    shift: bool = False,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    sampling: SamplingFilter | None = None,
    inplace_backward: bool = False,
    inplace_forward: bool = False,
    backend: Backend | None = None,
) -> TokenStatistics:
    """Log-probability, log-sum-exp and what else is asked of each token, from one pass and one collective.

    Args:
        logits: as for ``token_logprobs``.
        targets: as there.
        entropy: also compute the entropy; costs a second workspace and some arithmetic, no communication.
        argmax: also find the most probable token.
        rank: also count the tokens that are more probable than the target; takes a second collective, because a rank
            cannot count before it knows the target's logit.  A filter does not change the count.
        group: as there.
        vocab_size: as there.
        vocab_start: as there.
        shift: as there.
        temperature: as there.
        ignore_index: as there.
        sampling: as there; the entropy is then that of the filtered distribution too.
        inplace_backward: as there.
        inplace_forward: as there; without ``entropy``, whose gradient needs the logits.
        backend: as there.

    Returns:
        The statistics, each differentiable but ``argmax`` and ``rank``.

    Raises:
        ShapeError, PlacementError, DtypeError, OptionError, TargetError: as ``token_logprobs``.
    """
    if inplace_forward and entropy:
        raise OptionError("inplace_forward loses the logits that the entropy's gradient needs; use inplace_backward")
    located = locate_logits(logits, group=group, vocab_size=vocab_size, vocab_start=vocab_start)
    mine = local_targets(targets, located.tokens, shift=shift, ignore_index=ignore_index)
    if mine.device != located.values.device:
        raise OptionError(f"targets are on {mine.device} and logits on {located.values.device}; move the targets")
    ignored = ignored_targets(mine, vocab_size=located.vocab.vocab_size, ignore_index=ignore_index)
    heat = checked_temperature(temperature, mine)
    options = SoftmaxOptions(
        temperature=heat,
        entropy=entropy,
        argmax=argmax,
        rank=rank,
        floor=None if sampling is None else sampling_floor(located.values, located.vocab, heat, sampling),
        inplace_backward=inplace_backward,
        inplace_forward=inplace_forward and located.values.requires_grad and torch.is_grad_enabled(),
        kernels=kernels(backend, located.values.device),
    )
    flat = softmax_statistics(located.values, mine.reshape(-1), ignored.reshape(-1), located.vocab, options)
    return shaped_like(mine, flat)


def shaped_like(targets: torch.Tensor, flat: SoftmaxStatistics) -> TokenStatistics:
    """Flat statistics in the shape of their targets."""
    return TokenStatistics(
        logprobs=flat.logprobs.view(targets.shape),
        logsumexp=flat.logsumexp.view(targets.shape),
        entropy=None if flat.entropy is None else flat.entropy.view(targets.shape),
        argmax=None if flat.argmax is None else flat.argmax.view(targets.shape),
        rank=None if flat.rank is None else flat.rank.view(targets.shape),
    )


def checked_temperature(temperature: float | torch.Tensor, targets: torch.Tensor) -> float | torch.Tensor:
    """A positive, finite temperature: a number, or a flat tensor with one value a token.

    Raises:
        OptionError: not positive and finite (on an accelerator a tensor is checked there).
        ShapeError: a tensor that does not broadcast to the targets.
    """
    if not isinstance(temperature, torch.Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise OptionError(f"temperature must be positive and finite, got {temperature}")
        return float(temperature)
    try:
        flat = temperature.detach().to(targets.device).expand(targets.shape).reshape(-1)
    except RuntimeError as error:
        raise ShapeError(
            f"temperature of shape {tuple(temperature.shape)} does not broadcast to the targets' {tuple(targets.shape)}"
        ) from error
    valid = ((flat > 0) & flat.isfinite()).all()
    if flat.device.type != "cpu":
        assert_on_device(valid, "temperature must be positive and finite")
    elif not valid:
        raise OptionError(f"temperatures must be positive and finite, the least is {flat.min().item()}")
    return flat
