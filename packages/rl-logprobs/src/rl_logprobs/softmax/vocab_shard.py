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
    """The vocabulary ids of the columns of logits, or of the rows of an LM head's weight.

    Plain tensors that are a shard need one with a ``group``.  Full tensors and DTensors need one only if they are
    padded beyond the vocabulary.

    Raises:
        ShapeError: ``vocab_size`` is not a positive integer, or ``start`` not an id of the vocabulary.
        OptionError: ``start`` is given without ``group``.

    Example:
        >>> import torch
        >>> from rl_logprobs import VocabShard, token_logprobs
        >>> padded = torch.tensor([[0.0, 2.0, 1.0, 30.0]])
        >>> token_logprobs(padded, torch.tensor([1]), shard=VocabShard(3))
        tensor([-0.4076])

        A local shard, on each rank of ``mesh``:
        ``token_logprobs(local, targets, shard=VocabShard(151936, mesh.get_group("tp")))``.
    """

    vocab_size: int  # number of tokens in the vocabulary; columns at or beyond it are padding with probability 0
    # the process group over which the vocabulary is sharded; None for a full tensor and for a DTensor, which has its
    # own
    group: dist.ProcessGroup | None = None
    # the first id of this rank's shard.  By default as in DTensor's layout (chunks of ceil(vocab / ranks)) or in
    # Megatron-LM's (all ranks padded to one width), whichever fits the number of columns
    start: int | None = None

    def __post_init__(self) -> None:
        if not (self.vocab_size >= 1 and self.vocab_size % 1 == 0):
            raise ShapeError(f"vocab_size must be a positive integer, got {self.vocab_size}")
        if self.start is None:
            return
        if self.group is None:
            raise OptionError("start is for a local shard: give the group over which the vocabulary is sharded too")
        if not (0 <= self.start <= self.vocab_size and self.start % 1 == 0):
            raise ShapeError(f"start must be an integer in [0, {self.vocab_size}], got {self.start}")


@dataclass(frozen=True)
class VocabColumns:
    """The columns ``[start, start + width)``, none of them padding, that a rank of ``group`` (None: one rank) holds."""

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
            if per_token.shape[dim] != length:
                per_token = per_token.narrow(dim, start, length)
        return per_token


@dataclass(frozen=True)
class LocalLogits:
    """The local shard of the logits, with its position in the vocabulary and in the batch."""

    values: torch.Tensor
    vocab: VocabColumns
    tokens: TokenSlice


def locate_logits(logits: torch.Tensor, shard: VocabShard | None) -> LocalLogits:
    """Return this rank's part of ``logits``; the arguments are as for ``rl_logprobs.token_statistics``."""
    if not logits.is_floating_point() or logits.layout is not torch.strided:
        raise DtypeError(
            f"logits must be floating point and dense, got {logits.dtype} {logits.layout}; pass the LM head's output"
        )
    if logits.dim() < 2 or 0 in logits.shape[:-1]:
        raise ShapeError(
            f"logits must be [..., tokens, vocab] with at least one token, got shape {tuple(logits.shape)}"
        )
    if isinstance(logits, DTensor):
        return _locate_dtensor(logits, shard)
    return LocalLogits(logits, columns_of_plain(logits.shape[-1], shard), TokenSlice.all_of(logits.shape[:-1]))


def vocab_mesh_dim(tensor: DTensor, dim: int) -> int | None:
    """Return the mesh dim over which ``dim`` of ``tensor`` is sharded in contiguous chunks, or None."""
    mesh_dims: list[int] = []
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
            mesh_dims.append(mesh_dim)
    if len(mesh_dims) > 1:
        raise PlacementError(
            f"the vocabulary (dim {dim}) is sharded over {len(mesh_dims)} mesh dims ({tensor.placements}); "
            f"shard it over one and replicate or shard the tokens over the others"
        )
    return mesh_dims[0] if mesh_dims else None


def columns_of_dtensor(tensor: DTensor, dim: int, shard: VocabShard | None) -> VocabColumns:
    """Return the vocabulary ids of a DTensor's local shard along ``dim``."""
    if shard is not None and shard.group is not None:
        raise OptionError("a DTensor has its own placements: leave the group out of the VocabShard")
    mesh_dim = vocab_mesh_dim(tensor, dim)
    shape, offset = local_shape_and_offset(tensor)
    vocab_size = tensor.shape[dim] if shard is None else shard.vocab_size
    if vocab_size > tensor.shape[dim]:
        raise ShapeError(f"vocab_size {vocab_size} is outside 1..{tensor.shape[dim]}, the tensor's own columns")
    return VocabColumns(
        start=offset[dim],
        width=_unpadded_width(offset[dim], shape[dim], vocab_size),
        vocab_size=vocab_size,
        group=None if mesh_dim is None else tensor.device_mesh.get_group(mesh_dim),
    )


def token_slice(tensor: DTensor, placements: Sequence[Placement] | None = None) -> TokenSlice:
    """Return the tokens (all dims but the last) of the local shard of ``tensor``, optionally under other placements."""
    shape, offset = local_shape_and_offset(tensor, placements)
    return TokenSlice(tuple(tensor.shape[:-1]), shape[:-1], offset[:-1])


def _locate_dtensor(logits: DTensor, shard: VocabShard | None) -> LocalLogits:
    vocab, values = columns_of_dtensor(logits, logits.dim() - 1, shard), logits.to_local()
    shape, _ = local_shape_and_offset(logits)
    if tuple(values.shape) != shape:
        raise ShapeError(
            f"the local shard has shape {tuple(values.shape)} where a DTensor of shape {tuple(logits.shape)} "
            f"with {logits.placements} has {shape} on this rank; pass the full shape to DTensor.from_local"
        )
    return LocalLogits(values, vocab, token_slice(logits))


def columns_of_plain(columns: int, shard: VocabShard | None) -> VocabColumns:
    """Return the vocabulary ids of a plain tensor's ``columns``; with a group, of this rank's local shard."""
    if shard is None:
        return VocabColumns(0, columns, columns, None)
    if shard.group is None or dist.get_world_size(shard.group) == 1:
        if shard.start:
            raise ShapeError(f"one rank holds the whole vocabulary, so its shard cannot start at id {shard.start}")
        if shard.vocab_size > columns:
            raise ShapeError(f"vocab_size {shard.vocab_size} exceeds the {columns} columns of unsharded logits")
        return VocabColumns(0, shard.vocab_size, shard.vocab_size, None)
    start = shard.start if shard.start is not None else _first_column(columns, shard.group, shard.vocab_size)
    return VocabColumns(start, _unpadded_width(start, columns, shard.vocab_size), shard.vocab_size, shard.group)


def _first_column(columns: int, group: dist.ProcessGroup | None, vocab_size: int) -> int:
    """Return this rank's first vocabulary id under DTensor's or Megatron-LM's sharding of a vocabulary."""
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
        f"{chunk}. Give VocabShard a start for any other layout"
    )


def _unpadded_width(start: int, columns: int, vocab_size: int) -> int:
    return max(0, min(columns, vocab_size - start))
