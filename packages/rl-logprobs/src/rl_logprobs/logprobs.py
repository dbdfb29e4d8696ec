"""Log-probabilities of target tokens from logits, or from hidden states and the LM head without logits in memory."""

from __future__ import annotations

import torch

from rl_logprobs.errors import OptionError
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.sampling_filter import SamplingFilter
from rl_logprobs.softmax.backends import Backend, chosen_backend, kernels_check, runs_triton
from rl_logprobs.softmax.log2_scale import check_temperature
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.vocab_parallel import TokenStatistics
from rl_logprobs.softmax.vocab_shard import VocabShard, locate_logits
from rl_logprobs.sources import LinearLogits, LogitSource, score
from rl_logprobs.targets import scored_targets
from rl_logprobs.tensors import require_same_device


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    shard: VocabShard | None = None,
    shift: bool = False,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    sampling: SamplingFilter | None = None,
    kept_tokens: KeptTokens | None = None,
    inplace_backward: bool = False,
    inplace_forward: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return the log-probability of each target under ``softmax(logits / temperature)``.

    One pass over the local logits and one collective forward, none backward; each rank gets the gradient of
    its own columns.  The logits keep their dtype, and no float32 copy of them is made.

    The arguments and errors are ``token_statistics``': ``[..., tokens, vocab]`` logits (plain, a DTensor that is
    sharded on the vocabulary, or a local shard), and targets of the logits' leading shape.

    Returns:
        This rank's tokens as a plain tensor of the logits' leading shape, float32 (float64 for float64 logits), the
        same on every rank that holds those tokens.

    Example:
        >>> import torch
        >>> from rl_logprobs import token_logprobs
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
        >>> token_logprobs(logits, torch.tensor([1, -100]))
        tensor([-0.4076,  0.0000])

        With DTensor logits, sharded on the vocabulary, the call is the same on every rank.
    """
    return token_statistics(
        logits,
        targets,
        shard=shard,
        shift=shift,
        temperature=temperature,
        ignore_index=ignore_index,
        sampling=sampling,
        kept_tokens=kept_tokens,
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
    target_rank: bool = False,
    shard: VocabShard | None = None,
    shift: bool = False,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    sampling: SamplingFilter | None = None,
    kept_tokens: KeptTokens | None = None,
    inplace_backward: bool = False,
    inplace_forward: bool = False,
    backend: Backend | None = None,
) -> TokenStatistics:
    """Return the log-probability, log-sum-exp and other statistics of each token, from one pass and one collective.

    Args:
        logits: ``[batch, seq, vocab]`` or packed ``[tokens, vocab]`` (any leading dims), float16, bfloat16,
            float32 or float64.  A plain tensor; a DTensor with the vocabulary sharded over one axis of its
            mesh (any size; tokens may be sharded over other axes); or, with ``shard``, a local shard.
        targets: integers of the logits' leading shape: the full batch, or this rank's part where a DTensor
            shards the tokens.  Plain or DTensor, on the device of the logits.
        entropy: also compute the entropy; needs a second workspace and some arithmetic, no communication.
        argmax: also compute the most probable token.
        target_rank: also count the tokens that are more probable than the target.  Needs a second collective, because
            the ranks cannot count before they know the target's logit.  A filter does not change the count.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        shift: take ``targets`` as token ids and score position ``i`` against token ``i + 1``; the last
            position gets 0.
        temperature: positive number, or positive tensor that broadcasts to this rank's targets.
        ignore_index: target of tokens that are not scored: values 0 and gradient 0, whatever their logits.
        sampling: score under the filtered and renormalised distribution of a sampler with these settings, entropy
            included.  A target that the filter removes has ``-inf`` and no gradient.  Needs a few more collectives.
        kept_tokens: normalise over the ids that the sampler kept, one row per target, for a full batch or for this
            rank's tokens; all statistics cover the kept ids, and gradients go to kept columns only.  Reads the kept
            logits alone, with torch's own operations on every backend.  Not together with ``sampling``.
        inplace_backward: write the gradient over the logits' memory instead of a second tensor of their size.
            The logits are lost in the backward pass.
        inplace_forward: if the logits need a gradient, overwrite them in the forward pass by values that the backward
            pass would otherwise compute again.  Faster, but gradients of half-precision logits are rounded twice.  Not
            together with ``entropy``: its gradient needs the logits.
        backend: ``"triton"`` for Triton's kernels, ``"torch"`` for torch's own operations; by default the value of the
            environment variable ``RL_LOGPROBS_BACKEND``, or Triton on a GPU and torch elsewhere.

    Returns:
        The statistics of this rank's tokens.  All are differentiable except ``argmax`` and ``target_rank``.

    Raises:
        ShapeError: the shapes or widths contradict each other.
        PlacementError: the logits are a partial sum, their vocabulary is sharded over two mesh axes, or the targets are
            a DTensor placed differently from the logits' tokens.
        DtypeError: the logits are not floating point, or the targets are not integers.
        OptionError: an option is outside its range, or options contradict each other.
        TargetError: a target is outside the vocabulary or its kept set.
        KeptTokensError: the kept set of a scored token is empty, or contains an id outside the vocabulary.  All errors
            are raised before any collective starts.

    Example:
        >>> import torch
        >>> from rl_logprobs import token_statistics
        >>> stats = token_statistics(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2]), entropy=True, target_rank=True)
        >>> stats.logprobs, stats.entropy, stats.target_rank
        (tensor([-1.4076]), tensor([0.8324]), tensor([1]))
    """
    if inplace_forward and entropy:
        raise OptionError("inplace_forward loses the logits that the entropy's gradient needs; use inplace_backward")
    if kept_tokens is not None and sampling is not None:
        raise OptionError("kept_tokens are filtered already: leave out sampling, which would filter them again")
    located = locate_logits(logits, shard)
    chosen, vocab_size = chosen_backend(backend, located.values.device), located.vocab.vocab_size
    check = not (chosen == "triton" and kept_tokens is None and kernels_check(located.values.device))
    scored = scored_targets(targets, located.tokens, vocab_size, shift=shift, ignore_index=ignore_index, check=check)
    require_same_device(logits=located.values, targets=scored.ids)
    options = SoftmaxOptions(
        check_temperature(temperature, scored.ids),
        entropy,
        argmax,
        target_rank,
        inplace_backward=inplace_backward or (kept_tokens is not None and inplace_forward),
        inplace_forward=inplace_forward and located.values.requires_grad and torch.is_grad_enabled(),
    )
    source = LogitSource(**vars(located), sampling=sampling, backend=chosen, inplace_backward=options.inplace_backward)
    return score(source, scored, kept_tokens, options)


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | torch.Tensor = 1.0,
    shard: VocabShard | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    kept_tokens: KeptTokens | None = None,
) -> torch.Tensor:
    """Return the log-probability of each target under the LM head's softmax, without a ``[tokens, vocab / tp]`` tensor.

    One collective forward; backward one more, for the hidden gradient.  A head that needs no gradient costs one more
    product forward and none backward.

    The arguments and errors are ``linear_token_statistics``': ``[..., tokens, features]`` hidden states, the head's
    ``[vocab, features]`` weight (plain, a DTensor, or a local shard), and targets of hidden's leading shape.

    Returns:
        Float32 (float64 for float64 inputs) of hidden's leading shape, after the gather of sharded tokens.

    Example:
        >>> import torch
        >>> from rl_logprobs import linear_token_logprobs
        >>> hidden, head = torch.tensor([[1.0, 2.0]]), torch.nn.Linear(2, 3, bias=False)
        >>> _ = head.weight.data.copy_(torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> linear_token_logprobs(hidden, head.weight.detach(), torch.tensor([1]))
        tensor([-0.4076])
    """
    return linear_token_statistics(
        hidden,
        weight,
        targets,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        shard=shard,
        shift=shift,
        ignore_index=ignore_index,
        kept_tokens=kept_tokens,
    ).logprobs


def linear_token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool = False,
    argmax: bool = False,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | torch.Tensor = 1.0,
    shard: VocabShard | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    kept_tokens: KeptTokens | None = None,
) -> TokenStatistics:
    """Return the log-probability, log-sum-exp and other statistics of each token under the LM head's softmax.

    Logits are ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``, computed tile by tile in
    float32 both forward and backward (the method of "Cut Your Losses", arXiv:2411.09009), so that bfloat16
    inputs lose nothing to bfloat16 logits.

    Args:
        hidden: ``[batch, seq, features]`` or ``[tokens, features]``, floating point.  A plain tensor that is the same
            on every rank of the vocabulary's axis, or a DTensor that is replicated or (sequence parallelism) sharded
            on the tokens there; a sharded one is gathered, and its gradient reduce-scattered.
        weight: ``[vocab, features]``, floating point: a plain tensor; a DTensor with rows sharded over one axis
            of its mesh; or, with ``shard``, a local shard.  Its other axes must be replicated: use an FSDP head while
            it is unsharded.
        targets: integers of hidden's leading shape: the full batch, or the tokens that this rank has after the gather.
            Plain or DTensor.
        entropy: also compute the entropy.
        argmax: also compute the most probable token.
        bias: ``[vocab]``, with the placements of the weight's rows.
        logit_scale: factor on the products (Cohere, Granite).
        softcap: positive bound of the logits (Gemma 2).
        temperature: positive number, or positive tensor that broadcasts to this rank's targets.
        shard: which ids the rows of a local weight are, or how many ids are no padding; see ``VocabShard``.
        shift: as for ``token_statistics``.
        ignore_index: target of tokens that are not scored: values 0 and gradient 0, whatever their hidden states.
        kept_tokens: as for ``token_statistics``, for the tokens after the gather.  Small sets read the kept rows of the
            head and no others, large ones compute all logits of a few tokens at a time, whichever costs less; only kept
            rows have a gradient.

    Returns:
        The statistics.  All are differentiable except ``argmax``; ``target_rank`` is None.

    Raises:
        PlacementError: hidden is sharded on the features, the weight on another dim than its rows, or bias or
            targets are placed differently from weight or hidden.
        LogprobsError: as ``token_statistics``, of hidden, weight and bias in place of the logits.

    Example:
        >>> import torch
        >>> from rl_logprobs import linear_token_statistics
        >>> weight = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> stats = linear_token_statistics(torch.tensor([[1.0, 2.0]]), weight, torch.tensor([2]), entropy=True)
        >>> stats.logprobs, stats.entropy
        (tensor([-1.4076]), tensor([0.8324]))
    """
    source = LinearLogits(hidden, weight, bias, logit_scale, softcap, shard).located()
    require_same_device(hidden=hidden, targets=targets)
    check = not (kept_tokens is None and runs_triton(hidden.device) and kernels_check(hidden.device))
    vocab_size = source.vocab.vocab_size
    scored = scored_targets(targets, source.tokens, vocab_size, shift=shift, ignore_index=ignore_index, check=check)
    options = SoftmaxOptions(check_temperature(temperature, scored.ids), entropy, argmax)
    return score(source, scored, kept_tokens, options)
