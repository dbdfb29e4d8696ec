"""The layouts of vLLM and SGLang: fused projections, copied key/value heads, stacked experts, padded vocabularies."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tp_plans._validate import MAX_RANKS, is_integer
from tp_plans.boxes import Box, full_box
from tp_plans.errors import TransferError
from tp_plans.transfer.layout import CheckpointTensor, TransferLayout
from tp_plans.transfer.patterns import Copies, Pattern, Placed
from tp_plans.transfer.rules import Engine, EngineRule, RuleBook, engine_rules

#: Both engines pad the vocabulary to a multiple of this (``DEFAULT_VOCAB_PADDING_SIZE``).
VOCAB_PADDING = 64
#: The suffix of a scale's name after its weight's name.
_SUFFIXES = ("_scale_inv", "_scale_2", "_scale")
#: Rows and columns of a block with one ``weight_scale_inv`` (DeepSeek-V3's checkpoints).
_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The sizes of a model and of the engine that serves it."""

    num_attention_heads: int  # of the model
    # of the model; ``None`` for multi-head latent attention, and where it is the same
    num_key_value_heads: int | None = None
    tp: int = 1  # tensor-parallel ranks
    # expert-parallel ranks, of the same ``tp`` ranks: each has the experts of its ``ep`` rank, cut over ``tp / ep``
    # ranks.  vLLM has 1 and, with ``enable_expert_parallel``, ``tp``
    ep: int = 1
    vocab_padding: int = VOCAB_PADDING  # the vocabulary is padded to a multiple of this

    def __post_init__(self) -> None:
        for field in ("num_attention_heads", "tp", "ep", "vocab_padding"):
            if not is_integer(getattr(self, field), least=1):
                raise TransferError(f"{field} is {getattr(self, field)!r}: give 1 or more")
        if self.num_key_value_heads is not None and self.num_key_value_heads < 1:
            raise TransferError(f"num_key_value_heads is {self.num_key_value_heads}: give 1 or more, or None")
        if self.num_attention_heads % self.tp:
            raise TransferError(f"{self.num_attention_heads} heads and tp={self.tp}: use a tp that divides the heads")
        kv = self.kv_heads
        if kv % self.tp and self.tp % kv:
            raise TransferError(
                f"{kv} key/value heads and tp={self.tp}: engines split or copy them evenly, so one divides the other"
            )
        if self.tp % self.ep:
            raise TransferError(f"ep={self.ep} does not divide tp={self.tp}: the ranks of one engine are both")

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads


@dataclass(frozen=True, slots=True)
class _ScaleOf:
    """The weight that a scale belongs to."""

    weight: str  # its name in the checkpoint
    suffix: str  # the scale's suffix after the weight's name
    cell: tuple[int, int] | None  # its stored rows and columns that share a scale; None for one number for all of them


@dataclass(frozen=True, slots=True)
class _Member:
    """A checkpoint tensor in a parameter of the engine; a scale is cut where its weight is, in cells."""

    name: str
    shape: tuple[int, ...]
    rule: EngineRule
    expert: int | None
    scale: _ScaleOf | None

    @property
    def is_number(self) -> bool:
        """Whether it is one number for all of its weight."""
        return self.scale is not None and self.scale.cell is None


#: A rank's part of a tensor: its box, its offset in the local tensor, and the local dim of each dim.
_Part = tuple[Box, tuple[int, ...], tuple[int | None, ...]]


