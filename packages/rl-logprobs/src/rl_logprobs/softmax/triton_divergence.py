"""Divergences of two softmaxes by Triton kernels: one launch for a tile of both, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_logprobs.softmax.fused_linear import HeadTiles
from rl_logprobs.softmax.tile_pair import TilePair
from rl_logprobs.softmax.triton_backend import (
    blocks,
    gradient_options,
    kernel_output,
    launch,
    reduce_options,
    rows_of,
    temperatures_of,
)
from rl_logprobs.softmax.triton_linear import head_map
from rl_logprobs.softmax.vocab_parallel import Gradients

KERNELS = "softmax.triton_divergence_kernels"
#: Columns of a lane, of two rows: four of each keep every variant in the registers.
UNITS = 4


def add_sums(pair: TilePair, state: torch.Tensor, numbers: torch.Tensor | None = None, share: float = 1.0) -> None:
    """Add this rank's columns to ``state``: sums, or with the ``numbers`` of a mixture its divergences in bits."""
    for first_token, cols, p, q in _tiles(pair):
        width = p.shape[-1]
        arguments = {**_arguments(pair, cols, share), **reduce_options(pair.dtype, width, units=UNITS)}
        arguments |= {"numbers": numbers, "state": state, "width": width, "MIXTURE": numbers is not None}
        for rows in rows_of(p, q, first_token=first_token):
            row_arguments = arguments | rows.arguments(p_logits="p_", q_logits="q_")
            launch(KERNELS, "sums_kernel", (rows.number,), state.device, **row_arguments)


def gradients(pair: TilePair, needed: Sequence[bool], kind: int, numbers: torch.Tensor, share: float) -> Gradients:
    """Return the gradients of the tensors of ``p``."""

    def write(p: torch.Tensor, q: torch.Tensor, first_token: int, cols: slice, out: torch.Tensor) -> None:
        columns, options = out.shape[-1], gradient_options(pair.dtype, out.shape[-1])
        arguments = {**_arguments(pair, cols, share), "numbers": numbers, "KIND": kind, **options}
        arguments |= {"width": p.shape[-1], "out_width": columns}
        for rows in rows_of(p, q, out, first_token=first_token) if out.numel() else ():
            row_arguments = arguments | rows.arguments(p_logits="p_", q_logits="q_", out="out_")
            grid = rows.number, blocks(columns, options["BLOCK"])
            launch(KERNELS, "divergence_gradient_kernel", grid, out.device, **row_arguments)

    if isinstance(pair.p, HeadTiles):

        def write_tile(products: torch.Tensor, span: slice, cols: slice, out: torch.Tensor) -> None:
            write(products, pair.q.tile(span, cols), span.start, cols, out)

        return pair.p.gradients(needed, write_tile)
    gradient = torch.zeros_like(pair.p.values, memory_format=torch.contiguous_format)
    out = kernel_output(gradient)
    whole = not isinstance(pair.q, HeadTiles)
    flat = out if whole else out.view(-1, out.shape[-1])
    for first_token, cols, p, q in _tiles(pair):
        write(p, q, first_token, cols, flat if whole else flat[first_token : first_token + len(p), cols])
    return (gradient if out is gradient else gradient.copy_(out),)


def _tiles(pair: TilePair) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
    """Yield the first token, the columns, and logits or products of both; logits of both sides at once."""
    width = pair.shard.width
    if isinstance(pair.p, HeadTiles) or isinstance(pair.q, HeadTiles):
        for span, cols in pair.spans():
            yield span.start, cols, pair.p.tile(span, cols), pair.q.tile(span, cols)
    elif width:
        yield 0, slice(0, width), pair.p.values[..., :width], pair.q.values[..., :width]


def _arguments(pair: TilePair, cols: slice, share: float) -> dict[str, Any]:
    """Return the kernels' arguments of both sides that all rows share."""
    arguments: dict[str, Any] = {"ignored": pair.ignored, "tokens": pair.ignored.numel()}
    shares = (share, 1 - share) if 0 < share < 1 else (1.0, 1.0)
    arguments.update(zip(("LOG2_SHARE", "LOG2_OTHER_SHARE"), map(math.log2, shares), strict=True))
    for name, tiles, scale in (("p", pair.p, pair.p_scale), ("q", pair.q, pair.q_scale)):
        head = head_map(tiles, cols) if isinstance(tiles, HeadTiles) else {}
        for key, value in (head | temperatures_of(scale.temperature, pair.ignored.device)).items():
            arguments[f"{name.upper() if key.isupper() else name}_{key}"] = value
    return arguments
