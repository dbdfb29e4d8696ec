"""Launch the Triton kernels of a softmax on tensors of any strides.  Imports Triton at the first launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.tensors import is_accelerator_assumed

KERNELS = "softmax.triton_kernels"

#: Columns of a tile that one program of the reduction holds: lanes, and columns of each lane.  On an H200 1,024 x 8 by
#: 4 warps is the fastest of 27 shapes for 2,048 and 8,192 rows of 32,000 to 151,936 columns, entropy included.
LANES, UNITS = 1024, 8
#: The most columns that a program of the gradient writes, and the columns of a thread.
LARGEST_BLOCK, COLUMNS_PER_THREAD = 2048, 8
#: Tokens that a program of the kernels over per-token numbers takes.
TOKENS = 128
#: Threads of a warp.
WARP_SIZE = 64 if torch.version.hip else 32

Grid = tuple[int, ...]


def launch(module: str, kernel: str, grid: Grid, device: torch.device, **arguments: Any) -> None:
    """Launch a kernel of one of this package's modules on the current stream of a device."""
    # Dtypes of torch are given for compile-time constants. Triton launches on the current device.
    if is_accelerator_assumed():  # a dry run counts the tensors around a launch, which have no values
        return
    from triton import language

    compiled = getattr(import_module(f"rl_logprobs.{module}"), kernel)
    converted = {
        name: getattr(language, str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value
        for name, value in arguments.items()
    }
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled[grid](**converted)
    else:
        compiled[grid](**converted)


class LaunchRows(NamedTuple):
    """Rows of tensors ``[..., width]`` that one launch reaches: at most two leading dims."""

    first_token: int
    number: int
    inner: int  # the size of the second leading dim
    strides: list[tuple[int, int]]  # of the leading dims, for each tensor
    tensors: tuple[torch.Tensor, ...]

    def arguments(self, **prefixes: str) -> dict[str, Any]:
        """Return the kernels' arguments of the rows; ``prefixes`` has a tensor's name and the prefix of its strides."""
        arguments: dict[str, Any] = {"inner": self.inner, "first_token": self.first_token}
        for (name, prefix), tensor, (outer, row) in zip(prefixes.items(), self.tensors, self.strides, strict=True):
            names = (name, f"{prefix}outer_stride", f"{prefix}row_stride", f"{prefix}column_stride")
            arguments.update(zip(names, (tensor, outer, row, tensor.stride(-1)), strict=True))
        return arguments

    @property
    def contiguous(self) -> bool:
        """Whether the columns of all tensors follow one another."""
        return all(tensor.stride(-1) == 1 for tensor in self.tensors)


def rows_of(*tensors: torch.Tensor, first_token: int = 0) -> Iterator[LaunchRows]:
    """Yield all rows of tensors of one leading shape, in the fewest parts; one unless three dims do not merge."""
    dims: list[tuple[int, list[int]]] = []
    for dim, size in enumerate(tensors[0].shape[:-1]):
        strides = [tensor.stride(dim) for tensor in tensors]
        if size == 1:
            continue
        if dims and dims[-1][1] == [size * stride for stride in strides]:
            dims[-1] = dims[-1][0] * size, strides
        else:
            dims.append((size, strides))
    if len(dims) > 2:
        rows = tensors[0].shape[1:-1].numel()
        for number, parts in zip(count(), zip(*(tensor.unbind(0) for tensor in tensors), strict=True)):
            yield from rows_of(*parts, first_token=first_token + number * rows)
        return
    (outer, outer_strides), (inner, inner_strides) = ([(1, [0] * len(tensors))] * 2 + dims)[-2:]
    pairs = list(zip(outer_strides, inner_strides, strict=True))
    yield LaunchRows(first_token, outer * inner, inner, pairs, tensors)


def reduce_options(dtype: torch.dtype, width: int, warp_size: int = WARP_SIZE, *, units: int = UNITS) -> dict[str, Any]:
    """Return the tile, the warps and the dtype of a reduction's statistics, for rows of ``width`` columns."""
    lanes = LANES if dtype is torch.float32 else LANES // 2
    tile = 1 << max(0, width - 1).bit_length()
    block = min(lanes, tile)
    units = max(1, min(units if dtype is torch.float32 else units // 2, tile // block))
    warps = max(1, block // (COLUMNS_PER_THREAD * warp_size))
    return {"UNITS": units, "BLOCK": block, "STAGES": 1, "num_warps": warps, **_statistics(dtype)}


def gradient_options(dtype: torch.dtype, width: int, warp_size: int = WARP_SIZE) -> dict[str, Any]:
    """Return the block, the warps and the dtype of the arithmetic of a gradient, for rows of ``width`` columns."""
    block = min(LARGEST_BLOCK, 1 << max(0, width - 1).bit_length())
    warps = max(1, block // (COLUMNS_PER_THREAD * warp_size))
    return {"BLOCK": block, "num_warps": warps, **_statistics(dtype)}


def _statistics(dtype: torch.dtype) -> dict[str, Any]:
    return {"WIDE": dtype, "LEAST": torch.finfo(dtype).min}


def most_units(options: SoftmaxOptions, warp_size: int = WARP_SIZE) -> int:
    """Return the most columns of a lane: fewer for statistics that need further registers."""
    further = options.argmax or options.target_rank or options.min_logit is not None
    return UNITS // (2 if warp_size == 32 else 4) if further else UNITS


def blocks(total: int, block: int) -> int:
    """Return the number of blocks that cover ``total``."""
    return -(-total // block)


def temperatures_of(temperature: float | torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Return the kernels' arguments of a temperature: float64, one or one per token; None for 1."""
    if isinstance(temperature, torch.Tensor):
        return {"temperatures": temperature.to(torch.float64).contiguous(), "temperature_stride": 1}
    if temperature == 1:
        return {"temperatures": None, "temperature_stride": 0}
    return {"temperatures": torch.full((), temperature, dtype=torch.float64, device=device), "temperature_stride": 0}


def note_write(*tensors: torch.Tensor) -> None:
    """Tell autograd that a kernel has written to tensors."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def kernel_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a kernel writes: a float32 copy of bfloat16 in Triton's interpreter."""
    # The interpreter (Triton 3.9) truncates to bfloat16 where a GPU rounds; no upstream issue found.
    interpreted = tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return tensor.float() if tensor.dtype is torch.bfloat16 and interpreted else tensor


def per_token(gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """Return a gradient of one number per token with the stride of its elements: 1, or 0 where all are one number."""
    if gradient is None:
        return None, 0
    if all(stride == 0 for stride, size in zip(gradient.stride(), gradient.shape, strict=True) if size > 1):
        return gradient, 0
    return gradient.contiguous(), 1
