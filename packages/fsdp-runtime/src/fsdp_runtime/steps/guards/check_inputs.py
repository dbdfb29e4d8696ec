"""Check that ranks of one batch were given the same inputs.

Ranks of one ``tp`` group compute parts of the same activations.  Where their inputs differ, as when a data loader deals
samples by global rank, the sums over ``tp`` mix samples and every log-probability is wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.errors import LayoutError, OptionError
from fsdp_runtime.mesh.spec import submesh
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects, required_device
from fsdp_runtime.sharded.hashing import hash_words
from fsdp_runtime.step import Step
from fsdp_runtime.wrap import hook_model
from tp_plans.runtime import computes

#: Every N-th forward, the first forwards only, or no forward.
Frequency = int | Literal["first", "never"]
#: The number of forwards that ``"first"`` compares, in training (``True``) and in evaluation.
_FIRST = {True: 2, False: 1}
#: Odd multiplier of a digest, so that equal digests of two inputs do not cancel in a sum.
_MIX = -7046029254386353131
#: The most inputs in a message, and the most elements of a tensor that ranks exchange for it.
_SHOWN, _SENT = 4, 2**24


def assert_inputs_equal(mesh: DeviceMesh, inputs: Mapping[str, Any], *, axis: str = "tp") -> None:
    """Raise on every rank of an axis unless all its ranks were given equal inputs.  Collective over the axis.

    Call it before ``SequenceLayout.shard`` for labels and masks, if ranks of ``cp`` shard them.  The step
    :class:`CheckInputs` compares the inputs of a model's forward.

    Args:
        mesh: the mesh of the model.
        inputs: tensors and plain values by name, in nested containers or not.  Equal means equal names, dtypes, shapes
            and bits.
        axis: the axis of the compared ranks.

    Raises:
        LayoutError: two ranks differ; the message names the inputs and the ranks.
        MeshError: the mesh has no axis of this name.

    Example:
        >>> import torch
        >>> from fsdp_runtime import MeshSpec, assert_inputs_equal
        >>> mesh = MeshSpec(tp=1).build(device_type="cpu")
        >>> assert_inputs_equal(mesh, {"labels": torch.arange(4)})
    """
    _compare(inputs, submesh(mesh, axis).get_group(), axis)


class InputCheck:
    """A forward pre-hook that compares digests of all inputs over process groups."""

    # A compared forward costs, per group, one all-gather of three int64 per rank and one wait for the result. If one
    # rank was given other inputs, every rank of the group raises. Ranks of ``cp`` need the same names and shapes, equal
    # tensors where tokens are not sharded, and other tokens. Ranks count forwards per mode. The first forward is
    # compared in both modes, so the check also detects ranks in different modes.

    def __init__(
        self, tp: ProcessGroup | None, cp: ProcessGroup | None, every: Frequency, attention: Any = None
    ) -> None:
        self.tp, self.cp, self.every = tp, cp, every
        self.attention = attention  # over ``cp``
        self.seen = {True: 0, False: 0}  # forwards in training and in evaluation

    def __deepcopy__(self, memo: dict[int, Any]) -> InputCheck:
        """Return itself: a copied model has the same ranks, and a process group cannot be copied."""
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ``LayoutError`` where ranks were given different inputs."""
        if torch.compiler.is_compiling():
            return
        forward = self.seen[module.training]
        self.seen[module.training] += 1
        is_nth = isinstance(self.every, int) and forward % self.every == 0
        if forward >= _FIRST[module.training] and not is_nth:
            return
        inputs = {**{str(index): value for index, value in enumerate(args)}, **kwargs, "training": module.training}
        if any(isinstance(value, Tensor) and value.is_meta for _, value in _leaves((), inputs)):
            return
        if self.tp is not None:
            _compare(inputs, self.tp, "tp")
        if self.cp is not None:
            is_whole = self.attention is not None and self.attention.whole_rows  # as in generate
            _compare(dict(_shared_over_cp(inputs)), self.cp, "cp", None if is_whole else _part_of_row(inputs))


