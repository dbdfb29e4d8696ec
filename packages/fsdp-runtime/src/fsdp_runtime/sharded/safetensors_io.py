"""Read and write safetensors files a tensor or a slice at a time.

The format (huggingface/safetensors, README): the header's length as 8 little-endian bytes, a JSON header with every
tensor's dtype, shape and byte range, then the tensors' bytes.  ``safetensors.torch.save_file`` needs all tensors of a
file in memory at once; :class:`SafetensorsWriter` needs one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp_runtime.errors import CheckpointError, WeightsError
from fsdp_runtime.sharded.fsync import naming_write_errors, reserve, start_writing

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


#: The dtypes that files can be read in, by safetensors' names.
STORED_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

#: Bytes of one system call; the kernel ends a call at 2 GiB.
_MOVED_AT_ONCE = 2**26
#: Bytes after which the disk is told to start, so that it does not wait for the fsync.
_STARTED_AFTER = 2**25


@dataclass(frozen=True)
class TensorHeader:
    """Name, shape, dtype and size of a tensor that a file is going to hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class SafetensorsLayout:
    """Where each tensor of a safetensors file lies, known before the first byte is written."""

    def __init__(self, tensors: Sequence[TensorHeader]) -> None:
        # Wider elements first, so that every tensor begins at a multiple of its element's size.
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in ordered:
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
        self._offsets = offsets

    def offset(self, name: str) -> int:
        """The position of a tensor's first byte in the file."""
        return len(self.header) + self._offsets[name]


class SafetensorsWriter:
    """Write a safetensors file whose tensors are known beforehand, in any order, alone or with other processes.

    Without ``create`` another process has made the file, which is opened at the first write.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorHeader] | SafetensorsLayout, *, create: bool = True) -> None:
        self._layout = tensors if isinstance(tensors, SafetensorsLayout) else SafetensorsLayout(tensors)
        self._path, self._descriptor, self._unstarted = path, -1, 0
        if create:
            with self._naming_errors():
                self._descriptor = _open(path, os.O_CREAT | os.O_EXCL)
            try:
                with self._naming_errors():
                    _write_all(self._descriptor, self._layout.header, 0)
                    reserve(self._descriptor, self._layout.nbytes)
            except BaseException:
                self.close()
                raise

    def write(self, name: str, tensor: Tensor, start: int = 0) -> int:
        """Write a tensor, or a run of its elements from ``start`` in row-major order, and return the bytes."""
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        with self._naming_errors():
            if self._descriptor < 0:
                self._descriptor = _open(self._path)
            offset = self._layout.offset(name) + start * flat.itemsize
            _write_all(self._descriptor, _bytes_of(flat), offset)
        self._unstarted += flat.nbytes
        if self._unstarted >= _STARTED_AFTER:
            self._unstarted = 0
            start_writing(self._descriptor)
        return flat.nbytes

    def fsync(self) -> None:
        """Return once what this process has written is on the disk."""
        if self._descriptor >= 0:
            with self._naming_errors():
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file without waiting for the disk."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def _naming_errors(self) -> AbstractContextManager[None]:
        return naming_write_errors(self._path, self._layout.nbytes)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Return once the file is on the disk, unless writing failed."""
        try:
            if error is None:
                self.fsync()
        finally:
            self.close()


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0) | flags, 0o666)


def _write_all(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Write bytes at an offset; one system call writes at most 2 GiB."""
    view = memoryview(content)
    os.lseek(descriptor, offset, os.SEEK_SET)
    while view:
        view = view[os.write(descriptor, view[:_MOVED_AT_ONCE]) :]


class SafetensorsReader:
    """Read slices of tensors from files that are kept open; ``advice`` ends the errors about damaged ones."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._files: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}
        self._exit_stack = ExitStack()

    def headers(self, file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the dtype (in safetensors' notation, ``"BF16"``) of every tensor of a file."""
        try:
            opened = self._open(file)
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
            return {name: (tuple(item.get_shape()), item.get_dtype()) for name, item in slices.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{_describe(file)} is truncated or corrupt ({error}): {self._advice}") from error

    def read(self, file: Path, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """Return slices of a tensor, all of it without ``slices``, on the CPU in the stored dtype."""
        try:
            tensor: Tensor = self._open(file).get_slice(name)[slices or ...]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{_describe(file)} is truncated or corrupt, or lacks the tensor {name} ({error}): {self._advice}"
            ) from error
        return tensor

    def starts(self, file: Path) -> dict[str, int]:
        """Return the position of each tensor's first byte in a file."""
        self._open(file)
        size = int.from_bytes(os.pread(self._descriptors[file], 8, 0), "little")
        header = json.loads(os.pread(self._descriptors[file], size, 8))
        return {name: 8 + size + item["data_offsets"][0] for name, item in header.items() if name != "__metadata__"}

    def read_into(self, file: Path, start: int, values: Tensor) -> None:
        """Fill a contiguous tensor on the CPU with the bytes of a file from ``start`` on, in large reads."""
        flat = values.reshape(-1)
        view = _bytes_of(flat)
        try:
            while view:
                if not (count := os.preadv(self._descriptors[file], [view[:_MOVED_AT_ONCE]], start)):
                    raise EOFError("it ends early")
                view, start = view[count:], start + count
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{_describe(file)} is truncated or corrupt ({error}): {self._advice}") from error

    def identity(self) -> tuple[tuple[str, int, bytes, tuple[int, int]], ...]:
        """Return names, sizes and hashes of headers, the same on two ranks that have opened the same files.

        The inode and the time of change follow, which copies of a file do not share.
        """
        found = []
        for file, descriptor in sorted(self._descriptors.items()):
            status = os.fstat(descriptor)
            size = min(int.from_bytes(os.pread(descriptor, 8, 0), "little"), status.st_size)
            digest = hashlib.blake2b(os.pread(descriptor, size, 8), digest_size=16).digest()
            found.append((file.name, status.st_size, digest, (status.st_ino, status.st_mtime_ns)))
        return tuple(found)

    def close(self) -> None:
        """Close all files."""
        self._files.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._exit_stack.close()

    def _open(self, file: Path) -> Any:
        while file not in self._files:
            try:
                descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            except FileNotFoundError as error:
                raise self._missing(file) from error
            try:
                opened = self._exit_stack.enter_context(safe_open(file, framework="pt"))
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):  # else another process has replaced the file
                    self._files[file], self._descriptors[file] = opened, descriptor
            except (FileNotFoundError, RuntimeError) as error:  # torch opens it once more, with an error of its own
                if file.exists():
                    raise
                raise self._missing(file) from error
            finally:
                if file not in self._descriptors:
                    os.close(descriptor)
        return self._files[file]

    def _missing(self, file: Path) -> CheckpointError:
        return CheckpointError(
            f"{file} is missing: {self._advice}; if another job has replaced the checkpoint, load it again"
        )


def _bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; ``Tensor.numpy`` would fix the size of its storage."""
    if not flat.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")


def _describe(file: Path) -> str:
    return f"{file} ({file.stat().st_size} bytes)" if file.is_file() else f"{file} (missing)"