def engine_layout(
    tensors: Mapping[str, CheckpointTensor],
    size: EngineSize,
    *,
    engine: Engine = "vllm",
    rules: Sequence[EngineRule] | None = None,
    replicas: int = 1,
    first_rank: int = 0,
) -> TransferLayout:
    """Lay a checkpoint's tensors out as vLLM or SGLang store them, before any repacking for a kernel.

    Fused matrices follow one another in one local parameter: ``qkv_proj``, ``gate_up_proj``, ``w13_weight`` and
    ``w2_weight`` of stacked experts, ``fused_qkv_a_proj`` of latent attention.  Key/value heads are copied where there
    are fewer than ranks.  A rank stores its rows of the padded vocabulary; padding is no part of the checkpoint and is
    not written.  An embedding that is also the LM head is one tensor, as in the checkpoint.  Scales of quantized
    weights (``weight_scale``, ``weight_scale_inv``, ``weight_scale_2``) lie and are cut as their weights: one number
    per matrix at the matrix's position, others row by row and block by block.  Parameters have the paths of the
    checkpoint, where an engine renames modules too.

    Args:
        tensors: the checkpoint's tensors by name; experts one by one, or stacked.
        size: heads and ranks.
        engine: the engine that gives names and rules.
        rules: other rules, for example ``[EngineRule(...), *engine_rules("vllm")]``; ``None`` for the engine's own.
        replicas: engines of ``tp`` ranks each, one after another, that hold the same.
        first_rank: the rank of the first, usually the number of the trainer's ranks.

    Returns:
        The layout on ``replicas * tp`` ranks from ``first_rank`` on.

    Raises:
        TransferError: a tensor has no rule, or cannot be cut evenly; the message has the numbers.

    Example:
        >>> import tp_plans
        >>> tensors = {f"model.layers.0.self_attn.{n}_proj.weight": tp_plans.transfer.CheckpointTensor((r, 8))
        ...            for n, r in (("q", 16), ("k", 4), ("v", 4))}
        >>> size = tp_plans.transfer.EngineSize(num_attention_heads=4, num_key_value_heads=1, tp=2)
        >>> layout = tp_plans.transfer.engine_layout(tensors, size)
        >>> for block in layout.blocks("model.layers.0.self_attn.v_proj.weight"):
        ...     print(block.rank, block.box, block.local, block.offset)
        0 ((0, 4), (0, 8)) model.layers.0.self_attn.qkv_proj.weight (12, 0)
        1 ((0, 4), (0, 8)) model.layers.0.self_attn.qkv_proj.weight (12, 0)
    """
    if not 1 <= replicas <= MAX_RANKS // size.tp:
        raise TransferError(f"replicas is {replicas}: give 1 or more, at most {MAX_RANKS} ranks with tp={size.tp}")
    if first_rank < 0:
        raise TransferError(f"first_rank is {first_rank}: give 0 or more")
    book = RuleBook(engine_rules(engine) if rules is None else rules, tensors)
    parameters: dict[str, list[_Member]] = defaultdict(list)
    for name in tensors:
        scale = _scale_of(name, tensors)
        weight = name if scale is None else scale.weight
        rule, shape = book.find(weight), tensors[weight].shape
        _require_dims(weight, shape, rule)
        local, expert = _local_name(weight, rule)
        suffix = "" if scale is None else scale.suffix
        parameters[local + suffix].append(_Member(name, shape, rule, expert, scale))
    placed: dict[str, Placed] = {}
    known: dict[Hashable, Sequence[Pattern]] = {}
    for local, members in parameters.items():
        key = tuple(
            (member.shape, id(member.rule), member.expert, member.scale and (member.scale.cell,)) for member in members
        )
        if key not in known:
            known[key] = _patterns(members, size, first_rank, replicas)
        placed.update(
            {member.name: Placed(pattern, (local,)) for member, pattern in zip(members, known[key], strict=True)}
        )
    return TransferLayout.placed(tensors, placed)


def _patterns(members: Sequence[_Member], size: EngineSize, first_rank: int, replicas: int) -> list[Pattern]:
    """The layout of each tensor of a parameter; parameters with equal members, as in all layers, share it."""
    parts_of: dict[str, dict[_Part, list[int]]] = {member.name: {} for member in members}
    in_order = sorted(members, key=lambda member: (_expert(member), member.rule.position))
    for rank in range(size.tp):
        for name, part in _on_rank(in_order, rank, size):
            parts_of[name].setdefault(part, []).append(rank)
    starts = range(first_rank, first_rank + replicas * size.tp, size.tp)
    return [
        Pattern(
            Copies(tuple(start + rank for start in starts for rank in ranks), box, 0, offset, dims)
            for (box, offset, dims), ranks in parts.items()
        )
        for parts in parts_of.values()
    ]


