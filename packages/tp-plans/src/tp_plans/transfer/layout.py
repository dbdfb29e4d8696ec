"""The layout of a checkpoint's tensors over ranks: each block's rank, local tensor and place in it."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.boxes import Box, MeshLayout, box_shape, full_box, intersection, mesh_boxes, volume
from tp_plans.errors import TransferError, type_name
from tp_plans.transfer.patterns import NOWHERE, Copies, KnownPatterns, Pattern, Placed, StoredBlock

#: Bytes of an element of each dtype that a checkpoint may have, by torch's name of the dtype.
ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "bool"), 1),
}

FORMAT = 2


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of a checkpoint, as it is sent."""

    shape: tuple[int, ...]  # its full shape
    dtype: str = "bfloat16"  # the dtype of the values that are sent, by torch's name (``"bfloat16"``)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise TransferError(f"dtype {self.dtype!r} is unknown: write one of {', '.join(ITEM_SIZES)}")
        if min(self.shape, default=0) < 0:
            raise TransferError(f"shape is {self.shape}: give sizes of 0 or more")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZES[self.dtype]


class TransferLayout:
    """The blocks of a checkpoint's tensors that each rank stores.

    Immutable.  Ranks are numbered in the process group of the transfer: a layout of an engine usually begins after the
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
        self._placed: dict[str, Placed] = dict.fromkeys(tensors, NOWHERE)
        patterns = KnownPatterns()
        right: dict[Any, StoredBlock] = {}
        for name, stored in blocks.items():
            if name not in self._tensors:
                raise TransferError(f"a block of {name!r}, which is none of the layout's {len(tensors)} tensors")
            listed = list(stored)
            for block in listed:
                _require_block(name, self._tensors[name], block, right)
            self._placed[name] = patterns.of(block for block in listed if volume(block.box))

    @classmethod
    def placed(cls, tensors: Mapping[str, CheckpointTensor], placed: Mapping[str, Placed]) -> TransferLayout:
        """Return a layout of patterns that fit by construction; checking each block takes longer than making it."""
        layout = cls(tensors, {})
        layout._placed.update(placed)
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
        if tensor not in self._placed:
            raise TransferError(f"tensor {tensor!r} is none of the layout's {len(self._placed)}")
        pattern, names = self._placed[tensor]
        return tuple(pattern.blocks(names))

    def pattern(self, tensor: str) -> Pattern:
        """Return how a tensor lies."""
        return self._placed[tensor].pattern

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that store something, in order."""
        return tuple(sorted(set().union(*(pattern.by_rank for pattern in self._patterns))))

    @cached_property
    def _patterns(self) -> Sequence[Pattern]:
        return tuple({id(place.pattern): place.pattern for place in self._placed.values()}.values())

    def stored(self, rank: int, tensor: str) -> Sequence[StoredBlock]:
        """Return the blocks of a tensor that a rank stores."""
        pattern, names = self._placed.get(tensor, NOWHERE)
        return list(pattern.blocks(names, rank))

    def within(self, rank: int, tensor: str, box: Box) -> list[tuple[Box, StoredBlock]]:
        """Return the parts of a box that a rank stores, each with its block."""
        parts = ((intersection(box, block.box), block) for block in self.stored(rank, tensor))
        return [(part, block) for part, block in parts if part is not None]

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the least shapes of a rank's local tensors: those that its blocks reach, without padding."""
        shapes: dict[str, tuple[int, ...]] = {}
        for pattern, names in self._placed.values():
            for block in pattern.blocks(names, rank):
                reached = tuple(stop for _, stop in block.local_box(block.box))
                known = shapes.get(block.local, reached)
                shapes[block.local] = tuple(map(max, reached, known))
        return shapes

    @cached_property
    def _bytes_stored(self) -> Mapping[int, int]:
        times: dict[tuple[Pattern, int], int] = defaultdict(int)
        for name, (pattern, _) in self._placed.items():
            times[pattern, self._tensors[name].itemsize] += 1
        nbytes: dict[int, int] = defaultdict(int)
        for (pattern, itemsize), count in times.items():
            for rank, elements in pattern.elements.items():
                nbytes[rank] += count * itemsize * elements
        return nbytes

    def bytes_stored(self, rank: int) -> int:
        """Bytes of checkpoint values that a rank stores, in the dtypes that are sent; a copy counts again."""
        return self._bytes_stored.get(rank, 0)

    def shifted(self, by: int) -> TransferLayout:
        """Return the layout with ``by`` added to every rank.

        Raises:
            TransferError: a rank would be negative.
        """
        if min(self.ranks, default=0) + by < 0:
            raise TransferError(f"by is {by}: rank {min(self.ranks)} would become negative")
        moved = {id(pattern): pattern.shifted(by) for pattern in self._patterns}
        placed = {name: Placed(moved[id(pattern)], names) for name, (pattern, names) in self._placed.items()}
        return TransferLayout.placed(self._tensors, placed)

    def union(self, other: TransferLayout) -> TransferLayout:
        """Return both layouts as one, as of two pipeline stages, or of two engines.

        Raises:
            TransferError: they disagree on a tensor's shape or dtype.
        """
        for name in self._tensors.keys() & other._tensors.keys():
            if self._tensors[name] != other._tensors[name]:
                raise TransferError(f"{name} is {self._tensors[name]} in one layout and {other._tensors[name]} in one")
        tensors, patterns = {**self._tensors, **other._tensors}, KnownPatterns()
        placed = {**self._placed, **other._placed}
        for name in self._tensors.keys() & other._tensors.keys():
            placed[name] = patterns.of([*self.blocks(name), *other.blocks(name)])
        return TransferLayout.placed(tensors, placed)

    def to_json(self) -> str:
        """Return the layout as JSON, to be sent to another process; :meth:`from_json` reads it."""
        numbers = {id(pattern): number for number, pattern in enumerate(self._patterns)}
        data = {
            "format": FORMAT,
            "patterns": [pattern.copies for pattern in self._patterns],
            "tensors": {
                name: [tensor.shape, tensor.dtype, numbers[id(self._placed[name].pattern)], self._placed[name].locals]
                for name, tensor in self._tensors.items()
            },
        }
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> TransferLayout:
        """Read the text of :meth:`to_json`.

        Raises:
            TransferError: the text is something else.
        """
        try:
            data: Any = json.loads(text)
            if data["format"] != FORMAT:
                raise TransferError(f"the layout has format {data['format']!r}; this version reads {FORMAT}")
            items = data["tensors"].items()
            tensors = {name: CheckpointTensor(tuple(shape), dtype) for name, (shape, dtype, _, _) in items}
            copies = [[_copies(*each) for each in listed] for listed in data["patterns"]]
            for _, _, number, names in data["tensors"].values():
                for each in copies[number]:  # as an index that is out of range would raise later
                    if not isinstance(names[each.slot], str):
                        raise TypeError(f"local tensor {names[each.slot]!r}")
            patterns = [Pattern(listed) for listed in copies]
            placed = {name: Placed(patterns[number], tuple(names)) for name, (_, _, number, names) in items}
            layout, right = TransferLayout.placed(tensors, placed), dict[Any, StoredBlock]()
            for name in {(id(each.pattern), tensors[name]): name for name, each in placed.items()}.values():
                for block in layout.blocks(name):
                    _require_block(name, tensors[name], block, right)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"this is not the JSON of a layout ({error!r}): write it with to_json") from error
        return layout

    def digest(self) -> bytes:
        """Return 16 bytes that are the same on every process for equal layouts."""
        known = {
            id(pattern): hashlib.blake2b(repr(pattern.copies).encode(), digest_size=16).digest()
            for pattern in self._patterns
        }
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self._tensors.items():
            pattern, names = self._placed[name]
            digest.update(repr((name, tensor.shape, tensor.dtype, names)).encode() + known[id(pattern)])
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferLayout):
            return NotImplemented
        return self._tensors == other._tensors and all(
            (each.locals, each.pattern.copies) == (placed.locals, placed.pattern.copies)
            for each, placed in zip(self._placed.values(), map(other._placed.__getitem__, self._placed), strict=True)
        )

    def __hash__(self) -> int:
        return hash(tuple(self._tensors.items()))


