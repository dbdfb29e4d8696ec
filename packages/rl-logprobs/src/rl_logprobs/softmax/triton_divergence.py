"""Divergences of two softmaxes by Triton kernels: one launch for a tile of both, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_logprobs._torch_compat import wide_product
from rl_logprobs.softmax.fused_linear import Gradients, HeadTiles
from rl_logprobs.softmax.tile_pair import TilePair, Tiles
from rl_logprobs.softmax.triton_backend import (
    LaunchRows,
    blocks,
    gradient_options,
    kernel_output,
    launch,
    reduce_options,
    rows_of,
    temperatures_of,
)
from rl_logprobs.softmax.triton_linear import head_gradients, head_map

KERNELS = "softmax.triton_divergence_kernels"
#: Columns of a lane, of two rows: four of each keep every variant in the registers.
UNITS = 4


def add_sums(pair: TilePair, state: torch.Tensor, numbers: torch.Tensor | None = None, share: float = 1.0) -> None:
    """Add this rank's columns to ``state``: sums, or with the ``numbers`` of a mixture its divergences in bits."""
    for first_token, cols, p, q in _tiles(pair):
        width = p.shape[-1]
        given = {
            **_arguments(pair, cols, share),
            "numbers": numbers,
            "state": state,
            "width": width,
            "MIXTURE": numbers is not None,
            **reduce_options(pair.dtype, width, units=UNITS),
        }
        for rows in rows_of(p, q, first_token=first_token):
            launch(KERNELS, "sums_kernel", (rows.number,), state.device, **given, **_strides(rows))


def gradients(pair: TilePair, needed: Sequence[bool], kind: int, numbers: torch.Tensor, share: float) -> Gradients:
    """Return the gradients of the tensors of ``p``."""

    def write(p: torch.Tensor, q: torch.Tensor, first_token: int, cols: slice, out: torch.Tensor) -> None:
        columns, options = out.shape[-1], gradient_options(pair.dtype, out.shape[-1])
        given = {**_arguments(pair, cols, share), "numbers": numbers, "KIND": kind, **options}
        given |= {"width": p.shape[-1], "out_width": columns}
        for rows in rows_of(p, q, out, first_token=first_token) if out.numel() else ():
            grid = rows.number, blocks(columns, options["BLOCK"])
            launch(KERNELS, "divergence_gradient_kernel", grid, out.device, **given, **_strides(rows))

    if isinstance(pair.p, HeadTiles):

        def write_tile(products: torch.Tensor, span: slice, cols: slice, out: torch.Tensor) -> None:
            write(products, _tile(pair.q, span, cols), span.start, cols, out)

        return head_gradients(pair.p, needed, pair.ignored, write_tile)
    found = torch.zeros_like(pair.p.values, memory_format=torch.contiguous_format)
    out = kernel_output(found)
    whole = not isinstance(pair.q, HeadTiles)
    flat = out if whole else out.view(-1, out.shape[-1])
    for first_token, cols, p, q in _tiles(pair):
        write(p, q, first_token, cols, flat if whole else flat[first_token : first_token + len(p), cols])
    return (found if out is found else found.copy_(out),)


def _tiles(pair: TilePair) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
    """Yield the first token, the columns, and logits or products of both; logits of both sides at once."""
    width = pair.shard.width
    if isinstance(pair.p, HeadTiles) or isinstance(pair.q, HeadTiles):
        for span, cols in pair.spans():
            yield span.start, cols, _tile(pair.p, span, cols), _tile(pair.q, span, cols)
    elif width:
        yield 0, slice(0, width), pair.p.values[..., :width], pair.q.values[..., :width]


def _tile(tiles: Tiles, span: slice, cols: slice) -> torch.Tensor:
    if isinstance(tiles, HeadTiles):
        weight = tiles.weight[cols].to(tiles.operand_dtype)
        return wide_product(tiles.operand[span], weight.t(), tiles.dtype)
    return tiles.tile(span, cols)


def _arguments(pair: TilePair, cols: slice, share: float) -> dict[str, Any]:
    """Return the kernels' arguments of both sides that all rows share."""
    found: dict[str, Any] = {
        "ignored": pair.ignored,
        "tokens": pair.ignored.numel(),
        "LOG2_SHARE": math.log2(share) if 0 < share < 1 else 0.0,
        "LOG2_OTHER_SHARE": math.log2(1 - share) if 0 < share < 1 else 0.0,
    }
    for name, tiles, temperature in (("p", pair.p, pair.p_temperature), ("q", pair.q, pair.q_temperature)):
        head = {"biases": None, "SCALE": None, "SOFTCAP": None}
        if isinstance(tiles, HeadTiles):
            head = head_map(tiles, cols)
        for key, value in (head | temperatures_of(temperature, pair.ignored.device)).items():
            found[f"{name.upper() if key.isupper() else name}_{key}"] = value
    return found


def _strides(rows: LaunchRows) -> dict[str, Any]:
    found: dict[str, Any] = {"inner": rows.inner, "first_token": rows.first_token}
    for name, tensor, (outer, row) in zip(("p", "q", "out"), rows.tensors, rows.strides, strict=False):
        found[name if name == "out" else f"{name}_logits"] = tensor
        found |= {f"{name}_outer_stride": outer, f"{name}_row_stride": row, f"{name}_column_stride": tensor.stride(-1)}
    return found
