"""Read and write safetensors files a tensor or a slice at a time.

The format (huggingface/safetensors, README): the header's length as 8 little-endian bytes, a JSON header with every
tensor's dtype, shape and byte range, then the tensors' bytes.  ``safetensors.torch.save_file`` needs all tensors of a
file in memory at once; :class:`SafetensorsWriter` needs one.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp_runtime.errors import CheckpointError, WeightsError
from fsdp_runtime.sharded.fsync import naming_write_errors

_DTYPE_NAMES = {
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


@dataclass(frozen=True)
class TensorHeader:
    """Name, shape, dtype and size of a tensor that a file is going to hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class SafetensorsWriter:
    """Write one safetensors file whose tensors are known beforehand and arrive in any order.

    Args:
        path: the file to create.
        tensors: the headers of all its tensors.

    Raises:
        WeightsError: the format lacks a tensor's dtype.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorHeader]) -> None:
        # Wider elements first, so that every tensor begins at a multiple of its element's size.
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in ordered:
            if tensor.dtype not in _DTYPE_NAMES:
                raise WeightsError(f"{tensor.name}: safetensors has no {tensor.dtype}; pass another dtype")
            end = offset + tensor.nbytes
            header[tensor.name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            self._offsets[tensor.name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self._path, self._nbytes = path, self._data_start + offset
        with naming_write_errors(path, self._nbytes):
            self._file: BinaryIO = path.open("xb")
            self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device."""
        tensor = tensor.detach().contiguous().cpu()
        with naming_write_errors(self._path, self._nbytes):
            self._file.seek(self._data_start + self._offsets[name])
            if tensor.nbytes:
                self._file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Return once the file is on the disk, unless writing failed."""
        if error is not None:
            with suppress(OSError):  # what is left in the buffer cannot be written either
                self._file.close()
            return
        with naming_write_errors(self._path, self._nbytes), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


class SafetensorsReader:
    """Read slices of tensors from safetensors files, each opened at its first use and kept open.

    Args:
        advice: the fix that an error about a damaged file names.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._files: dict[Path, Any] = {}
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

    def close(self) -> None:
        """Close all files."""
        self._files.clear()
        self._exit_stack.close()

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = self._exit_stack.enter_context(safe_open(file, framework="pt"))
            except (FileNotFoundError, RuntimeError) as error:  # torch opens it once more, with an error of its own
                if file.exists():
                    raise
                raise CheckpointError(
                    f"{file} is missing: {self._advice}; if another job has replaced the checkpoint, load it again"
                ) from error
        return self._files[file]


def _describe(file: Path) -> str:
    return f"{file} ({file.stat().st_size} bytes)" if file.is_file() else f"{file} (missing)"
