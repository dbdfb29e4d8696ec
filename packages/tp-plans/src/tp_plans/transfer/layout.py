"""The layout of a checkpoint's tensors over ranks: which rank stores which block, where in which local tensor."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.errors import TransferError, type_name
from tp_plans.transfer.boxes import Box, box_shape, full_box, intersection, is_empty, volume
from tp_plans.transfer.placements import MeshLayout, mesh_boxes

#: Bytes of an element of each dtype that a checkpoint may have, by torch's name of the dtype.
ITEM_SIZES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

FORMAT = 1


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of a checkpoint, as it is sent.

    Args:
        shape: its full shape.
        dtype: the dtype of the values that are sent, by torch's name (``"bfloat16"``).
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise TransferError(f"dtype {self.dtype!r} is unknown: write one of {', '.join(ITEM_SIZES)}")
        if min(self.shape, default=0) < 0:
            raise TransferError(f"shape is {self.shape}: give sizes of 0 or more")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a checkpoint tensor in a local tensor of a rank.

    Args:
        rank: the rank that stores it.
        box: the part of the checkpoint tensor.
        local: the name of the rank's local tensor.
        offset: the index of the block's first element in the local tensor, one number per local dim.
        dims: the local dim of each checkpoint dim, ``None`` for a dim that the local tensor lacks.  The block has size
            1 in local dims that are not listed, as a single expert has in a stack of experts.
    """

    rank: int
    box: Box
    local: str
    offset: tuple[int, ...]
    dims: tuple[int | None, ...]

    def local_box(self, box: Box) -> Box:
        """Return where in the local tensor a part of the block lies."""
        found = [(first, first + 1) for first in self.offset]
        for (start, stop), (first, _), dim in zip(box, self.box, self.dims, strict=True):
            if dim is not None:
                found[dim] = (self.offset[dim] + start - first, self.offset[dim] + stop - first)
        return tuple(found)


