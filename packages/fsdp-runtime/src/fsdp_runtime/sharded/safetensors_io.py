"""Read and write safetensors files a tensor or a slice at a time.

The format (huggingface/safetensors, README): the header's length as 8 little-endian bytes, a JSON header with every
tensor's dtype, shape and byte range, then the tensors' bytes.  ``safetensors.torch.save_file`` needs all tensors of a
file in memory at once; :class:`SafetensorsWriter` needs one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp_runtime.errors import CheckpointError, WeightsError
from fsdp_runtime.sharded.async_saves import HostStaging, drained
from fsdp_runtime.sharded.boxes import inside
from fsdp_runtime.sharded.saved_files import MOVED_AT_ONCE, create_file, naming_write_errors, write_all
from tp_plans.boxes import Box, box_shape, full_box, intersection, split_box, volume

#: The format's names of dtypes.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


#: The dtypes of tensors that can be read, by safetensors' names.
STORED_DTYPES = {
    **{name: dtype for dtype, name in DTYPE_NAMES.items()},
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}

#: Shorter runs are read together with the gaps between them, which is faster than a system call for each run.
_LONG_RUN = 2**16
#: Bytes of short runs and gaps per read.
_READ_THROUGH = 2**24


@dataclass(frozen=True)
class WeightInfo:
    """Metadata of a weight, enough for a file or a receiver to allocate the weight."""

    name: str  # the weight's name
    dtype: torch.dtype  # the weight's dtype
    shape: tuple[int, ...]  # the weight's full shape

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsLayout:
    """Offsets of the tensors in a safetensors file, known before the first byte is written."""

    def __init__(self, tensors: Sequence[WeightInfo]) -> None:
        # Wider elements first, so that every tensor begins at a multiple of its element's size.
        offset, offsets = 0, dict[str, int]()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
            if tensor.dtype not in DTYPE_NAMES:
                raise WeightsError(f"{tensor.name}: safetensors has no {tensor.dtype}; pass another dtype")
            end = offset + tensor.nbytes
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offsets[tensor.name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + offset
        self.first_bytes = {name: len(self.header) + start for name, start in offsets.items()}


class SafetensorsWriter:
    """Create a safetensors file with known layout and full size, and write its tensors in any order."""

    # A write keeps the file open until :meth:`close`: its descriptor reports a failed write-back. With ``staging``,
    # :meth:`add` copies tensors to host memory, and :meth:`finish` writes the copies.

    def __init__(
        self,
        path: Path,
        tensors: Sequence[WeightInfo],
        *,
        staging: HostStaging | None = None,
        with_checksums: bool = False,
    ) -> None:
        self._layout = SafetensorsLayout(tensors)
        self.path, self._descriptor = path, -1
        self._staging, self._staged = staging, list[tuple[str, list[Tensor]]]()
        # CRC-32 of each written tensor, for tensors that are written in order
        self.checksums = defaultdict[str, int](int) if with_checksums else None
        create_file(path, self._layout.header, self._layout.nbytes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write or stage a tensor."""
        if self._staging is None:
            self.write(name, tensor)
        else:
            self._staged.append((name, self._staging.copy(tensor)))

    def write(self, name: str, tensor: Tensor, start: int = 0) -> int:
        """Write a tensor, or a run of its elements from ``start`` in row-major order, and return the bytes."""
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        with self._opened() as descriptor:
            write_all(descriptor, memory_of(flat), self._layout.first_bytes[name] + start * flat.itemsize)
        if self.checksums is not None:
            self.checksums[name] = zlib.crc32(memory_of(flat), self.checksums[name])
        return flat.nbytes

    def fsync(self) -> None:
        """Return once the file is on the disk."""
        with self._opened() as descriptor:
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the file without waiting for the disk."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with naming_write_errors(self.path, self._layout.nbytes):
            if self._descriptor < 0:
                self._descriptor = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            yield self._descriptor

    def finish(self) -> None:
        """Write staged tensors, and close the file once it is on the disk."""
        try:
            for name, pieces in drained(self._staged):
                start = 0
                for piece in drained(pieces):
                    start += self.write(name, piece, start)
            self.fsync()
        finally:
            self.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish() if kind is None else self.close()