def _require_dims(name: str, shape: Sequence[int], rule: EngineRule) -> None:
    least, most = (2, 2) if rule.expert else (2, 3) if rule.stacked else (1 + (rule.split == "columns"), None)
    if len(shape) < least or (most is not None and len(shape) > most):
        bound = " or more" if most is None else "" if least == most else f" or {most}"
        raise TransferError(
            f"{name} has shape {tuple(shape)}: its rule, split={rule.split!r}, is for {least}{bound} dims"
        )


def _local_name(name: str, rule: EngineRule) -> tuple[str, int | None]:
    """The engine's parameter of a checkpoint tensor, and the number of its expert."""
    path, _, attribute = name.rpartition(".")
    if rule.stacked:  # PARENT.experts.gate_up_proj -> PARENT.experts.w13_weight
        return f"{path}.{rule.fused_into}", None
    if rule.expert:  # PARENT.experts.NUMBER.LINEAR.weight -> PARENT.experts.w13_weight
        parts = path.rsplit(".", 2)
        if len(parts) < 3 or not parts[1].isdecimal():
            raise TransferError(f"{name} has no number of an expert before its last two parts, as its rule says")
        return f"{parts[0]}.{rule.fused_into}", int(parts[1])
    if rule.fused_into is None:
        return name, None
    return f"{path.rpartition('.')[0]}.{rule.fused_into}.{attribute}", None


def _on_rank(members: Sequence[_Member], rank: int, size: EngineSize) -> Iterator[tuple[str, _Part]]:
    """Yield a rank's parts of the tensors in one parameter: they follow one another, in every expert of the rank."""
    rule, held, ranks = members[0].rule, range(0), size.tp
    if rule.expert or rule.stacked:
        held, rank, ranks = _held(members[0].shape[0] if rule.stacked else _expert(members[-1]) + 1, rank, size)
    if rule.expert:
        first, last = (bisect_left(members, number, key=_expert) for number in (held.start, held.stop))
        members = members[first:last]
    several = any(other.rule.position for other in members)
    start = 0
    for member in members:
        expert = (_expert(member) - held.start,) if rule.expert else (0,) if rule.stacked else ()
        position = member.rule.position
        if member.is_number:
            yield member.name, ((), (*expert, position) if several or not expert else expert, ())
            continue
        outputs = len(member.shape) - 1 if rule.stacked else 0
        for box in _boxes(member, outputs, rank, ranks, size):
            rows = box[outputs][1] - box[outputs][0]
            offset = (*expert, position * rows if rule.expert else start)
            yield member.name, _stacked_part(box, held, offset) if rule.stacked else _part(box, offset)
            start += rows


def _part(box: Box, offset: tuple[int, ...]) -> _Part:
    """A box that begins at this offset, with the dims of the local tensor."""
    before = len(offset) - 1
    return box, offset + (0,) * (len(box) - 1), tuple(range(before, before + len(box)))


def _stacked_part(box: Box, held: range, offset: tuple[int, ...]) -> _Part:
    """The same of stacked experts, ``[experts, in, out]`` or ``[experts, out]``, in ``[experts, out, in]``."""
    return ((held.start, held.stop), *box[1:]), offset + (0,) * (len(box) - 2), (0, *range(len(box) - 1, 0, -1))


def _expert(member: _Member) -> int:
    return member.expert or 0


def _held(count: int, rank: int, size: EngineSize) -> tuple[range, int, int]:
    """Return the experts of a rank, its place among the ranks that share them, and the number of these ranks."""
    expert_tp = size.tp // size.ep
    ep_rank, tp_rank = divmod(rank, expert_tp)
    local, rest = divmod(count, size.ep)  # vLLM's linear placement: the first ranks have one more
    first = ep_rank * local + min(ep_rank, rest)
    return range(first, first + local + (ep_rank < rest)), tp_rank, expert_tp


