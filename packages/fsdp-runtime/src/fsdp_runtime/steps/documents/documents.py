"""The documents of packed rows: found once per forward, and moved between rows and batches of a document per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.errors import LayoutError

#: Documents of up to this many tokens share a batch.
_SHORT = 8


@dataclass(eq=False)
class Documents:
    """The documents of one batch of rows; ``begins`` is ``[batch, seq]`` bool, true at first tokens."""

    begins: Tensor
    bounds: tuple[int, int] | None = None  # the most documents, and the most tokens of a document, where known
    _masks: dict[int | str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> Tensor:
        """``[batch, seq]`` int64: the number of each token's document in its row."""
        return self._once("numbers", lambda: self.begins.cumsum(-1))  # type: ignore[no-any-return]

    def _once(self, key: int | str, compute: Callable[[], Any]) -> Any:
        """Return a result that eager code computes once per forward, and compiled code in each graph."""
        # The compiler traces neither the lock of ``cached_property`` (Python 3.11) nor the ``id`` of a tensor.
        if torch.compiler.is_compiling():
            return compute()
        if key not in self._masks:
            self._masks[key] = compute()
        return self._masks[key]

    @cached_property
    def positions(self) -> Tensor:
        """``[batch, seq]`` int64: each token's position in its document."""
        index = torch.arange(self.begins.shape[1], device=self.begins.device).expand_as(self.begins)
        return index - torch.where(self.begins, index, 0).cummax(-1).values

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every document, row by row; waits for the device, once per forward."""
        starts = self.begins.flatten().cpu().nonzero().flatten().tolist()
        return [end - start for start, end in zip(starts, [*starts[1:], self.begins.numel()], strict=True)]

    @cached_property
    def cumulative_lengths(self) -> Tensor:
        """``[documents + 1]`` int32, the tokens before each document, counted over all rows, for kernels."""
        starts = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return starts.to(self.begins.device, non_blocking=True)

    @cached_property
    def starts(self) -> Tensor:
        """``[documents]`` int64: the first token of every document, counted over all rows, for kernels."""
        # Further entries are documents without tokens.
        first = self.begins.flatten().to(torch.int8).argsort(descending=True, stable=True)[: self.most]
        places = torch.arange(len(first), device=first.device)
        return torch.where(places < self.begins.sum(), first, self.begins.numel())

    @property
    def most(self) -> int:
        """The number of documents, or more if the bounds are given; else waits for the device, once per forward."""
        return len(self.lengths) if self.bounds is None else self.bounds[0]

    @property
    def longest(self) -> int:
        """The tokens of the longest document, or more if the bounds are given."""
        return max(self.lengths) if self.bounds is None else self.bounds[1]

    @classmethod
    def of_rows(cls, rows: int, length: int, device: torch.device) -> Documents:
        """Return rows of one document each."""
        return cls((torch.arange(length, device=device) == 0).expand(rows, -1), (rows, length))

    def segments(self, queries: tuple[int, int], keys: tuple[int, int]) -> Segments:
        """Return the segments of the documents for a range of queries and a range of keys in every row."""
        # A document outside of a range has no tokens in it. A causal mask needs ranges with the same end: kernels align
        # segments at their last tokens. Everything is computed on the device.
        rows, length = self.begins.shape
        row, place = self.starts // length, self.starts % length
        before = []
        for first, last in (queries, keys):
            counted = row * (last - first) + (place - first).clamp(0, last - first)
            before.append(torch.cat([counted, counted.new_full((1,), rows * (last - first))]).to(torch.int32))
        longest = [min(self.longest, last - first) for first, last in (queries, keys)]
        order = self.begins.flatten().cumsum(0).view(rows, length)[:, slice(*queries)] - 1
        sees = (before[1].diff() > 0)[order].unsqueeze(1)
        return Segments(((before[0], before[1]), (longest[0], longest[1])), keys[1] - keys[0], sees)

    def in_parts(self, tokens: int) -> Documents:
        """Return the parts of up to ``tokens`` tokens of each document, as documents."""
        bounds = self.most + self.begins.numel() // tokens, min(tokens, self.longest)
        return Documents(self.begins | (self.positions % tokens == 0), bounds)

    @cached_property
    def packed(self) -> bool:
        """True if some row has several documents; waits for the device, once per forward."""
        return len(self.lengths) > self.begins.shape[0]

    @cached_property
    def batches(self) -> list[DocumentBatch]:
        """The documents by length: less than half of a batch is padding, except for documents below 8 tokens."""
        members: dict[int, list[int]] = {}
        for document, length in enumerate(self.lengths):
            members.setdefault((max(length, _SHORT) - 1).bit_length(), []).append(document)
        return self._batches(members.values())

    @cached_property
    def singles(self) -> list[DocumentBatch]:
        """The documents one by one, without padding."""
        return self._batches([document] for document in range(len(self.lengths)))

    def _batches(self, members: Iterable[list[int]]) -> list[DocumentBatch]:
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths
        device, row = self.begins.device, self.begins.shape[1]
        return [DocumentBatch.of(starts[batch], lengths[batch], row, device) for batch in members]

    def together(self, outputs: Sequence[Tensor], batches: Sequence[DocumentBatch]) -> Tensor:
        """Put the outputs ``[documents, length, ...]`` of batches back into rows ``[batch, seq, ...]``."""
        tokens = torch.cat([output.flatten(0, 1) for output in outputs])
        order = self.begins.new_empty(self.begins.numel(), dtype=torch.int64)
        offset = 0
        for batch in batches:
            order[batch.tokens.flatten()[batch.real]] = batch.real + offset
            offset += batch.tokens.numel()
        return tokens.index_select(0, order).view(*self.begins.shape, *tokens.shape[1:])

    def restrict(self, mask: Tensor, *, true_allows: bool = True) -> Tensor:
        """Return an attention mask under which no token attends to another document; computed once per mask."""
        # It is ``[batch or 1, heads or 1, seq or 1, seq]``, bool or added to the scores. The mask is kept with the
        # result, so that its id is not used again.
        key = 0 if torch.compiler.is_compiling() else id(mask)
        return self._once(key, lambda: (mask, _hide(mask, ~self.same, true_allows)))[1]  # type: ignore[no-any-return]

    @property
    def causal(self) -> Tensor:
        """``[batch, 1, seq, seq]`` bool: true where a query may attend to a key of its document."""
        return self._once("causal", lambda: self.same & torch.ones_like(self.same[:1]).tril())  # type: ignore[no-any-return]

    @property
    def same(self) -> Tensor:
        """``[batch, 1, seq, seq]`` bool: true where query and key are of one document."""
        numbers = self.numbers
        return self._once("same", lambda: (numbers[:, :, None] == numbers[:, None, :]).unsqueeze(1))  # type: ignore[no-any-return]

    def forget_masks(self) -> None:
        """Free the masks of this forward."""
        self._masks.clear()


@dataclass(frozen=True, eq=False)
class Segments:
    """Queries and keys of documents for kernels, each flattened to ``[batch * tokens, heads, dim]``."""

    # A query segment attends to the key segment of the same number.
    bounds: tuple[tuple[Tensor, Tensor], tuple[int, int]]  # int32 tokens before each segment, and the longest segment
    keys_at_hand: int  # per row
    sees: Tensor  # ``[batch, 1, queries]``, true for queries with keys


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    """Documents that run as one batch, padded at their ends with copies of their last tokens."""

    tokens: Tensor  # ``[documents, length]`` int64, counted over all rows
    real: Tensor  # the places without padding, counted over the batch
    row: int  # tokens of a row

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, row: int, device: torch.device) -> DocumentBatch:
        """Build a batch on the host, and move it to a device."""
        places = torch.arange(int(lengths.max()))
        tokens = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
        real = (places < lengths[:, None]).flatten().nonzero().flatten()
        return cls(tokens.to(device, non_blocking=True), real.to(device, non_blocking=True), row)

    def take(self, rows: Tensor) -> Tensor:
        """Return the documents of ``[batch, seq, ...]`` as ``[documents, length, ...]``."""
        return rows.flatten(0, 1).index_select(0, self.tokens.flatten()).view(*self.tokens.shape, *rows.shape[2:])

    def take_mask(self, mask: Tensor, *, true_allows: bool = True) -> Tensor:
        """Return the causal part within each document of a mask ``[batch, heads, seq, seq]``."""
        row, token = self.tokens // self.row, self.tokens % self.row
        within = mask.movedim(1, -1)[row[:, :1, None], token[:, :, None], token[:, None, :]].movedim(-1, 1)
        places = torch.arange(self.tokens.shape[1], device=mask.device)
        return _hide(within, places[None, :] > places[:, None], true_allows)


def _hide(mask: Tensor, hidden: Tensor, true_allows: bool) -> Tensor:
    """Return a mask under which no query attends to ``hidden`` keys."""
    if mask.dtype == torch.bool:
        return mask & ~hidden if true_allows else mask | hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def find_documents(
    position_ids: Tensor | None, seq_idx: Tensor | None, cu_seq_lens: Tensor | None, shape: tuple[int, int]
) -> Documents | None:
    """Find the documents of a batch from the inputs of a model, without waiting for the device."""
    # A document begins where a position ``[batch, seq]`` is not its predecessor's plus one, as in transformers. In
    # ``[axes, batch, seq]``, for multimodal rotary embeddings, the first axis counts tokens of text. ``seq_idx``
    # ``[batch, seq]`` numbers documents. ``cu_seq_lens`` counts the tokens before each document over all rows.
    if cu_seq_lens is not None:
        if cu_seq_lens.dim() != 1:
            raise LayoutError(f"cu_seq_lens_q {list(cu_seq_lens.shape)}: give [documents + 1] tokens before each")
        tokens = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.bool, device=cu_seq_lens.device)
        begins = tokens.index_fill(0, cu_seq_lens.long(), True)[:-1].view(shape).clone()
        begins[:, 0] = True
        return Documents(begins, (len(cu_seq_lens) - 1 + shape[0], shape[1]))  # a document may reach from row to row
    marks = seq_idx if seq_idx is not None else position_ids
    if marks is None:
        return None
    name, marks = ("seq_idx" if seq_idx is not None else "position_ids"), marks[0] if marks.dim() == 3 else marks
    if marks.dim() != 2 or marks.shape[0] not in (1, shape[0]) or marks.shape[1] != shape[1]:
        raise LayoutError(f"{name} {list(marks.shape)} for rows {list(shape)}: give one entry a token")
    step = marks.expand(shape).diff(dim=-1) != (1 if seq_idx is None else 0)
    return Documents(torch.cat([step.new_ones(shape[0], 1), step], dim=-1))