def file_runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int, int]]:
    """Yield a box's contiguous runs: first element in the full tensor, first element in the box, number of elements."""
    length = run_length(box, shape)
    strides, sizes = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))], box_shape(box)
    for number in range(volume(box) // length if length else 0):
        rest, start = number * length, 0
        for dim in reversed(range(len(shape))):
            rest, index = divmod(rest, sizes[dim])
            start += (box[dim][0] + index) * strides[dim]
        yield start, number * length, length


def run_length(box: Box, shape: Sequence[int]) -> int:
    """Return the length of a box's contiguous runs in the full tensor, in elements."""
    length = 1
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        length *= stop - start
        if stop - start < size:
            break
    return length


@dataclass(frozen=True)
class _Opened:
    descriptor: int
    headers: Mapping[str, tuple[tuple[int, ...], str, int]]
    version: tuple[int, int]  # every write to the file changes it


class SafetensorsReader:
    """Read slices of tensors from files that stay open; an error about a damaged file ends with ``advice``."""

    # Reads by system calls: if another process truncates a file mapped to memory, the reader's process ends.

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._files: dict[Path, _Opened] = {}

    def headers(self, file: Path) -> Mapping[str, tuple[tuple[int, ...], str, int]]:
        """Return shape, dtype (in safetensors' notation, ``"BF16"``) and first byte of every tensor of a file."""
        while file not in self._files:
            self._open(file)
        return self._files[file].headers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_box(self, file: Path, name: str, needed: Box | None = None) -> Tensor:
        """Return a box of a tensor, by default the full tensor, on the CPU in the stored dtype."""
        shape, stored, first = self.headers(file).get(name, ((), "", 0))
        box, dtype = full_box(shape) if needed is None else needed, STORED_DTYPES.get(stored)
        if dtype is None or len(box) != len(shape) or (volume(box) and intersection(box, full_box(shape)) != box):
            content = f"has it as {stored} of shape {shape}" if stored else "lacks it"
            raise CheckpointError(
                f"{_describe(file)}: {box} of the tensor {name} is needed, and the file {content}: {self._advice}"
            )
        values = torch.empty(box_shape(box), dtype=dtype)
        if _in_long_runs(box, shape, dtype):
            self._read_runs(file, first, shape, box, values)
            return values
        limit = _READ_THROUGH // dtype.itemsize * volume(box) // math.prod(shape)
        for part in split_box(box, max(limit, 1)):
            wide = part
            for dim in reversed(range(len(box))):
                if not _in_long_runs(wide, shape, dtype):
                    wide = (*wide[:dim], (0, shape[dim]), *wide[dim + 1 :])
            through = torch.empty(box_shape(wide), dtype=dtype)
            self._read_runs(file, first, shape, wide, through)
            values[inside(box, part)].copy_(through[inside(wide, part)])
        return values

    def _read_runs(self, file: Path, first: int, shape: Sequence[int], box: Box, values: Tensor) -> None:
        """Fill ``values`` with a box of the stored tensor of ``shape`` that begins at byte ``first`` of a file."""
        memory, itemsize = memory_of(values.view(-1)), values.itemsize
        try:
            for start, inner, length in file_runs(shape, box):
                view, at = memory[inner * itemsize : (inner + length) * itemsize], first + start * itemsize
                while view:
                    if not (count := os.preadv(self._files[file].descriptor, [view[:MOVED_AT_ONCE]], at)):
                        raise EOFError("it ends early")
                    view, at = view[count:], at + count
        except (OSError, EOFError) as error:
            raise self._damaged(file, error) from error

    def identity(self) -> tuple[tuple[str, int, bytes, tuple[int, int]], ...]:
        """Return names, sizes and hashes of headers, equal on ranks that have opened the same files."""
        # The inode and the time of change come last; copies of a file differ in them.
        identities = []
        for file, opened in sorted(self._files.items()):
            size, changed = opened.version
            digest = hashlib.blake2b(repr(opened.headers).encode(), digest_size=16).digest()
            identities.append((file.name, size, digest, (os.fstat(opened.descriptor).st_ino, changed)))
        return tuple(identities)

    def require_unchanged(self) -> None:
        """Raise if a file was written to since it was opened."""
        for file, opened in self._files.items():
            if _version(opened.descriptor) != opened.version:
                raise CheckpointError(
                    f"{file} was written to while it was loaded, and the model may mix old and new values: load it "
                    "again once it is complete; saves of fsdp_runtime replace files and never write to old ones"
                )

    def close(self) -> None:
        """Close all files."""
        for opened in self._files.values():
            os.close(opened.descriptor)
        self._files.clear()

    def _open(self, file: Path) -> None:
        """Open a file; leave it closed if another process replaces it meanwhile."""
        descriptor = None
        try:
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            version = _version(descriptor)
            with safe_open(file, framework="pt"):  # checks the header
                size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
                header = json.loads(os.pread(descriptor, min(size, version[0]), 8))
                header.pop("__metadata__", None)
                headers = {
                    name: (tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
                    for name, entry in header.items()
                }
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                    self._files[file] = _Opened(descriptor, headers, version)
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            if file.exists():
                raise self._damaged(file, error) from error
            raise CheckpointError(
                f"{file} is missing: {self._advice}; if another job has replaced the checkpoint, load it again"
            ) from error
        finally:
            if descriptor is not None and file not in self._files:
                os.close(descriptor)

    def _damaged(self, file: Path, error: Exception) -> CheckpointError:
        return CheckpointError(f"{_describe(file)} is truncated or corrupt ({error}): {self._advice}")


def _in_long_runs(box: Box, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether reading only the box is faster than reading the gaps between its runs too."""
    run = run_length(box, shape)
    return run >= volume(box) or run * dtype.itemsize >= _LONG_RUN


def _version(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def memory_of(flat: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; ``Tensor.numpy`` would fix the size of its storage."""
    if not flat.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")


def _describe(file: Path) -> str:
    return f"{file} ({file.stat().st_size} bytes)" if file.is_file() else f"{file} (missing)"
