"""Writing one safetensors file tensor by tensor, so that no more than one need be in memory.

The format (huggingface/safetensors, README): the header's length as 8 little-endian bytes, the header as JSON that
gives every tensor's dtype, shape and byte range, then the tensors' bytes.  ``safetensors.torch.save_file`` wants all
tensors of a file at once.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightsError

_WORDS = {
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
class Planned:
    """A tensor that a file is going to hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class SafetensorsFile:
    """A safetensors file whose tensors are known beforehand and come in any order.

    Args:
        path: the file to create.
        tensors: all that it will hold.

    Raises:
        WeightsError: a dtype that the format does not have.
    """

    def __init__(self, path: Path, tensors: Sequence[Planned]) -> None:
        # Wider elements first, so that every tensor begins at a multiple of its element's size.
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        self._begins: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in ordered:
            if tensor.dtype not in _WORDS:
                raise WeightsError(f"{tensor.name}: safetensors has no {tensor.dtype}; pass another dtype")
            end = offset + tensor.nbytes
            header[tensor.name] = {
                "dtype": _WORDS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            self._begins[tensor.name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._file: BinaryIO = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device."""
        tensor = tensor.detach().contiguous().cpu()
        self._file.seek(self._data + self._begins[name])
        if tensor.nbytes:
            self._file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Return once the file is on the disk, unless writing failed."""
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