def _copies(ranks: Any, box: Any, slot: Any, offset: Any, dims: Any) -> Copies:
    if not is_integer(slot, least=0):
        raise ValueError(f"slot {slot!r}")
    return Copies(tuple(ranks), tuple((int(a), int(b)) for a, b in box), slot, tuple(offset), tuple(dims))


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
    placed: dict[str, Placed] = {}
    known: dict[tuple[tuple[int, ...], tuple[MeshLayout, ...]], Pattern] = {}
    for name, tensor in tensors.items():
        if name not in layouts:
            raise TransferError(f"{name} has no layout: give one for each of the {len(tensors)} tensors")
        key = tensor.shape, tuple(layouts[name])
        if key not in known:
            known[key] = _mesh_pattern(tensor.shape, mesh_shape, key[1], ranks)
        placed[name] = Placed(known[key], (name,))
    return TransferLayout.placed(tensors, placed)


def _mesh_pattern(
    shape: tuple[int, ...], mesh_shape: Sequence[int], layouts: Sequence[MeshLayout], ranks: Sequence[int] | None
) -> Pattern:
    boxes = mesh_boxes(shape, mesh_shape, layouts)
    if ranks is not None and len(ranks) != len(boxes):
        raise TransferError(f"{len(ranks)} ranks for a mesh of {len(boxes)}: give one per position of the mesh")
    on: dict[Box, list[int]] = {}
    for rank, box in zip(range(len(boxes)) if ranks is None else ranks, boxes, strict=True):
        on.setdefault(box, []).append(rank)
    zeros, dims = (0,) * len(shape), tuple(range(len(shape)))
    return Pattern(Copies(tuple(sorted(ranks)), box, 0, zeros, dims) for box, ranks in on.items())


def _require_block(name: str, tensor: CheckpointTensor, block: Any, right: dict[Any, StoredBlock]) -> None:
    """Refuse objects that are no block of a tensor; ``right`` collects checked blocks by their shared parts."""
    if not isinstance(block, StoredBlock):
        raise TransferError(f"{name}: blocks contain an object of type {type_name(block)}, not a StoredBlock")
    fields: Any = block
    shared = tensor.shape, id(fields.box), id(fields.offset), id(fields.dims)
    is_block = is_integer(fields.rank, least=0) and isinstance(fields.local, str)
    if is_block and shared in right:
        return
    is_block = (
        is_block
        and _is_tuple(fields.offset, lambda start: is_integer(start, least=0))
        and _is_tuple(fields.dims, lambda dim: dim is None or is_integer(dim))
        and _is_tuple(fields.box, lambda span: _is_tuple(span, is_integer) and len(span) == 2)
    )
    if not is_block:
        raise TransferError(
            f"{name}: {block} is no block: rank, offset and the starts and stops of box are integers from 0, dims are "
            "integers or None, local is a name"
        )
    if volume(block.box):
        _require_fit(name, tensor, block)
    right[shared] = block


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
