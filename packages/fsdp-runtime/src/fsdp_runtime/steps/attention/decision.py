"""One decision per model: the kernel of each attention call over documents, windows and ``cp``.

``"varlen"`` is torch's FlashAttention over segments, ``"flex"`` its compiled flex attention under a block mask, and
``"batches"`` runs ``scaled_dot_product_attention`` without a mask on documents of similar length, and ``"tiles"`` masks one
tile of a ring at a time.  ``"mask"`` holds a mask of all pairs of tokens: it is the last resort, and the rule on a CPU,
where no other kernel is as exact.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Kernel = Literal["varlen", "flex", "batches", "tiles", "mask"]
#: The keys of an attention call: of full rows, of full rows for a part of the queries, or of one rank after another.
Keys = Literal["rows", "gathered", "passed"]

_HALF = (torch.float16, torch.bfloat16)
#: The widest head of FlashAttention 2; widths are multiples of 8.
_WIDEST, _ALIGNED = 256, 8

_simulated: ContextVar[str | None] = ContextVar("simulated_device_type", default=None)


@contextmanager
def kernels_of_device(device_type: str) -> Iterator[None]:
    """Choose kernels as on a device of this type, for models that are parallelized inside the ``with``."""
    token = _simulated.set(device_type)
    try:
        yield
    finally:
        _simulated.reset(token)


def is_simulated() -> bool:
    """Return True inside of :func:`kernels_of_device`: no kernel can be tried."""
    return _simulated.get() is not None


def device_type_of(mesh_device: str) -> str:
    """Return the device type whose kernels a model on a mesh uses."""
    return _simulated.get() or mesh_device


@dataclass(frozen=True)
class Needs:
    """The properties of an attention call that decide about its kernel."""

    dtype: torch.dtype
    widths: tuple[int, int]  # of queries and of values, per head
    described: bool = True  # documents, windows and chunks describe the mask
    keys: Keys = "rows"
    windowed: bool = False
    changed_scores: bool = False  # sinks or a soft cap
    biased: bool = False  # a bias per pair of tokens
    dropout: bool = False

    def in_half_precision(self) -> Needs:
        """Return the same call in half precision."""
        return self if self.dtype in _HALF else replace(self, dtype=torch.bfloat16)


@dataclass(eq=False)
class AttentionKernels:
    """The kernels of one model, the same on all ranks of its mesh."""

    accelerated: bool = False  # the mesh is on no CPU
    usable: frozenset[Kernel] = frozenset()  # kernels that passed their trial on every rank
    named: Kernel | None = None  # the kernel of the user's attn_implementation
    replaces: bool = True  # False leaves every call to the user's own implementation
    by_path: dict[str, str] = field(default_factory=dict)  # of each attention module, for reports
    _logged: bool = False

    def of(self, needs: Needs) -> Kernel:
        """Return the kernel of a call."""
        plain = self.named != "flex" and needs.described and not needs.changed_scores
        by_segments = plain and "varlen" in self.usable and fits_varlen(needs)
        if needs.keys == "passed":
            return "varlen" if by_segments and not needs.windowed else "tiles"
        if not self.accelerated or not self.replaces or needs.biased:
            return "mask"
        if by_segments:
            return "varlen"
        if plain and needs.keys == "rows":
            return "batches"
        return "flex" if "flex" in self.usable and fits_flex(needs) else "mask"

    def report_mask(self, mask: Tensor) -> None:
        """Log the bytes of a mask, once per model; not on a CPU."""
        if self._logged or not self.accelerated:
            return
        self._logged = True
        logger.warning(
            "attention holds a mask %s of %s bytes: no kernel in %s computes it without one (describe_parallelism "
            "lists the modules); set attention_dropout to 0 and compute in half precision, or shorten the rows",
            list(mask.shape), f"{mask.nbytes:,}", sorted(self.usable) or "use",
        )  # fmt: skip


def fits_varlen(needs: Needs) -> bool:
    """Return True if FlashAttention takes the dtype and the widths; narrower values are padded."""
    width, of_values = needs.widths
    known = of_values <= width <= _WIDEST and width % _ALIGNED == 0
    return known and needs.dtype in _HALF and not needs.dropout


def fits_flex(needs: Needs) -> bool:
    """Return True if compiled flex attention takes the dtype."""
    return needs.dtype in (*_HALF, torch.float32) and not needs.dropout
