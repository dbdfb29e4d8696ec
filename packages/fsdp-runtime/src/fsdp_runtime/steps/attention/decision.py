"""One decision per model: the kernel of each attention call over documents, windows and ``cp``.

``"varlen"`` is torch's FlashAttention over segments, ``"flex"`` its compiled flex attention under a block mask, and
``"batches"`` runs ``scaled_dot_product_attention`` on documents of similar length.  ``"tiles"`` masks a ring's
tiles one by one.  ``"mask"`` holds a mask of all pairs of tokens: the last resort, and the exact rule on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fsdp_runtime._transformers_compat.masks import MaskPattern

logger = logging.getLogger(__name__)

#: The keys of an attention call: of full rows, of full rows for a part of the queries, or of one rank after another.
Keys = Literal["rows", "gathered", "passed"]
HALF = (torch.float16, torch.bfloat16)
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


def is_accelerated(device_type: str) -> bool:
    """Return True for a mesh with kernels beyond a CPU's."""
    return (_simulated.get() or device_type) != "cpu"


@dataclass(frozen=True)
class Needs:
    """The properties of an attention call that decide about its kernel."""

    dtype: torch.dtype
    widths: tuple[int, int]  # of queries and of values, per head; kernels pad narrower values
    keys: Keys
    pattern: MaskPattern | None
    changes_scores: bool = False  # by sinks or a soft cap
    biased: bool = False  # per pair of tokens
    dropout: bool = False


@dataclass(eq=False)
class AttentionKernels:
    """The kernels of one model, the same on all ranks of its mesh."""

    accelerated: bool = False  # masks are the last resort
    usable: frozenset[str] = frozenset()  # kernels that passed their trial on every rank
    by_path: dict[str, str] = field(default_factory=dict)  # of each attention module, for reports
    _logged: bool = False

    def of(self, needs: Needs) -> str:
        """Return the kernel of a call."""
        width, of_values = needs.widths
        plain = needs.pattern is not None and not (needs.changes_scores or needs.biased)
        fits = of_values <= width <= _WIDEST and width % _ALIGNED == 0 and needs.dtype in HALF and not needs.dropout
        in_reach = needs.keys != "passed" or needs.pattern is None or needs.pattern.window is None
        if plain and fits and in_reach and "varlen" in self.usable:
            return "varlen"
        if needs.keys == "passed":
            return "tiles"
        if plain and self.accelerated and needs.keys == "rows" and needs.pattern == MaskPattern():
            return "batches"
        takes_flex = needs.dtype in (*HALF, torch.float32) and not (needs.dropout or needs.biased)
        return "flex" if takes_flex and "flex" in self.usable else "mask"

    def report_mask(self, mask: Tensor) -> None:
        """Log the bytes of a mask on an accelerator, once per model."""
        if self.accelerated and not self._logged:
            logger.warning(
                "attention holds a mask %s of %s bytes, because none of the kernels %s computes it "
                "(describe_parallelism lists the modules): compute in half precision without attention_dropout",
                list(mask.shape), f"{mask.nbytes:,}", sorted(self.usable),
            )  # fmt: skip
        self._logged = True
