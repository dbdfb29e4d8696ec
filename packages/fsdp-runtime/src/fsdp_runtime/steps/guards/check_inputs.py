"""An opt-in check that ranks which share a batch were given the same inputs.

Ranks of one ``tp`` group compute parts of the same activations.  Where their inputs differ, as when a data loader deals
samples by global rank, the sums over ``tp`` mix samples and every log-probability is wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import LayoutError
from fsdp_runtime.mesh.spec import submesh
from fsdp_runtime.setup import Setup
from fsdp_runtime.sharded.hashing import hash_words
from fsdp_runtime.step import Step
from fsdp_runtime.wrap import hook_model

#: Odd multiplier of a digest, so that equal digests of two inputs do not cancel in a sum.
_MIX = -7046029254386353131


def assert_inputs_equal(mesh: DeviceMesh, inputs: Mapping[str, Any], *, axis: str = "tp") -> None:
    """Raise on every rank of an axis unless all of them were given equal inputs.  Collective over the axis.

    Use it before ``SequenceLayout.shard`` for labels and masks that the ranks of ``cp`` take their tokens from; for the
    inputs of a model's forward, the step :class:`CheckInputs` does it.

    Args:
        mesh: the mesh of the model.
        inputs: tensors and plain values by name, in nested containers or not.  Equal means equal names, dtypes, shapes
            and bits.
        axis: the axis whose ranks are compared.

    Raises:
        LayoutError: two ranks differ; the message names the inputs and the ranks.
        MeshError: the mesh has no such axis.

    Example:
        >>> import torch
        >>> from fsdp_runtime import MeshSpec, assert_inputs_equal
        >>> mesh = MeshSpec(tp=1).build(device_type="cpu")
        >>> assert_inputs_equal(mesh, {"labels": torch.arange(4)})
    """
    _compare(inputs, submesh(mesh, axis).get_group(), axis)


class InputCheck:
    """A forward pre-hook that compares digests of all inputs over process groups."""

    # One all-gather of two int64 a rank and a group, and one wait for its result, a forward. A rank that was given
    # other inputs makes every rank of the group raise. Ranks of ``cp`` must get the same names, shapes and
    # ``attention_mask``.

    def __init__(self, tp: ProcessGroup | None, cp: ProcessGroup | None) -> None:
        self.tp, self.cp = tp, cp

    def __deepcopy__(self, memo: dict[int, Any]) -> InputCheck:
        """Return itself: a copied model has the same ranks, and a process group cannot be copied."""
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ``LayoutError`` where ranks were given different inputs."""
        inputs = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        if self.tp is not None:
            _compare(inputs, self.tp, "tp")
        if self.cp is not None:
            _compare(dict(_shared_over_cp(inputs)), self.cp, "cp")


@dataclass(frozen=True)
class CheckInputs(Step):
    """Compare the inputs of every forward over the ranks of ``tp``, which must be equal, and their shapes over ``cp``.

    One all-gather of 16 bytes and one host synchronisation a forward.
    """

    @classmethod
    def examples(cls) -> tuple[Step, ...]:
        """Return steps for tests that combine options."""
        return (cls(),)

    def apply(self, model: nn.Module, setup: Setup, found: None) -> None:
        """Register the check in front of all other hooks of the model."""
        groups = [None if mesh is None else mesh.get_group() for mesh in (setup.meshes.tp, setup.meshes.cp)]
        hook_model(model, "compares inputs over ranks", InputCheck(*groups), first=True)


def _compare(inputs: Mapping[str, Any], group: ProcessGroup, axis: str) -> None:
    values = dict(_leaves((), inputs))
    digests = {name: _digest(name, value) for name, value in values.items()}
    device = next((v.device for v in values.values() if isinstance(v, Tensor)), torch.device("cpu"))
    names = torch.tensor(crc32(repr(sorted(values)).encode()), device=device, dtype=torch.int64)
    content = sum((value.to(device) * _MIX for value in digests.values()), torch.zeros_like(names))
    own = torch.stack([names, content])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    if bool((torch.stack(gathered) != own).any()):
        raise LayoutError(_message(values, digests, group, axis))


def _message(values: Mapping[str, Any], digests: Mapping[str, Tensor], group: ProcessGroup, axis: str) -> str:
    """Name the inputs that differ and their ranks.  Collective over the group, whose ranks all fail."""
    own = {name: (_description(value), int(digests[name])) for name, value in values.items()}
    gathered: list[dict[str, tuple[str, int]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    names = dict.fromkeys(name for one in gathered for name in one)
    differing = [name for name in names if len({one.get(name) for one in gathered}) > 1]
    by_name = []
    for name in differing[:4]:
        described = [one.get(name, ("missing", 0))[0] for one in gathered]
        by_name.append(f"{name}: " + ", ".join(f"{d} on rank {r}" for d, r in zip(described, ranks, strict=True)))
    return (
        f"ranks {ranks} of one {axis} group were given different inputs ({'; '.join(by_name)}): deal batches by "
        f"data-parallel rank, submesh(mesh, 'dp').get_local_rank(), so that the ranks of a {axis} group load the same "
        "samples"
    )


def _shared_over_cp(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what ranks with shards of one batch have in common: shapes, and the full-length mask."""
    tokens = next((inputs[n] for n in ("input_ids", "inputs_embeds") if isinstance(inputs.get(n), Tensor)), None)
    for name, value in _leaves((), inputs):
        is_full_mask = name == "attention_mask" and tokens is not None and value.shape[-1] != tokens.shape[1]
        yield name, f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) and not is_full_mask else value


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors and plain values in nested containers, by dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from _leaves((*path, str(index)), inner)
    elif isinstance(value, (Tensor, bool, int, float, str)) or value is None:
        yield ".".join(path), value


def _digest(name: str, value: Any) -> Tensor:
    """Return an int64 that depends on the name, dtype, shape, and every element with its position."""
    if not isinstance(value, Tensor):
        return torch.tensor(crc32(f"{name} {value!r}".encode()), dtype=torch.int64)
    local = value.to_local() if isinstance(value, DTensor) else value
    return hash_words(local) + crc32(f"{name} {local.dtype} {tuple(local.shape)}".encode())


def _description(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:40]
    first = value.detach().flatten()[:3].tolist()
    return f"{list(value.shape)} beginning {first}"