class TransferLayout:
    """Which rank stores which blocks of a checkpoint's tensors.

    Immutable.  Ranks are those of the process group of the transfer: a layout of an engine usually begins after the
    trainer's ranks (:meth:`shifted`).

    Args:
        tensors: the checkpoint's tensors by name.
        blocks: the stored blocks of each tensor; a block that several ranks store is listed for each.

    Raises:
        TransferError: a block has no tensor, lies outside of it, or does not fit the local tensor's dims.

    Example:
        >>> import tp_plans
        >>> tensors = {"weight": tp_plans.transfer.CheckpointTensor((4, 2))}
        >>> block = tp_plans.transfer.StoredBlock(0, ((0, 4), (0, 2)), "weight", (0, 0), (0, 1))
        >>> tp_plans.transfer.TransferLayout(tensors, {"weight": [block]}).bytes_stored(0)
        16
    """

    def __init__(self, tensors: Mapping[str, CheckpointTensor], blocks: Mapping[str, Iterable[StoredBlock]]) -> None:
        self._tensors = dict(tensors)
        self._blocks: dict[str, tuple[StoredBlock, ...]] = dict.fromkeys(tensors, ())
        for name, stored in blocks.items():
            if name not in self._tensors:
                raise TransferError(f"a block of {name!r}, which is none of the layout's {len(tensors)} tensors")
            listed = list(stored)
            for block in listed:
                _require_types(name, block)
            self._blocks[name] = tuple(block for block in listed if volume(block.box))
            for block in self._blocks[name]:
                _require_fit(name, self._tensors[name], block)

    @classmethod
    def unchecked(
        cls, tensors: Mapping[str, CheckpointTensor], blocks: Mapping[str, Iterable[StoredBlock]]
    ) -> TransferLayout:
        """Return a layout of blocks that fit by construction; checking each takes longer than making it."""
        layout = cls(tensors, {})
        layout._blocks.update(
            {name: tuple(b for b in stored if not is_empty(b.box)) for name, stored in blocks.items()}
        )
        return layout

    @property
    def tensors(self) -> Mapping[str, CheckpointTensor]:
        """The checkpoint's tensors by name."""
        return self._tensors

    def blocks(self, tensor: str) -> tuple[StoredBlock, ...]:
        """Return the stored blocks of a tensor, over all ranks.

        Raises:
            TransferError: the layout has no such tensor.
        """
        if tensor not in self._blocks:
            raise TransferError(f"tensor {tensor!r} is none of the layout's {len(self._blocks)}")
        return self._blocks[tensor]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that store something, in order."""
        return tuple(sorted(self._by_rank))

    @cached_property
    def _by_rank(self) -> Mapping[int, Mapping[str, Sequence[StoredBlock]]]:
        """Each rank's blocks by tensor, so that a question about a rank reads its own blocks alone."""
        found: dict[int, dict[str, list[StoredBlock]]] = defaultdict(dict)
        for name, stored in self._blocks.items():
            for block in stored:
                found[block.rank].setdefault(name, []).append(block)
        return dict(found)

    def stored(self, rank: int, tensor: str) -> Sequence[StoredBlock]:
        """Return the blocks of a tensor that a rank stores."""
        return self._by_rank.get(rank, {}).get(tensor, ())

    def within(self, rank: int, tensor: str, box: Box) -> list[tuple[Box, StoredBlock]]:
        """Return the parts of a box that a rank stores, each with its block."""
        parts = ((intersection(box, block.box), block) for block in self.stored(rank, tensor))
        return [(part, block) for part, block in parts if part is not None]

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the least shapes of a rank's local tensors: those that its blocks reach, without padding."""
        shapes: dict[str, tuple[int, ...]] = {}
        for stored in self._by_rank.get(rank, {}).values():
            for block in stored:
                reached = tuple(stop for _, stop in block.local_box(block.box))
                known = shapes.get(block.local, reached)
                shapes[block.local] = tuple(map(max, reached, known))
        return shapes

    def bytes_stored(self, rank: int) -> int:
        """Bytes of checkpoint values that a rank stores, in the dtypes that are sent; a copy counts again."""
        return sum(
            volume(block.box) * self._tensors[name].itemsize
            for name, stored in self._by_rank.get(rank, {}).items()
            for block in stored
        )

    def shifted(self, by: int) -> TransferLayout:
        """Return the layout with ``by`` added to every rank.

        Raises:
            TransferError: a rank would be negative.
        """
        if min(self.ranks, default=0) + by < 0:
            raise TransferError(f"by is {by}: rank {min(self.ranks)} would become negative")
        return TransferLayout.unchecked(
            self._tensors,
            {
                name: [
                    StoredBlock(block.rank + by, block.box, block.local, block.offset, block.dims) for block in stored
                ]
                for name, stored in self._blocks.items()
            },
        )

    def union(self, other: TransferLayout) -> TransferLayout:
        """Return both layouts as one, as of two pipeline stages, or of two engines.

        Raises:
            TransferError: they disagree on a tensor's shape or dtype.
        """
        for name in self._tensors.keys() & other._tensors.keys():
            if self._tensors[name] != other._tensors[name]:
                raise TransferError(f"{name} is {self._tensors[name]} in one layout and {other._tensors[name]} in one")
        tensors = {**self._tensors, **other._tensors}
        blocks = {name: [*self._blocks.get(name, ()), *other._blocks.get(name, ())] for name in tensors}
        return TransferLayout.unchecked(tensors, blocks)

    def to_json(self) -> str:
        """Return the layout as JSON, to be sent to another process; :meth:`from_json` reads it."""
        return json.dumps(
            {
                "format": FORMAT,
                "tensors": {name: [list(item.shape), item.dtype] for name, item in self._tensors.items()},
                "blocks": {
                    name: [[b.rank, b.box, b.local, b.offset, b.dims] for b in stored]
                    for name, stored in self._blocks.items()
                },
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> TransferLayout:
        """Read what :meth:`to_json` wrote.

        Raises:
            TransferError: the text is something else.
        """
        try:
            data: Any = json.loads(text)
            if data["format"] != FORMAT:
                raise TransferError(f"the layout has format {data['format']!r}; this version reads {FORMAT}")
            tensors = {name: CheckpointTensor(tuple(shape), dtype) for name, (shape, dtype) in data["tensors"].items()}
            blocks = {
                name: [
                    StoredBlock(rank, tuple((int(a), int(b)) for a, b in box), local, tuple(offset), tuple(dims))
                    for rank, box, local, offset, dims in stored
                ]
                for name, stored in data["blocks"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"this is not the JSON of a layout ({error!r}): write it with to_json") from error
        return TransferLayout(tensors, blocks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferLayout):
            return NotImplemented
        return self._tensors == other._tensors and self._blocks == other._blocks

    def __hash__(self) -> int:
        return hash((tuple(self._tensors.items()), tuple(self._blocks.items())))


def mesh_layout(
    tensors: Mapping[str, CheckpointTensor],
    mesh_shape: Sequence[int],
    layouts: Mapping[str, Sequence[MeshLayout]],
    *,
    ranks: Sequence[int] | None = None,
) -> TransferLayout:
    """Lay a checkpoint's tensors out on a mesh, each under its own name and DTensor layout.

    Args:
        tensors: the checkpoint's tensors by name.
        mesh_shape: sizes of the mesh's axes.
        layouts: for each tensor one layout per axis; see :func:`mesh_boxes`.
        ranks: the mesh's ranks in row-major order; ``None`` for 0, 1, 2, ...

    Returns:
        The layout, with local tensors of the tensors' own names.

    Raises:
        TransferError: layouts do not fit a tensor or the mesh.

    Example:
        >>> import tp_plans
        >>> tensors = {"weight": tp_plans.transfer.CheckpointTensor((4, 2))}
        >>> layout = tp_plans.transfer.mesh_layout(tensors, (2,), {"weight": [tp_plans.Shard(0)]})
        >>> [block.box for block in layout.blocks("weight")]
        [((0, 2), (0, 2)), ((2, 4), (0, 2))]
    """
    if ranks is not None and (len(set(ranks)) < len(ranks) or min(ranks, default=0) < 0):
        raise TransferError(f"ranks are {tuple(ranks)}: give each once, 0 or more")
    blocks: dict[str, list[StoredBlock]] = {}
    for name, tensor in tensors.items():
        if name not in layouts:
            raise TransferError(f"{name} has no layout: give one for each of the {len(tensors)} tensors")
        boxes = mesh_boxes(tensor.shape, mesh_shape, layouts[name])
        if ranks is not None and len(ranks) != len(boxes):
            raise TransferError(f"{len(ranks)} ranks for a mesh of {len(boxes)}: give one per position of the mesh")
        zeros, dims = (0,) * len(tensor.shape), tuple(range(len(tensor.shape)))
        numbers = range(len(boxes)) if ranks is None else ranks
        blocks[name] = [StoredBlock(rank, box, name, zeros, dims) for rank, box in zip(numbers, boxes, strict=True)]
    return TransferLayout.unchecked(tensors, blocks)


def _require_types(name: str, block: Any) -> None:
    if not isinstance(block, StoredBlock):
        raise TransferError(f"{name}: blocks contain what is of type {type_name(block)}, not a StoredBlock")
    given: Any = block
    right = (
        is_integer(given.rank, least=0)
        and isinstance(given.local, str)
        and _is_tuple(given.offset, lambda each: is_integer(each, least=0))
        and _is_tuple(given.dims, lambda each: each is None or is_integer(each))
        and _is_tuple(given.box, lambda each: _is_tuple(each, is_integer) and len(each) == 2)
    )
    if not right:
        raise TransferError(
            f"{name}: {block} is no block: rank, offset and the starts and stops of box are integers from 0, dims are "
            "integers or None, local is a name"
        )


def _is_tuple(value: object, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(map(test, value))


def _require_fit(name: str, tensor: CheckpointTensor, block: StoredBlock) -> None:
    whole = full_box(tensor.shape)
    if len(block.box) != len(whole) or intersection(block.box, whole) != block.box:
        raise TransferError(f"{name} has shape {tensor.shape}: rank {block.rank} cannot store its part {block.box}")
    listed = [dim for dim in block.dims if dim is not None]
    fits = len(block.dims) == len(whole) and len(set(listed)) == len(listed)
    fits = fits and all(0 <= dim < len(block.offset) for dim in listed)
    sizes = zip(box_shape(block.box), block.dims, strict=False)
    if not fits or any(dim is None and size != 1 for size, dim in sizes):
        raise TransferError(
            f"{name}: dims {block.dims} do not map a block of shape {box_shape(block.box)} to a local tensor of "
            f"{len(block.offset)} dims: give the local dim of each dim, None only for a dim of size 1"
        )
