"""The layout of a sequence's tokens over ``cp``; model inputs, targets and losses are sharded by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fsdp_runtime.errors import LayoutError
from fsdp_runtime.mesh.spec import axis_size
from fsdp_runtime.values import require_one_of

#: ``"headtail"``, torchtitan's default, or ``None``.
LoadBalancer = Literal["headtail"] | None
LOAD_BALANCERS: tuple[LoadBalancer, ...] = ("headtail", None)
#: Attribute of the tensors that ``SequenceLayout.shard`` returns; tensors computed from them lack it.
_CUT_BY = "_cut_by_load_balancer"


@dataclass(frozen=True)
class SequenceLayout:
    """The sharding of ``length`` tokens over the ranks of the ``cp`` axis.

    Raises:
        LayoutError: the length is not divisible (the message has the length to pad to), or a number is out of range.
        OptionError: an unknown load balancer.

    Example:
        >>> from fsdp_runtime.steps.context.sharding import SequenceLayout
        >>> SequenceLayout(length=8, ranks=2, rank=0).positions.tolist()
        [0, 1, 6, 7]
        >>> SequenceLayout(length=8, ranks=2, rank=0, load_balancer=None).positions.tolist()
        [0, 1, 2, 3]
    """

    length: int  # tokens of a full sequence, padding included
    ranks: int  # size of the axis
    rank: int  # this process's index on it
    # ``"headtail"`` splits the sequence into ``2 * ranks`` chunks and gives rank ``r`` the ``r``-th and the ``r``-th
    # from the end, so that causal attention costs the same on every rank (Llama 3, arXiv:2407.21783, section 3.3.2);
    # ``None`` gives each rank one contiguous chunk
    load_balancer: LoadBalancer = "headtail"

    def __post_init__(self) -> None:
        require_one_of("load_balancer", self.load_balancer, LOAD_BALANCERS)
        for name, least in (("length", 1), ("ranks", 1), ("rank", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least or (name == "rank" and value >= self.ranks):
                below = f", below {self.ranks}" if name == "rank" else ""
                raise LayoutError(f"{name}={value!r}: give an integer, {least} or more{below}")
        if self.length % self.multiple:
            padded = -(-self.length // self.multiple) * self.multiple
            raise LayoutError(
                f"{self.length} tokens are not divisible over cp={self.ranks} with "
                f"load_balancer={self.load_balancer!r}: pad to {padded}, a multiple of {self.multiple}"
            )

    @property
    def multiple(self) -> int:
        """The number that divides every valid sequence length."""
        return self.ranks * self.chunks_per_rank

    @property
    def chunks_per_rank(self) -> int:
        """The number of contiguous chunks of tokens per rank."""
        return 2 if self.load_balancer == "headtail" and self.ranks > 1 else 1

    @property
    def chunks(self) -> tuple[int, ...]:
        """The indices of this rank's chunks among all ``ranks * chunks_per_rank`` chunks of the sequence."""
        return self.chunks_of(self.rank)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the sequence."""
        return self.ranks * self.chunks_per_rank

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's chunks, in the order in which it holds them."""
        return (rank, 2 * self.ranks - 1 - rank) if self.chunks_per_rank == 2 else (rank,)

    @cached_property
    def permutation(self) -> Tensor:
        """``[length]`` int64: the positions of the tokens of rank 0, then of rank 1, and so on.

        The *permutation* that ``rl_logprobs.sequence_shard`` and ``gather_sequence`` take.
        """
        with torch.inference_mode(False):  # kept for later calls; their backward may save it
            chunks = torch.arange(self.length).view(self.num_chunks, -1)
            return torch.cat([chunks[chunk] for rank in range(self.ranks) for chunk in self.chunks_of(rank)])

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks' tokens in rank order are the sequence."""
        return self.chunks_per_rank == 1

    def order_on(self, device: torch.device) -> Tensor:
        """Return the permutation on a device, kept for later calls."""
        return self._kept("order", device, lambda: self.permutation.to(device))

    def inverse_on(self, device: torch.device) -> Tensor:
        """Return the inverse of the permutation on a device, kept for later calls."""
        return self._kept("inverse", device, lambda: self.permutation.argsort().to(device))

    def _kept(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        if torch.compiler.is_compiling():
            return make()
        cache: dict[tuple[str, torch.device], Tensor] = self.__dict__.setdefault("_on_devices", {})
        if (name, device) not in cache:
            with torch.inference_mode(False):
                cache[name, device] = make()
        return cache[name, device]

    @property
    def positions(self) -> Tensor:
        """``[length / ranks]`` int64: the positions of this rank's tokens, its position ids in an unpadded batch."""
        return self.permutation.chunk(self.ranks)[self.rank]

    def shard(self, full: Tensor, *, dim: int = 1) -> Tensor:
        """Return this rank's ``length / ranks`` tokens of a tensor with ``length`` tokens on ``dim``; no communication.

        Raises:
            LayoutError: the tensor has another number of entries on ``dim``.
        """
        if not -_dims(full) <= dim < _dims(full) or full.shape[dim] != self.length:
            raise LayoutError(
                f"got {_describe(full)}: give one entry for each of the {self.length} tokens on dim {dim}"
            )
        shard = full.index_select(dim, self.positions.to(full.device))
        if self.ranks > 1:
            setattr(shard, _CUT_BY, str(self.load_balancer))
        return shard

    def shard_batch(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return this rank's part ``[batch, length / ranks, ...]`` of a model's inputs, with position ids.

        Args:
            batch: tensors ``[batch, length, ...]`` by name; ``position_ids`` may be ``[..., length]``, or missing.

        Raises:
            LayoutError: a tensor does not have ``length`` tokens on its second dim (on its last for position ids).
        """
        shards = {}
        for name, value in batch.items():
            dim = _dims(value) - 1 if name == "position_ids" else 1
            if not 0 <= dim < _dims(value) or value.shape[dim] != self.length:
                raise LayoutError(
                    f"{name} is {_describe(value)}: give one entry for each of the {self.length} tokens of the "
                    f"full row on dim {dim}, and pass values per sample separately"
                )
            shards[name] = self.shard(value, dim=dim)
        if "position_ids" not in shards and shards:
            first = next(iter(shards.values()))
            shards["position_ids"] = self.positions.to(first.device).expand(first.shape[0], -1)
        return shards


def sequence_layout(mesh: DeviceMesh, length: int, *, load_balancer: LoadBalancer = "headtail") -> SequenceLayout:
    """Return the layout of sequences of ``length`` tokens on a mesh; without ``cp`` each rank has the full sequence.

    Args:
        mesh: the mesh that the model is parallelized on.
        length: tokens of a full sequence, padding included.
        load_balancer: the load balancer of the model's ``ContextParallel``.

    Raises:
        LayoutError: the length is not divisible.

    Example:
        >>> import torch
        >>> from fsdp_runtime import MeshSpec, sequence_layout
        >>> layout = sequence_layout(MeshSpec(cp=1).build(device_type="cpu"), length=4)
        >>> layout.shard_batch({"input_ids": torch.tensor([[5, 6, 7, 8]])})["position_ids"]
        tensor([[0, 1, 2, 3]])
    """
    ranks = axis_size(mesh, "cp")
    return SequenceLayout(length, ranks, mesh.get_local_rank("cp") if ranks > 1 else 0, load_balancer)


def padded(values: Tensor, length: int, fill: int = 0, *, dim: int = 1) -> Tensor:
    """Return a tensor padded at the end to ``length`` entries on a dim."""
    if (missing := length - values.shape[dim]) == 0:
        return values
    return functional.pad(values, (*(0, 0) * (values.dim() - 1 - dim), 0, missing), value=fill)


def load_balancer_of(part: Tensor) -> str | None:
    """Return the name of the load balancer that cut a tensor, ``None`` if it is unknown."""
    return getattr(part, _CUT_BY, None)


def _dims(value: object) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _describe(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
