"""Targets: shifted to the next token, checked, and restricted to the tokens that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from rl_logprobs._torch_compat import local_shape_and_offset
from rl_logprobs.errors import DtypeError, OptionError, PlacementError, ShapeError, TargetError
from rl_logprobs.softmax.vocab_shard import TokenSlice
from rl_logprobs.tensors import fails, require_same_device


def next_token_targets(
    token_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return targets that score each position against the next token, except across boundaries and padding.

    Args:
        token_ids: ``[..., seq]`` integers.
        attention_mask: ``[..., seq]``, nonzero at tokens and 0 at padding on either side; a position is
            scored only if it and the next one are tokens.
        cu_seqlens: ``[sequences + 1]`` int32 or int64, the start of each packed sequence along the last dim, and
            ``seq`` at the end.
        ignore_index: target of positions that are not scored, such as the last.

    Returns:
        ``[..., seq]`` int64: position ``i`` holds ``token_ids[..., i + 1]`` or ``ignore_index``.

    Raises:
        ShapeError: the ids have no dim, the mask has another shape, or ``cu_seqlens`` does not ascend from 0 to
            ``seq`` (on an accelerator its values are checked there).
        DtypeError: the ids are not integers, or ``cu_seqlens`` is not int32 or int64.
        OptionError: the devices differ, or ``ignore_index`` is beyond 64 bits.

    Example:
        >>> import torch
        >>> from rl_logprobs import next_token_targets
        >>> next_token_targets(torch.tensor([5, 6, 7, 8, 9]), cu_seqlens=torch.tensor([0, 3, 5]))
        tensor([   6,    7, -100,    9, -100])
    """
    require_ids(token_ids, "token_ids")
    _check_ignore_index(ignore_index)
    if token_ids.dim() == 0:
        raise ShapeError("token_ids must be [..., seq], got a tensor without dims")
    require_same_device(token_ids=token_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens)
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
        # An empty sequence has the end index of the sequence before it, or -1 at the front, which is the last position.
        targets.index_fill_(-1, (cu_seqlens[1:].long() - 1) % token_ids.shape[-1], ignore_index)
    return targets


def require_ids(tensor: torch.Tensor, name: str) -> None:
    """Check that a tensor holds integers that can be vocabulary ids."""
    if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise DtypeError(f"{name} must be integer vocabulary ids, got {tensor.dtype}")


def _check_ignore_index(ignore_index: int) -> None:
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise OptionError(f"ignore_index must be an integer of 64 bits, got {ignore_index}")


def check_cu_seqlens(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Check that packed sequences cover ``tokens`` tokens in order."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError(f"cu_seqlens must be [sequences + 1], got shape {tuple(cu_seqlens.shape)}")
    require_ascending(cu_seqlens, "cu_seqlens", tokens, "tokens")


def require_ascending(offsets: torch.Tensor, name: str, last: int, counted: str) -> None:
    """Check that offsets ascend from 0 to ``last``; on an accelerator without waiting for it."""
    valid = (offsets[0] == 0) & (offsets[-1] == last) & (offsets.diff() >= 0).all()
    if fails(valid, f"{name} must ascend from 0 to {last}"):
        raise ShapeError(
            f"{name} must ascend from 0 to the {last} {counted}, got values from {offsets[0].item()} to "
            f"{offsets[-1].item()}" + (", with one that descends in between" if (offsets.diff() < 0).any() else "")
        )


def local_targets(
    targets: torch.Tensor, tokens: TokenSlice, *, shift: bool = False, ignore_index: int = -100, name: str = "targets"
) -> torch.Tensor:
    """Return the targets of the tokens that this rank holds, as a plain int64 tensor."""
    # They are given for the full batch (``tokens.full``) or for this rank's tokens (``tokens.shape``).
    require_ids(targets, name)
    is_full = tuple(targets.shape) == tokens.full
    if isinstance(targets, DTensor):
        shape, offset = local_shape_and_offset(targets)
        is_full = is_full and shape == tokens.full
        if not is_full and (tuple(targets.shape), shape, offset) != (tokens.full, tokens.shape, tokens.offset):
            raise PlacementError(
                f"{name} of shape {tuple(targets.shape)} with {targets.placements} are placed differently from "
                f"the logits' tokens {tokens.shape} of {tokens.full}; replicate them or place them likewise"
            )
        targets = targets.to_local()
    elif not is_full and tuple(targets.shape) != tokens.shape:
        raise ShapeError(
            f"{name} of shape {tuple(targets.shape)} where the logits need {tokens.full}"
            + (f", or {tokens.shape} for this rank's tokens alone" if tokens.shape != tokens.full else "")
        )
    targets = targets.long()
    if shift:
        if not is_full and tokens.shape[-1] != tokens.full[-1]:
            raise ShapeError(
                f"shift needs the full sequence of {tokens.full[-1]} token ids, because the last of "
                f"this rank's {tokens.shape[-1]} is scored against the next rank's first; pass ids of {tokens.full}"
            )
        targets = next_token_targets(targets, ignore_index=ignore_index)
    return tokens.local(targets) if is_full else targets


@dataclass(frozen=True)
class Targets:
    """The targets of a rank's tokens."""

    ids: torch.Tensor  # int64, of the shape of its tokens
    ignore_index: int  # the id of tokens that are not scored
    shifted: bool = False  # the ids were shifted by one position

    @cached_property
    def ignored(self) -> torch.Tensor:
        """Whether each token is not scored, of the ids' shape."""
        return self.ids == self.ignore_index


def scored_targets(
    targets: torch.Tensor,
    tokens: TokenSlice,
    vocab_size: int,
    *,
    shift: bool = False,
    ignore_index: int = -100,
    check: bool = True,
) -> Targets:
    """Return the targets of the tokens that this rank holds; ``check`` compares them with the vocabulary."""
    _check_ignore_index(ignore_index)
    scored = Targets(local_targets(targets, tokens, shift=shift, ignore_index=ignore_index), ignore_index, shift)
    if not check:
        return scored
    valid = scored.ignored | ((scored.ids >= 0) & (scored.ids < vocab_size))
    if fails(valid.all(), f"a target is outside [0, {vocab_size}) and is not {ignore_index}"):
        wrong = scored.ids[~valid]
        raise TargetError(
            f"{wrong.numel()} of {valid.numel()} targets are outside [0, {vocab_size}), the first is "
            f"{wrong[0].item()}; mark tokens without a target with ignore_index ({ignore_index})"
        )
    return scored
