"""Targets: checked, shifted to the next token, and cut to the tokens that this rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from rl_logprobs._torch_compat import assert_on_device, local_shape_and_offset
from rl_logprobs.errors import DtypeError, PlacementError, ShapeError, TargetError
from rl_logprobs.layout import TokenSlice


def next_token_targets(
    token_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Targets that score each position against the token after it, across no boundary and no padding.

    Args:
        token_ids: ``[..., seq]`` integers.
        attention_mask: ``[..., seq]``, nonzero at tokens and zero at padding on either side; a position is
            scored only if it and the next one are tokens.
        cu_seqlens: ``[sequences + 1]``, where each packed sequence begins along the last dim, and its length.
        ignore_index: the target of positions that are not scored, such as the last.

    Returns:
        ``[..., seq]`` int64: position ``i`` holds ``token_ids[..., i + 1]`` or ``ignore_index``.

    Raises:
        ShapeError: the mask has another shape, or ``cu_seqlens`` does not rise from 0 to ``seq`` (on an
            accelerator its values are checked there).
        DtypeError: ``cu_seqlens`` is not an integer tensor.
    """
    token_ids = token_ids.long()
    last = torch.full_like(token_ids[..., :1], ignore_index)
    targets = torch.cat([token_ids[..., 1:], last], dim=-1)
    if attention_mask is not None:
        if attention_mask.shape != token_ids.shape:
            raise ShapeError(
                f"attention_mask has shape {tuple(attention_mask.shape)} and token_ids {tuple(token_ids.shape)}"
            )
        scored = (attention_mask[..., :-1] != 0) & (attention_mask[..., 1:] != 0)
        targets[..., :-1].masked_fill_(~scored, ignore_index)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, token_ids.shape[-1])
        # An empty sequence points at the end of the one before it, or at the last position: both are ends.
        targets.index_fill_(-1, (cu_seqlens[1:].long() - 1) % token_ids.shape[-1], ignore_index)
    return targets


def check_cu_seqlens(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """See that packed sequences cover ``tokens`` tokens in order.

    Raises:
        ShapeError, DtypeError: as ``next_token_targets``.
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError(f"cu_seqlens must be [sequences + 1], got shape {tuple(cu_seqlens.shape)}")
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (cu_seqlens.diff() >= 0).all()
    if cu_seqlens.device.type != "cpu":
        assert_on_device(right, f"cu_seqlens must rise from 0 to {tokens}")
    elif not right:
        raise ShapeError(
            f"cu_seqlens must rise from 0 to the {tokens} tokens; it goes from {cu_seqlens[0].item()} to "
            f"{cu_seqlens[-1].item()}" + (" and falls in between" if (cu_seqlens.diff() < 0).any() else "")
        )


def local_targets(
    targets: torch.Tensor, tokens: TokenSlice, *, shift: bool = False, ignore_index: int = -100, name: str = "targets"
) -> torch.Tensor:
    """The targets of the tokens that this rank holds, as a plain tensor of their shape.

    Args:
        targets: integers for the full batch (``tokens.full``) or for this rank's tokens (``tokens.shape``).
        tokens: where this rank's logits lie in the batch.
        shift: whether ``targets`` are token ids to be shifted by one position first.
        ignore_index: the target that stands for "no target".
        name: what error messages call the tensor.

    Raises:
        DtypeError: the targets are not integers.
        ShapeError: their shape fits neither the full batch nor this rank's part of it, or a shift would need
            the next rank's first token.
        PlacementError: a DTensor that lies differently from the logits.
    """
    if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise DtypeError(f"{name} must be integer vocabulary ids, got {targets.dtype}")
    whole = tuple(targets.shape) == tokens.full
    if isinstance(targets, DTensor):
        shape, offset = local_shape_and_offset(targets)
        whole = whole and shape == tokens.full
        if not whole and (tuple(targets.shape), shape, offset) != (tokens.full, tokens.shape, tokens.offset):
            raise PlacementError(
                f"{name} of shape {tuple(targets.shape)} with {targets.placements} do not lie like "
                f"the logits' tokens {tokens.shape} of {tokens.full}; replicate them or place them likewise"
            )
        targets = targets.to_local()
    elif not whole and tuple(targets.shape) != tokens.shape:
        raise ShapeError(
            f"{name} of shape {tuple(targets.shape)} where the logits need {tokens.full}"
            + (f", or {tokens.shape} for this rank's tokens alone" if tokens.shape != tokens.full else "")
        )
    targets = targets.long()
    if shift:
        if not whole and tokens.shape[-1] != tokens.full[-1]:
            raise ShapeError(
                f"shift needs the whole sequence of {tokens.full[-1]} token ids, because the last of "
                f"this rank's {tokens.shape[-1]} is scored against the next rank's first; pass ids of {tokens.full}"
            )
        targets = next_token_targets(targets, ignore_index=ignore_index)
    return tokens.of(targets) if whole else targets


def ignored_targets(targets: torch.Tensor, *, vocab_size: int, ignore_index: int) -> torch.Tensor:
    """Bool of the targets' shape: which are ``ignore_index``.  The others must be inside the vocabulary.

    Raises:
        TargetError: a target outside ``[0, vocab_size)`` that is not ``ignore_index``.  On an accelerator the
            check runs there and fails as a device-side assertion, so that the host need not wait.
    """
    ignored = targets == ignore_index
    valid = ignored | ((targets >= 0) & (targets < vocab_size))
    if targets.device.type != "cpu":
        assert_on_device(valid.all(), f"a target is outside [0, {vocab_size}) and is not {ignore_index}")
    elif not valid.all():
        wrong = targets[~valid]
        raise TargetError(
            f"{wrong.numel()} of {targets.numel()} targets are outside [0, {vocab_size}), the first is "
            f"{wrong[0].item()}; mark tokens without a target with ignore_index ({ignore_index})"
        )
    return ignored
