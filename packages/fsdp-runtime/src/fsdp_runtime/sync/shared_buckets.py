"""Buckets in shared memory of a host's ranks: messages on the host do not cross the process group.

Each rank owns one bucket, a file in ``/dev/shm``.  Its name is removed once the ranks of the host have opened the file,
so the memory is freed as soon as the last rank closes the file or dies.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sync.point_to_point import Handshake
from fsdp_runtime.sync.schedule import Message, Round, aligned

#: Linux's file system in memory.
_FOLDER = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SharedBuckets:
    """The buckets of this rank and of the other ranks of its host."""

    # The group carries only the offset of a message in the sender's bucket.

    def __init__(self, rounds: Sequence[Round], rank: int, handshake: Handshake) -> None:
        self._rank, self._maps = rank, dict[int, mmap.mmap]()
        self._buckets: Mapping[int, Tensor] = {}
        with handshake.agreement():
            host = _host()
        token = secrets.randbits(62)
        table = handshake.gather([host, token])
        self._tokens = {peer: each for peer, (other, each) in table.items() if other == host}
        path = _path(token)
        try:
            with handshake.agreement():
                sent = [[each for each in messages if each.source == rank and self.shares(each)] for messages in rounds]
                self._maps[rank] = _mapped(path, max([1, *(sum(aligned(e.nbytes) for e in each) for each in sent)]))
            with handshake.agreement():
                senders = {each.source for messages in rounds for each in messages if each.destination == rank}
                for peer in senders & self._tokens.keys() - {rank}:
                    self._maps[peer] = _mapped(_path(self._tokens[peer]))
        except BaseException:
            self.close()
            raise
        finally:
            path.unlink(missing_ok=True)
        self._buckets = {peer: torch.frombuffer(each, dtype=torch.uint8) for peer, each in self._maps.items()}

    def shares(self, message: Message) -> bool:
        """Whether a message of this rank stays on its host."""
        return message.source in self._tokens and message.destination in self._tokens

    def places(self, messages: Round) -> dict[int, int]:
        """Offsets of this rank's messages of a round in its bucket, by receiving rank."""
        offsets, offset = dict[int, int](), 0
        for message in messages:
            if message.source == self._rank and self.shares(message):
                offsets[message.destination] = offset
                offset += aligned(message.nbytes)
        return offsets

    def run(self, message: Message, place: int) -> Tensor:
        """The bytes of a shared message (see :meth:`shares`) at offset ``place`` in the sender's bucket."""
        return self._buckets[message.source][place : place + message.nbytes]

    def close(self) -> None:
        """Close the buckets of this host; the memory is free once all ranks of the host have closed them."""
        self._buckets = {}
        for each in self._maps.values():
            with suppress(BufferError):  # a view still exists: the view's end closes the memory
                each.close()


def _host() -> int:
    """A number that is equal for processes with the same ``/dev/shm``."""
    if not _FOLDER.is_dir():
        raise OptionError(f"shared_memory=True: this machine has no {_FOLDER}; leave it out")
    boot = _BOOT.read_text() if _BOOT.exists() else os.uname().nodename
    return int.from_bytes(hashlib.sha256(f"{boot} {_FOLDER.stat().st_dev}".encode()).digest()[:7], "big")


def _path(token: int) -> Path:
    return _FOLDER / f"fsdp-runtime-{token:016x}"


def _mapped(path: Path, created: int = 0) -> mmap.mmap:
    """Map a file; create it first if ``created`` bytes are given."""
    file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if created else 0), 0o600)
    try:
        if created:  # allocate all bytes now: a later write to a full file system would end the process
            os.posix_fallocate(file, 0, created)
        return mmap.mmap(file, created)
    finally:
        os.close(file)
