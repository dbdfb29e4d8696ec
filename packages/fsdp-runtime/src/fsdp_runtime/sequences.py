"""Which tokens of a sequence each context-parallel rank holds: the one object that model, loss and targets follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import LayoutError, OptionError
from fsdp_runtime.mesh import axis_size

SequenceOrder = Literal["balanced", "contiguous"]


@dataclass(frozen=True)
class SequenceLayout:
    """How ``length`` tokens lie over the ranks of the ``cp`` axis.

    Args:
        length: tokens of a whole sequence, padding included.
        ranks: size of the axis.
        rank: this process's place on it.
        order: ``"balanced"`` cuts the sequence into ``2 * ranks`` chunks and gives rank ``r`` the ``r``-th and the
            ``r``-th from the end, so that causal attention costs all ranks alike (Llama 3, arXiv:2407.21783, section
            3.3.2); ``"contiguous"`` gives each rank one run of tokens.

    Raises:
        LayoutError: the length does not divide; the message has the length to pad to.
    """

    length: int
    ranks: int
    rank: int
    order: SequenceOrder = "balanced"

    def __post_init__(self) -> None:
        require_order(self.order)
        if self.length % self.multiple:
            padded = -(-self.length // self.multiple) * self.multiple
            raise LayoutError(
                f"{self.length} tokens do not divide over cp={self.ranks} in {self.order} order: pad to {padded}, a "
                f"multiple of {self.multiple}"
            )

    @property
    def multiple(self) -> int:
        """What a sequence's length must be a multiple of."""
        return self.ranks * self.chunks_per_rank

    @property
    def chunks_per_rank(self) -> int:
        """How many runs of neighbouring tokens a rank holds."""
        return 2 if self.order == "balanced" and self.ranks > 1 else 1

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's runs, by their place among all ``ranks * chunks_per_rank`` runs of the sequence."""
        return self._chunks_of(self.rank)

    @cached_property
    def permutation(self) -> Tensor:
        """``[length]`` int64: each token's position in the sequence, one rank's tokens after another's.

        This is the ``permutation`` argument of ``rl_logprobs.sequence_shard`` and ``gather_sequence``.
        """
        runs = torch.arange(self.length).view(self.ranks * self.chunks_per_rank, -1)
        return torch.cat([runs[chunk] for rank in range(self.ranks) for chunk in self._chunks_of(rank)])

    @property
    def positions(self) -> Tensor:
        """``[length / ranks]`` int64: the positions of this rank's tokens, its position ids in an unpadded batch."""
        return self.permutation.chunk(self.ranks)[self.rank]

    def shard(self, full: Tensor, *, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor in sequence order; no communication.

        Raises:
            LayoutError: the tensor does not have ``length`` entries there.
        """
        if full.shape[dim] != self.length:
            raise LayoutError(f"{full.shape[dim]} entries on dim {dim} of {tuple(full.shape)}, not {self.length}")
        return full.index_select(dim, self.positions.to(full.device))

    def shard_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a model's inputs ``[batch, length, ...]``; position ids are added where there are none.

        Raises:
            LayoutError: a tensor does not have ``length`` tokens on its second dim (on its last for position ids).
        """
        found = {
            name: self.shard(value, dim=value.dim() - 1 if name == "position_ids" else 1)
            for name, value in batch.items()
        }
        if "position_ids" not in found and found:
            first = next(iter(found.values()))
            found["position_ids"] = self.positions.to(first.device).expand(first.shape[0], -1)
        return found

    def _chunks_of(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.ranks - 1 - rank) if self.chunks_per_rank == 2 else (rank,)


def sequence_layout(mesh: DeviceMesh, length: int, *, order: SequenceOrder = "balanced") -> SequenceLayout:
    """The layout of sequences of ``length`` tokens on a mesh; the whole sequence on each rank without ``cp``.

    Args:
        mesh: the mesh that the model is parallelized on.
        length: tokens of a whole sequence, padding included.
        order: the same as was given to ``parallelize``.

    Raises:
        LayoutError: the length does not divide.
    """
    ranks = axis_size(mesh, "cp")
    return SequenceLayout(length, ranks, mesh.get_local_rank("cp") if ranks > 1 else 0, order)


def require_order(order: str) -> None:
    """Raise :class:`OptionError` unless ``order`` is one that :class:`SequenceLayout` knows."""
    if order not in get_args(SequenceOrder):
        raise OptionError(f"sequence order {order!r}: write one of {', '.join(map(repr, get_args(SequenceOrder)))}")
