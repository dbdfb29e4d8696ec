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

    @property
    def bounds(self) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The tokens before each segment, and the most tokens of a segment: each of queries, then of keys."""
        return (self.queries, self.keys), (self.most_queries, self.most_keys)


def segments_of(documents: Documents, queries: tuple[int, int], keys: tuple[int, int]) -> Segments:
    """Return the segments of documents for a range of queries and a range of keys in every row."""
    # A document outside of a range has no tokens in it. A causal mask needs ranges with the same end: kernels align
    # segments at their last tokens. Everything is computed on the device.
    length = documents.begins.shape[1]
    before = []
    for first, last in (queries, keys):
        row, place = documents.starts // length, documents.starts % length
        counted = row * (last - first) + (place - first).clamp(0, last - first)
        total = counted.new_full((1,), len(documents.begins) * (last - first))
        before.append(torch.cat([counted, total]).to(torch.int32))
    longest = [min(documents.longest, last - first) for first, last in (queries, keys)]
    return Segments(before[0], before[1], longest[0], longest[1])


def queries_with_keys(documents: Documents, segments: Segments, queries: tuple[int, int]) -> Tensor:
    """Return ``[batch, 1, queries]`` bool: true for a query with keys in its segment."""
    order = documents.begins.flatten().cumsum(0).view_as(documents.begins) - 1
    return (segments.keys.diff() > 0)[order[:, queries[0] : queries[1]]].unsqueeze(1)


def rows_as_documents(rows: int, length: int, device: torch.device) -> Documents:
    """Return rows of one document each."""
    begins = torch.zeros(rows, length, dtype=torch.bool, device=device)
    begins[:, 0] = True
    return Documents(begins, (rows, length))