@dataclass(frozen=True)
class CheckInputs(Step[None]):
    """Compare the inputs of forwards over ``tp``, where they must be equal, and their shapes over ``cp``.

    Ranks of ``cp`` with the same tokens and without positions were given full rows, which is an error.
    One all-gather of 24 bytes and one host synchronisation per compared forward and axis.  A call of ``parallelize``
    without this step compares the first two forwards in training and the first in evaluation.

    Args:
        every: 1 compares every forward, N the first forwards and every N-th, ``"first"`` only the first forwards.

    Raises:
        OptionError: ``every`` is neither a positive integer nor ``"first"`` or ``"never"``.
    """

    every: Frequency = 1

    def __post_init__(self) -> None:
        if self.every not in ("first", "never") and (type(self.every) is not int or self.every < 1):
            raise OptionError(f"every={self.every!r}: give a number of forwards, 1 or more, or 'first' or 'never'")

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Register the check in front of all other hooks of the model."""
        # Without a plan, ranks of ``tp`` hold replicas and compute the same; no collective sums their gradients.
        tp, cp = (None if mesh is None or not computes(mesh) else mesh for mesh in (setup.given_tp, setup.meshes.cp))
        if self.every != "never" and (tp is not None or cp is not None):
            over_tp, over_cp = (None if mesh is None else mesh.get_group() for mesh in (tp, cp))
            attention, _ = runtime_state(model).gathered or (None, ())
            check = InputCheck(over_tp, over_cp, self.every, attention)
            hook_model(model, "compares inputs over ranks", check, first=True)


def _compare(inputs: Mapping[str, Any], group: ProcessGroup, axis: str, part: Tensor | None = None) -> None:
    values = dict(_leaves((), inputs))
    digests = {name: _digest(name, value) for name, value in values.items()}
    devices = [value.device for value in values.values() if isinstance(value, Tensor)]
    device = required_device([group]) or next(iter(devices), torch.device("cpu"))
    names = torch.tensor(crc32(repr(sorted(values)).encode()), device=device, dtype=torch.int64)
    content = sum((digest.to(device) * _MIX for digest in digests.values()), torch.zeros_like(names))
    rank = torch.stack([names, content, torch.zeros_like(names) if part is None else _digest_of_part(part).to(device)])
    ranks = [torch.empty_like(rank) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, rank, group=group)
    equal = torch.stack(ranks) == rank
    same, same_part = torch.stack([equal[:, :2].all(), equal[:, 2].all() & (rank[2] != 0)]).tolist()
    if not same:
        raise LayoutError(_message(values, digests, group, axis))
    if part is not None and same_part and len(ranks) > 1:
        raise LayoutError(
            f"all {len(ranks)} ranks of cp were given the same tokens {list(part.shape)}, and each computes a part of "
            "the row: give a rank its part, sequence_layout(mesh, length).shard_batch(batch)"
        )


def _part_of_row(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens of a rank of ``cp`` without positions, which say where the part is."""
    if inputs.get("position_ids") is not None:
        return None
    return next(
        (value for n in ("input_ids", "inputs_embeds", "0") if isinstance(value := inputs.get(n), Tensor)), None
    )


def _digest_of_part(tokens: Tensor) -> Tensor:
    """Return a digest of the tokens; 0 for rows of one token, as parts of such rows are equal."""
    first = tokens[:, :1] if tokens.dim() > 1 else tokens[:1]
    return torch.where((tokens != first).any(), hash_words(local_tensor(tokens)), 0)


def _message(values: Mapping[str, Any], digests: Mapping[str, Tensor], group: ProcessGroup, axis: str) -> str:
    """Name the differing inputs and their values by rank.  Collective over the group: every rank fails."""
    ranks = ModelRanks((group,))
    by_rank = all_gather_objects(ranks, {name: int(digest) for name, digest in digests.items()})
    names = dict.fromkeys(name for digests_of_rank in by_rank.values() for name in digests_of_rank)
    differing = [name for name in names if len({of_rank.get(name) for of_rank in by_rank.values()}) > 1][:_SHOWN]
    sent = all_gather_objects(ranks, {name: _sent(values[name]) for name in differing if name in values})
    texts = [
        f"{name}: {_difference({rank: tensors.get(name) for rank, tensors in sent.items()})}" for name in differing
    ]
    return (
        f"ranks {list(by_rank)} of one {axis} group were given different inputs ({'; '.join(texts)}): deal batches by "
        f"data-parallel rank, submesh(mesh, 'dp').get_local_rank(), so that the ranks of a {axis} group load the same "
        "samples"
    )


def _sent(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)[:40]
    return local_tensor(value).detach().cpu() if value.numel() <= _SENT else str(list(value.shape))


def _difference(values: Mapping[int, Any]) -> str:
    """Return each rank's value of one input: shapes, or the first element that differs between equal shapes."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    shapes = {r: str(list(v.shape)) if isinstance(v, Tensor) else v or "missing" for r, v in values.items()}
    if len({*shapes.values()}) > 1 or len(tensors) < len(values):
        return _by_rank(shapes)
    places = torch.stack([tensor != tensors[0] for tensor in tensors]).any(0).nonzero().tolist()
    if not places:
        return _by_rank({rank: value.dtype for rank, value in values.items()})
    elements = {rank: value[tuple(places[0])].item() for rank, value in values.items()}
    return f"{list(tensors[0].shape)}, first at {places[0]}: {_by_rank(elements)}"


def _by_rank(values: Mapping[int, Any]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in values.items())


def _shared_over_cp(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the inputs that ranks of ``cp`` share: shapes, the full-length mask, and media."""
    tokens = next((inputs[n] for n in ("input_ids", "inputs_embeds") if isinstance(inputs.get(n), Tensor)), None)
    for name, value in _leaves((), inputs):
        length = None if tokens is None else tokens.shape[1]
        is_full = isinstance(value, Tensor) and length is not None and length not in value.shape
        is_equal = is_full and (name == "attention_mask" or value.is_floating_point())
        yield name, value if is_equal or not isinstance(value, Tensor) else f"{value.dtype} {list(value.shape)}"


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors and plain values in nested containers, by dotted name."""
    if isinstance(value, Mapping | tuple | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, Tensor | bool | int | float | str) or value is None:
        yield ".".join(path), value


def _digest(name: str, value: Any) -> Tensor:
    """Return an int64 that depends on the name, dtype, shape, and every element with its position."""
    if not isinstance(value, Tensor):
        return torch.tensor(crc32(f"{name} {value!r}".encode()), dtype=torch.int64)
    shape = crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    if isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements):
        return torch.tensor(shape, dtype=torch.int64)  # each rank has a shard
    return hash_words(local_tensor(value)) + shape
