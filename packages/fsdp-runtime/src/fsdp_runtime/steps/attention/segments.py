"""The boundaries of documents for kernels: a query segment attends to the key segment of the same number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_runtime.steps.documents.documents import Documents


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of a batch's queries and keys, each batch flattened to ``[batch * tokens, heads, dim]``."""

    queries: Tensor  # ``[documents + 1]`` int32, the queries before each segment
    keys: Tensor  # likewise, of keys
    most_queries: int  # per segment
    most_keys: int


def segments_of(documents: Documents, start: int, stop: int, *, causal: bool) -> Segments:
    """Return the segments of the queries from ``start`` to ``stop`` of every row, aligned at their last tokens."""
    # The keys are ``[0, stop)`` under a causal mask, else the full row. A document before the queries has no queries,
    # so that its keys belong to no query. Everything is computed on the device.
    rows, length = documents.begins.shape
    keys, queries = stop if causal else length, stop - start
    row, place = documents.starts // length, documents.starts % length
    of_keys = row * keys + place.clamp(max=keys)
    of_queries = row * queries + (place - start).clamp(0, queries)
    return Segments(
        _closed(of_queries, rows * queries),
        _closed(of_keys, rows * keys),
        min(documents.longest, queries),
        min(documents.longest, keys),
    )


def _closed(before: Tensor, total: int) -> Tensor:
    """Return the tokens before each segment with their total at the end."""
    return torch.cat([before, before.new_full((1,), total)]).to(torch.int32)


def whole_rows(rows: int, length: int, device: torch.device) -> Documents:
    """Return rows of one document each."""
    begins = torch.zeros(rows, length, dtype=torch.bool, device=device)
    begins[:, 0] = True
    return Documents(begins, (rows, length))
