"""The shard of the logits that this rank holds: its columns of the vocabulary, and its tokens.

Everything here follows from shapes and placements alone, so that a mistake raises on every rank before any rank starts
a collective.
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

    ``width`` excludes padded columns, those at or beyond ``vocab_size``.  ``group`` is None where one rank holds every
    column.
    """

    start: int
    width: int
    vocab_size: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class TokenSlice:
    """The tokens that this rank holds: ``shape`` tokens from ``offset`` of the batch's ``full`` (leading dims)."""

    full: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def all_of(cls, leading: Sequence[int]) -> TokenSlice:
        """Return the slice that contains every token of a batch with these leading dims."""
        return cls(full=tuple(leading), shape=tuple(leading), offset=(0,) * len(leading))

    def local(self, per_token: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor with one value per token of the full batch."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            per_token = per_token.narrow(dim, start, length)
        return per_token


@dataclass(frozen=True)
class LocalLogits:
    """The local shard of the logits, with its position in the vocabulary and in the batch."""

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
    """Return this rank's shard of ``logits``; the arguments are those of ``rl_logprobs.token_logprobs``.

    Raises:
        DtypeError: the logits are not floating point.
        ShapeError: the logits have no vocabulary dim or no tokens, or the widths contradict each other.
        PlacementError: the logits are a partial sum, or the vocabulary is sharded over two mesh axes.
        OptionError: ``group`` or ``vocab_start`` is given for a DTensor, or ``group`` without ``vocab_size``.
    """
    if not logits.is_floating_point() or logits.layout is not torch.strided:
        raise DtypeError(
            f"logits must be floating point and dense, got {logits.dtype} {logits.layout}; pass the LM head's output"
        )
    if logits.dim() < 2 or 0 in logits.shape[:-1]:
        raise ShapeError(
            f"logits must be [..., tokens, vocab] with at least one token, got shape {tuple(logits.shape)}"
        )
    if isinstance(logits, DTensor):
        refuse_shard_options(group, vocab_start)
        return _locate_dtensor(logits, vocab_size)
    return LocalLogits(
        values=logits,
        vocab=shard_of_columns(logits.shape[-1], group, vocab_size, vocab_start),
        tokens=TokenSlice.all_of(logits.shape[:-1]),
    )


def refuse_shard_options(group: dist.ProcessGroup | None, vocab_start: int | None) -> None:
    """Check that no option for local shards is given with a DTensor.

    Raises:
        OptionError: one is given.
    """
    if group is not None or vocab_start is not None:
        raise OptionError("a DTensor has its own placements: leave out group and vocab_start")


def vocab_mesh_dim(tensor: DTensor, dim: int) -> int | None:
    """Return the mesh dim over which ``dim`` of ``tensor`` is sharded in contiguous chunks, or None.

    Raises:
        PlacementError: the tensor is a partial sum, or ``dim`` has a strided shard or is sharded over two mesh axes.
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
                f"the vocabulary (dim {dim}) is sharded in strides ({placement}); redistribute it to Shard({dim})"
            )
        if tensor.device_mesh.size(mesh_dim) > 1:
            found.append(mesh_dim)
    if len(found) > 1:
        raise PlacementError(
            f"the vocabulary (dim {dim}) is sharded over {len(found)} mesh dims ({tensor.placements}); "
            f"shard it over one and replicate or shard the tokens over the others"
        )
    return found[0] if found else None


def shard_of_dtensor(tensor: DTensor, dim: int, vocab_size: int | None) -> VocabShard:
    """Return the vocabulary ids of a DTensor's local shard along ``dim``.

    Raises:
        PlacementError: the placement is not one that ``vocab_mesh_dim`` supports.
        ShapeError: ``vocab_size`` exceeds the size of ``dim``.
    """
    mesh_dim = vocab_mesh_dim(tensor, dim)
    shape, offset = local_shape_and_offset(tensor)
    columns = tensor.shape[dim]
    if vocab_size is not None and not 0 < vocab_size <= columns:
        raise ShapeError(f"vocab_size {vocab_size} is outside 1..{columns}, the tensor's own columns")
    return VocabShard(
        start=offset[dim],
        width=_unpadded_width(offset[dim], shape[dim], vocab_size or columns),
        vocab_size=vocab_size or columns,
        group=None if mesh_dim is None else tensor.device_mesh.get_group(mesh_dim),
    )


def token_slice(tensor: DTensor, placements: Sequence[Placement] | None = None) -> TokenSlice:
    """Return the tokens (all dims but the last) of the local shard of ``tensor``, optionally under other placements."""
    shape, offset = local_shape_and_offset(tensor, placements)
    return TokenSlice(tuple(tensor.shape[:-1]), shape[:-1], offset[:-1])


def _locate_dtensor(logits: DTensor, vocab_size: int | None) -> LocalLogits:
    vocab = shard_of_dtensor(logits, logits.dim() - 1, vocab_size)
    values = logits.to_local()
    shape, _ = local_shape_and_offset(logits)
    if tuple(values.shape) != shape:
        raise ShapeError(
            f"the local shard has shape {tuple(values.shape)} where a DTensor of shape {tuple(logits.shape)} "
            f"with {logits.placements} has {shape} on this rank; pass the full shape to DTensor.from_local"
        )
    return LocalLogits(values, vocab, token_slice(logits))


def shard_of_columns(
    columns: int, group: dist.ProcessGroup | None, vocab_size: int | None, vocab_start: int | None
) -> VocabShard:
    """Return the vocabulary ids of a plain tensor's ``columns``; with ``group``, of this rank's local shard.

    Raises:
        ShapeError: the numbers contradict each other.
        OptionError: ``group`` without ``vocab_size``.
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
            "a local shard with a process group needs vocab_size, the number of tokens in the full "
            "vocabulary: without it, the columns of a rank are unknown"
        )
    start = vocab_start if vocab_start is not None else _first_column(columns, group, vocab_size)
    return VocabShard(start, _unpadded_width(start, columns, vocab_size), vocab_size, group)


def _first_column(columns: int, group: dist.ProcessGroup | None, vocab_size: int) -> int:
    """Return this rank's first vocabulary id under DTensor's or Megatron-LM's way to shard a vocabulary."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunk = -(-vocab_size // ranks)
    start = min(rank * chunk, vocab_size)
    if columns == min(chunk, vocab_size - start):  # DTensor: chunks of ceil(vocab_size / ranks)
        return start
    if columns * ranks >= vocab_size and columns >= chunk:  # Megatron-LM: all ranks padded to one width
        return rank * columns
    raise ShapeError(
        f"rank {rank} of {ranks} holds {columns} columns; a vocabulary of {vocab_size} is sharded either in "
        f"chunks of {chunk} (here {min(chunk, vocab_size - start)}) or padded to equal widths of at least "
        f"{chunk}. Pass vocab_start for any other layout"
    )


def _unpadded_width(start: int, columns: int, vocab_size: int) -> int:
    return max(0, min(columns, vocab_size - start))
