"""Plan the files of a save: one rank writes each file, and ranks write about equal bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.weights.export import ExportGroup

#: Bytes that are gathered to a rank at once: the disk writes one bucket while the next is gathered.
BUCKET_BYTES = 2**26
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_T = TypeVar("_T", bound=_Sized)


@dataclass
class RankFiles:
    """The files that one rank writes, and the groups that are gathered to the rank, in the order of the files."""

    files: list[tuple[str, list[WeightInfo]]] = field(default_factory=list)  # names and tensors
    buckets: list[list[ExportGroup]] = field(default_factory=list)  # one gather per bucket


@dataclass(frozen=True)
class _SizedGroup:
    group: ExportGroup
    position: int  # in the model
    tensors: list[WeightInfo]
    has_plain: bool

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(item.nbytes for item in self.tensors)


def _has_plain(group: ExportGroup) -> bool:
    """Return whether copies of a source may differ between ranks, or a source is a file: the first rank writes it."""
    sources = group.sources.values()
    if group.ranks is None:
        return not sources or not all(isinstance(tensor, DTensor) for tensor in sources)
    return not all(isinstance(tensor, nn.Parameter) for tensor in sources)  # equal on the ranks of all stages


def plan_files(
    groups: Sequence[ExportGroup], max_shard_size: int | str, machines: Mapping[int, str]
) -> dict[int, RankFiles]:
    """Return the files of each rank that writes, equal on every rank; ``machines`` maps each rank to its host."""
    sized = [
        _SizedGroup(group, position, [part for item in group.tensors for part in item.stored], _has_plain(group))
        for position, group in enumerate(groups)
    ]
    ranks = _by_machine(machines)
    hosts = len({*machines.values()}) if any(not member.has_plain for member in sized) else 1
    limit = min(parse_bytes(max_shard_size), max(-(-sum(member.nbytes for member in sized) // hosts), 1))
    # Copies of a plain tensor may differ between ranks, such as buffers: the first rank writes its copy.
    in_order = sorted(sized, key=lambda member: (member.group.ranks or (), not member.has_plain))
    of_stages = (list(members) for _, members in groupby(in_order, lambda member: member.group.ranks))
    runs = [run for members in of_stages for run in split_by_bytes(members, limit)]
    contents = []
    for run in runs:
        run.sort(key=lambda member: member.position)
        # A group that is larger than a file is gathered once: its files have one writer.
        contents.append(list(split_by_bytes([item for member in run for item in member.tensors], limit)))
    count, number = sum(map(len, contents)), 0
    nbytes, plan = dict.fromkeys(ranks, 0), dict[int, RankFiles]()
    for run, files in zip(runs, contents, strict=True):
        holders = [rank for rank in ranks if rank in (run[0].group.ranks or ranks)]
        writer = holders[0] if any(member.has_plain for member in run) else min(holders, key=nbytes.__getitem__)
        nbytes[writer] += sum(member.nbytes for member in run)
        share = plan.setdefault(writer, RankFiles())
        share.buckets += split_by_bytes([member.group for member in run], BUCKET_BYTES)
        for items in files:
            number += 1
            share.files.append((shard_name(number, count), items))
    return plan


def split_by_bytes(items: Sequence[_T], limit: int) -> Iterator[list[_T]]:
    """Yield runs of items of up to ``limit`` bytes; a larger item has a separate run."""
    batch: list[_T] = []
    size = 0
    for item in items:
        if batch and size + item.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.nbytes
    if batch:
        yield batch


def _by_machine(machines: Mapping[int, str]) -> list[int]:
    """Return the ranks round-robin over the hosts; the first rank stays first."""
    seen: dict[str, int] = {}
    order = []
    for rank, machine in machines.items():
        seen[machine] = seen.get(machine, -1) + 1
        order.append((seen[machine], rank))
    return [rank for _, rank in sorted(order)]


def parse_bytes(size: int | str) -> int:
    """Return a ``max_shard_size`` in bytes: an int, or a number with a unit such as ``"5GB"`` or ``"500MiB"``."""
    nbytes: object = size
    if isinstance(size, str) and (text := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B", size.strip())):
        nbytes = int(float(text[1]) * (1024 if text[3] else 1000) ** _POWERS[text[2] or ""])
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1:
        raise OptionError(f"max_shard_size={size!r}: write a positive number of bytes, or a text such as '5GB'")
    return nbytes


def shard_name(number: int, count: int) -> str:
    """Return the usual name of a file of a checkpoint."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"
