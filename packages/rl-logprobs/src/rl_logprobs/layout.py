"""How logits lie across ranks: which columns of the vocabulary, and which tokens, this rank holds.

Everything here is decided from shapes and placements alone, so that a mistake is reported on every rank
before any of them starts a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from rl_logprobs._torch_compat import local_shape_and_offset
from rl_logprobs.errors import DtypeError, OptionError, PlacementError, ShapeError


@dataclass(frozen=True)
class VocabShard:
    """The columns ``[start, start + width)`` of ``vocab_size`` that one rank of ``group`` holds.

    ``width`` leaves out padded columns: those at or beyond ``vocab_size`` belong to no token.  ``group`` is
    None where one rank holds every column.
    """

    start: int
    width: int
    vocab_size: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class TokenSlice:
    """Which tokens this rank holds: ``shape`` of them from ``offset``, out of ``full`` (leading dims)."""

    full: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def of(self, per_token: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that has one value a token of the full batch."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            per_token = per_token.narrow(dim, start, length)
        return per_token


@dataclass(frozen=True)
class LocalLogits:
    """Logits as this rank holds them, and where they belong."""

    values: torch.Tensor
    vocab: VocabShard
    tokens: TokenSlice


def locate_logits(
    logits: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
    vocab_start: int | None,
) -> LocalLogits:
    """Find this rank's columns and tokens of ``logits``; see ``token_logprobs`` for the arguments.

    Raises:
        DtypeError: the logits are not floating point.
        ShapeError: they have no vocabulary dim or no tokens, or the widths contradict each other.
        PlacementError: a DTensor that is a partial sum, or whose vocabulary is dealt over two mesh axes.
        OptionError: ``group`` given for a DTensor, or a group without a way to tell the columns apart.
    """
    if not logits.is_floating_point():
        raise DtypeError(f"logits must be floating point, got {logits.dtype}; pass the head's output itself")
    if logits.dim() < 2 or 0 in logits.shape[:-1]:
        raise ShapeError(
            f"logits must be [..., tokens, vocab] with at least one token, got shape {tuple(logits.shape)}"
        )
    if isinstance(logits, DTensor):
        if group is not None or vocab_start is not None:
            raise OptionError("a DTensor knows its own layout: leave out group and vocab_start")
        return _locate_dtensor(logits, vocab_size)
    leading = tuple(logits.shape[:-1])
    return LocalLogits(
        values=logits,
        vocab=locate_columns(logits.shape[-1], group, vocab_size, vocab_start),
        tokens=TokenSlice(full=leading, shape=leading, offset=(0,) * len(leading)),
    )


def vocabulary_axis(tensor: DTensor, dim: int) -> int | None:
    """The mesh dim over which ``dim`` of ``tensor`` (a vocabulary) is dealt in contiguous chunks, if any.

    Raises:
        PlacementError: a partial sum, a strided shard, or a vocabulary dealt over two mesh axes.
    """
    found: list[int] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise PlacementError(
                f"the tensor is a partial sum over mesh dim {mesh_dim} ({tensor.placements}); redistribute "
                f"it to Shard({dim}) there before taking log-probabilities"
            )
        sharded_dim = getattr(placement, "dim", None)
        if sharded_dim is None or sharded_dim % tensor.dim() != dim:
            continue
        if type(placement) is not Shard:
            raise PlacementError(
                f"the vocabulary (dim {dim}) is dealt in strides ({placement}); redistribute it to Shard({dim})"
            )
        if tensor.device_mesh.size(mesh_dim) > 1:
            found.append(mesh_dim)
    if len(found) > 1:
        raise PlacementError(
            f"the vocabulary (dim {dim}) is sharded over {len(found)} mesh dims ({tensor.placements}); "
            f"shard it over one and replicate or shard the tokens over the others"
        )
    return found[0] if found else None


def locate_vocabulary(tensor: DTensor, dim: int, vocab_size: int | None) -> VocabShard:
    """Which vocabulary ids a DTensor's local shard holds along ``dim``; see ``vocabulary_axis`` for refusals.

    Raises:
        ShapeError: ``vocab_size`` exceeds the DTensor's own size.
    """
    axis = vocabulary_axis(tensor, dim)
    shape, offset = local_shape_and_offset(tensor)
    columns = tensor.shape[dim]
    if vocab_size is not None and not 0 < vocab_size <= columns:
        raise ShapeError(f"vocab_size {vocab_size} is outside 1..{columns}, the tensor's own columns")
    return VocabShard(
        start=offset[dim],
        width=_clip_width(offset[dim], shape[dim], vocab_size or columns),
        vocab_size=vocab_size or columns,
        group=None if axis is None else tensor.device_mesh.get_group(axis),
    )


def locate_tokens(tensor: DTensor, placements: Sequence[Placement] | None = None) -> TokenSlice:
    """Which tokens (all dims but the last) the local part of ``tensor`` holds, or would under ``placements``."""
    shape, offset = local_shape_and_offset(tensor, placements)
    return TokenSlice(tuple(tensor.shape[:-1]), shape[:-1], offset[:-1])


def _locate_dtensor(logits: DTensor, vocab_size: int | None) -> LocalLogits:
    vocab = locate_vocabulary(logits, logits.dim() - 1, vocab_size)
    values = logits.to_local()
    shape, _ = local_shape_and_offset(logits)
    if tuple(values.shape) != shape:
        raise ShapeError(
            f"the local shard has shape {tuple(values.shape)} where a DTensor of shape {tuple(logits.shape)} "
            f"with {logits.placements} has {shape} on this rank; give DTensor.from_local the full shape"
        )
    return LocalLogits(values, vocab, locate_tokens(logits))


def locate_columns(
    columns: int, group: dist.ProcessGroup | None, vocab_size: int | None, vocab_start: int | None
) -> VocabShard:
    """Which vocabulary ids a plain tensor's ``columns`` are; with a group, those of this rank.

    Raises:
        ShapeError: the numbers contradict each other.
        OptionError: a group without ``vocab_size``.
    """
    if vocab_size is not None and vocab_size < 1:
        raise ShapeError(f"vocab_size must be positive, got {vocab_size}")
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        if vocab_size is not None and vocab_size > columns:
            raise ShapeError(f"vocab_size {vocab_size} exceeds the {columns} columns of unsharded logits")
        return VocabShard(0, vocab_size or columns, vocab_size or columns, None)
    if vocab_size is None:
        raise OptionError(
            "a local shard with a process group needs vocab_size, the number of tokens in the whole "
            "vocabulary: without it a rank cannot tell which columns it holds"
        )
    start = vocab_start if vocab_start is not None else _first_column(columns, group, vocab_size)
    return VocabShard(start, _clip_width(start, columns, vocab_size), vocab_size, group)


def _first_column(columns: int, group: dist.ProcessGroup | None, vocab_size: int) -> int:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunk = -(-vocab_size // ranks)
    start = min(rank * chunk, vocab_size)
    if columns == min(chunk, vocab_size - start):
        return start
    if columns * ranks >= vocab_size and columns >= chunk:  # every rank padded to one width, as Megatron does
        return rank * columns
    raise ShapeError(
        f"rank {rank} of {ranks} holds {columns} columns; a vocabulary of {vocab_size} is dealt either in "
        f"chunks of {chunk} (here {min(chunk, vocab_size - start)}) or padded to equal widths of at least "
        f"{chunk}. Pass vocab_start for any other layout"
    )


def _clip_width(start: int, columns: int, vocab_size: int) -> int:
    return max(0, min(columns, vocab_size - start))
