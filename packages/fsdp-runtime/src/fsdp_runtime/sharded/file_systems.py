"""Decide whether processes may write to one file at a time, by their hosts and the type of the file system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

#: File systems of one host, and file systems that separate the writes of several hosts to one file by byte.  NFS writes
#: whole pages back: if two hosts write to one page, the bytes of one host may be lost.
_COHERENT = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"),
        *("lustre", "gpfs", "beegfs", "ceph", "wekafs", "ocfs2", "gfs2"),
    )
)


@dataclass(frozen=True)
class FilePlace:
    """Host and file system of a directory as seen by a rank; empty strings if unknown."""

    host: str  # the same on all ranks of a host
    file_system: str  # type, such as "nfs4"


def file_place(path: Path) -> FilePlace:
    """Return the place of a path, or of the nearest existing directory above the path, as seen by this process."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return FilePlace("", "")
    return FilePlace(host, _type_at(path, mounts))


def may_share_files(places: Iterable[FilePlace]) -> bool:
    """Return whether the ranks of these places may all write to one file."""
    found = set(places)
    hosts = {place.host for place in found}
    return ("" not in hosts and len(hosts) == 1) or all(place.file_system in _COHERENT for place in found)


def by_host(places: Mapping[int, FilePlace]) -> list[int]:
    """Return ranks in an order with neighbours on different hosts, if the ranks have several hosts."""
    seen: dict[str, int] = {}
    order = []
    for rank, place in places.items():
        seen[place.host] = seen.get(place.host, -1) + 1
        order.append((seen[place.host], rank))
    return [rank for _, rank in sorted(order)]


def _type_at(path: Path, mounts: str) -> str:
    """The type of the file system that is mounted at a path or nearest above the path."""
    resolved, best, kind = str(path.resolve()), -1, ""
    for line in mounts.splitlines():
        mounted, _, described = line.partition(" - ")
        point = mounted.split()[4].replace("\\040", " ")
        is_above = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= best:  # the later of two mounts at one point is visible
            best, kind = len(point), described.split()[0]
    return kind