def _boxes(member: _Member, outputs: int, rank: int, ranks: int, size: EngineSize) -> Iterator[Box]:
    """Yield the boxes of a tensor on one of its ranks, one for each matrix that is cut."""
    shape, rule, full = member.shape, member.rule, full_box(member.shape)
    dim = 1 if rule.split == "columns" else outputs
    if rule.split == "columns" and rule.stacked and outputs == 1:  # a bias has no input features
        yield full
        return
    matrices = rule.matrices if dim == outputs else 1
    if shape[dim] % matrices:
        raise _uneven(member.name, shape[dim], 1, matrices, 1)
    width = shape[dim] // matrices
    low, high = _range(member, width, rank, ranks, size)
    for first in range(0, shape[dim], width or 1):
        box = (*full[:dim], (first + low, first + high), *full[dim + 1 :])
        yield _in_cells(member.scale, box, shape)


def _range(member: _Member, length: int, rank: int, ranks: int, size: EngineSize) -> tuple[int, int]:
    """A rank's range of the features that are cut."""
    name = member.name
    match member.rule.split:
        case "replicated":
            return 0, length
        case "first_rank":
            return 0, length if rank == 0 else 0
        case "row_pairs":
            return _even(name, length, rank, ranks, each=2)
        case "heads":
            return _even(name, length, rank, ranks, unit=size.num_attention_heads)
        case "kv_heads" if size.kv_heads < ranks:
            return _even(name, length, rank * size.kv_heads // ranks, size.kv_heads, unit=size.kv_heads)
        case "kv_heads":
            return _even(name, length, rank, ranks, unit=size.kv_heads)
        case "vocabulary":
            padded = -(-length // size.vocab_padding) * size.vocab_padding
            low, high = _even(f"the padded vocabulary of {name}", padded, rank, ranks)
            return min(low, length), min(high, length)
    return _even(name, length, rank, ranks)


def _even(name: str, length: int, rank: int, parts: int, unit: int = 1, each: int = 1) -> tuple[int, int]:
    """A rank's range of features, ``unit`` equal heads, in equal parts of a multiple of ``each``."""
    if length % (parts * each) or length % unit:
        raise _uneven(name, length, parts, unit, each)
    return rank * (length // parts), (rank + 1) * (length // parts)


def _uneven(name: str, length: int, parts: int, unit: int, each: int) -> TransferError:
    pairs = f", each of a multiple of {each}" if each > 1 else ""
    return TransferError(
        f"{name}: {length} features cannot be split evenly over {parts} ranks{pairs} in {unit} equal units, as the "
        "engine does: use a tp that divides them"
    )


def _scale_of(name: str, tensors: Mapping[str, CheckpointTensor]) -> _ScaleOf | None:
    """Return the weight of a scale; ``None`` for a tensor that is no scale."""
    suffix = next((ending for ending in _SUFFIXES if name.endswith(f"weight{ending}")), None)
    weight = name.removesuffix(suffix or "")
    if suffix is None or weight not in tensors:
        return None
    shape, stored = tensors[name].shape, tensors[weight].shape
    if shape in ((), (1,)):
        return _ScaleOf(weight, suffix, None)
    if len(shape) == len(stored) == 2:
        cell = (_BLOCK, _BLOCK) if suffix == "_scale_inv" else (1, stored[1] // max(1, shape[1]))
        if cell[1] and shape == tuple(-(-size // width) for size, width in zip(stored, cell, strict=True)):
            return _ScaleOf(weight, suffix, cell)
    raise TransferError(
        f"{name} has shape {shape} and its weight {stored}: scales are one number, one per 128 x 128 block "
        "(weight_scale_inv), or one per group of a row"
    )


def _in_cells(scale: _ScaleOf | None, box: Box, shape: Sequence[int]) -> Box:
    """Return the box of a scale for a box of its weight; without a scale, the box itself."""
    if scale is None or scale.cell is None:
        return box
    for (start, stop), size, cell in zip(box, shape, scale.cell, strict=True):
        if start % cell or (stop % cell and stop != size):
            raise TransferError(
                f"{scale.weight} is cut at {start} to {stop} of {size}, inside of the {cell} elements of a scale: use "
                "a tp with parts that are multiples of them, or leave the weight out of the quantization"
            )
    return tuple((low // cell, -(-high // cell)) for (low, high), cell in zip(box, scale.cell, strict=True))
