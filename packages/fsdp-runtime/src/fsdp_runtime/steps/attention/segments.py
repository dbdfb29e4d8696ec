"""The boundaries of documents for kernels: a query segment attends to the key segment of the same number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_runtime.steps.documents.documents import Documents


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of a batch's queries and keys, each batch flattened to ``[batch * tokens, heads, dim]``."""

    bounds: tuple[tuple[Tensor, Tensor], tuple[int, int]]  # int32 tokens before each segment, and the longest segment
    keys_at_hand: int  # per row
    sees: Tensor  # ``[batch, 1, queries]``, true for queries with keys


def segments_of(documents: Documents, queries: tuple[int, int], keys: tuple[int, int]) -> Segments:
    """Return the segments of documents for a range of queries and a range of keys in every row."""
    # A document outside of a range has no tokens in it. A causal mask needs ranges with the same end: kernels align
    # segments at their last tokens. Everything is computed on the device.
    rows, length = documents.begins.shape
    row, place = documents.starts // length, documents.starts % length
    before = []
    for first, last in (queries, keys):
        counted = row * (last - first) + (place - first).clamp(0, last - first)
        before.append(torch.cat([counted, counted.new_full((1,), rows * (last - first))]).to(torch.int32))
    longest = [min(documents.longest, last - first) for first, last in (queries, keys)]
    order = documents.begins.flatten().cumsum(0).view(rows, length)[:, slice(*queries)] - 1
    sees = (before[1].diff() > 0)[order].unsqueeze(1)
    return Segments(((before[0], before[1]), (longest[0], longest[1])), keys[1] - keys[0], sees)


def rows_as_documents(rows: int, length: int, device: torch.device) -> Documents:
    """Return rows of one document each."""
    begins = (torch.arange(length, device=device) == 0).expand(rows, -1)
    return Documents(begins, (rows, length))
