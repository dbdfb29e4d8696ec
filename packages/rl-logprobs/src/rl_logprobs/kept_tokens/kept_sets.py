"""The vocabulary ids that a sampler kept for each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from rl_logprobs.errors import DtypeError, KeptTokensError, OptionError, ShapeError
from rl_logprobs.targets import require_ascending
from rl_logprobs.tensors import fails, is_integral, require_same_device

#: The treatment of a target outside its kept set.
Missing = Literal["error", "-inf"]


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The kept set of each token: the ids among which the sampler chose, as rows of a sparse matrix (CSR).

    With truncated sampling (top-k, top-p, min-p), a generator's log-probabilities are normalised over the ids that were
    kept.  Scored over the same ids, equal policies have equal log-probabilities ("Keep Sampling Mask", DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1).

    Rows follow the targets: row ``i`` belongs to the ``i``-th of the flattened targets.  Where targets are shifted
    (``shift=True``), rows are too: the row of a token is the set that the token was drawn from.

    Raises:
        DtypeError: ids or offsets are not integers.
        ShapeError: the offsets do not ascend from 0 to the number of ids.
        KeptTokensError: a row contains an id twice, or a negative id.  On an accelerator the values are checked there.
        OptionError: ``missing_target`` is unknown.

    Example:
        >>> import torch
        >>> from rl_logprobs import KeptTokens, token_logprobs
        >>> kept_tokens = KeptTokens(ids=torch.tensor([0, 1, 2]), offsets=torch.tensor([0, 2, 3]))
        >>> logits = torch.tensor([[0.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
        >>> token_logprobs(logits, torch.tensor([1, 2]), kept_tokens=kept_tokens)
        tensor([-0.6931,  0.0000])
    """

    ids: torch.Tensor  # ``[entries]`` int64 vocabulary ids, in any order within a row
    # ``[tokens + 1]`` int64, the start of each row in ``ids``, and the number of entries at the end.  A row may be
    # empty where the target is not scored (prompt, padding)
    offsets: torch.Tensor
    # the treatment of a target outside its row: ``"error"``, or ``"-inf"`` for a log-probability of ``-inf`` without a
    # gradient
    missing_target: Missing = "error"

    def __post_init__(self) -> None:
        for name, tensor in (("ids", self.ids), ("offsets", self.offsets)):
            if tensor.dtype not in (torch.int64, torch.int32):
                raise DtypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
            object.__setattr__(self, name, tensor.long())
        if self.missing_target not in get_args(Missing):
            raise OptionError(f"missing_target must be 'error' or '-inf', got {self.missing_target!r}")
        if self.ids.dim() != 1 or self.offsets.dim() != 1 or self.offsets.shape[0] < 1:
            raise ShapeError(
                f"ids must be [entries] and offsets [tokens + 1], got {tuple(self.ids.shape)} and "
                f"{tuple(self.offsets.shape)}"
            )
        if self.ids.device != self.offsets.device:
            raise OptionError(f"ids are on {self.ids.device} and offsets on {self.offsets.device}; move one")
        require_ascending(self.offsets, "offsets", self.ids.shape[0], "ids")
        self._check_ids()

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return self.offsets.shape[0] - 1

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], *, missing_target: Missing = "error") -> KeptTokens:
        """Return the kept tokens of one list of ids per token.

        Raises:
            DtypeError: the rows are not lists of integers.

        Example:
            >>> from rl_logprobs import KeptTokens
            >>> KeptTokens.from_rows([[4, 7], [], [1]]).offsets
            tensor([0, 2, 2, 3])
        """
        ids, counts = _rows(rows, "rows")
        return cls(_integers(ids, "rows"), torch.tensor([0, *counts]).cumsum(0), missing_target)

    @classmethod
    def from_padded(
        cls, ids: torch.Tensor, sizes: torch.Tensor | None = None, *, missing_target: Missing = "error"
    ) -> KeptTokens:
        """Return the kept tokens of padded rows, such as a top-k's ids.

        Args:
            ids: integers ``[..., k]``; negative ids are padding.
            sizes: ``[...]``, the number of ids at the front of each row; the rest is padding whatever its value.
            missing_target: see ``KeptTokens``.

        Raises:
            DtypeError: ids or sizes are not integers.
            ShapeError: there is not one size per row.
            OptionError: the devices differ, or ids are on the meta device.

        Example:
            >>> import torch
            >>> from rl_logprobs import KeptTokens
            >>> KeptTokens.from_padded(torch.tensor([[3, 1, -1], [2, -1, -1]])).ids
            tensor([3, 1, 2])
        """
        if ids.dim() < 1 or (sizes is not None and sizes.shape != ids.shape[:-1]):
            raise ShapeError(
                f"ids must be [..., k] and sizes [...], got {tuple(ids.shape)} and "
                f"{None if sizes is None else tuple(sizes.shape)}"
            )
        for name, tensor in (("ids", ids), ("sizes", sizes)):
            if tensor is not None and not is_integral(tensor.dtype):
                raise DtypeError(f"{name} must be integers, got {tensor.dtype}")
        require_same_device(ids=ids, sizes=sizes)
        if ids.device.type == "meta":
            raise OptionError("ids are on the meta device, without values: the number of kept ids depends on them")
        is_kept = ids >= 0
        if sizes is not None:
            is_kept = torch.arange(ids.shape[-1], device=ids.device) < sizes.unsqueeze(-1)
        counts = is_kept.sum(-1).reshape(-1)
        return cls(ids[is_kept], torch.cat([counts.new_zeros(1), counts.cumsum(0)]), missing_target)

    @classmethod
    def from_completions(
        cls,
        masks: Sequence[Any],
        starts: Sequence[int],
        length: int,
        *,
        missing_target: Missing = "error",
    ) -> KeptTokens:
        """Return the kept tokens of a padded batch of prompts and completions, for token ids ``[batch, length]``.

        Args:
            masks: per sequence the generator's output for its completion: vLLM's ``CompletionOutput.sampling_mask``
                (``token_ids`` of all tokens, and the ``offsets`` of each token's ids, with ``return_sampling_mask`` of
                vLLM 0.28 and later, vllm-project/vllm#49577), or one list of ids per generated token (SGLang).
            starts: the position of each sequence's first generated token in its row.
            length: tokens of a row, padding included.
            missing_target: see ``KeptTokens``.

        Returns:
            One row for each token id, for calls with ``shift=True``; prompt and padding have empty rows.  With
            targets that are shifted already, use ``next_token()``.

        Raises:
            ShapeError: a completion does not fit into its row, or the numbers of masks and starts differ.
            DtypeError: a mask is neither of the two, or a value that should be an integer is not.

        Example:
            >>> from rl_logprobs import KeptTokens
            >>> KeptTokens.from_completions([[[4, 7], [1]]], starts=[2], length=5).offsets
            tensor([0, 0, 0, 2, 3, 3])
        """
        masks = _listed(masks, "masks")
        starts = _integers(_listed(starts, "starts"), "starts").tolist()
        (length,) = _integers([length], "length").tolist()
        if len(masks) != len(starts):
            raise ShapeError(f"{len(masks)} masks and {len(starts)} starts; give one start per mask")
        ids: list[int] = []
        counts: list[int] = [0]
        for index, (mask, start) in enumerate(zip(masks, starts, strict=True)):
            token_ids, row_counts = _flattened(mask, f"masks[{index}]")
            if start < 0 or start + len(row_counts) > length:
                raise ShapeError(
                    f"completion {index} has {len(row_counts)} tokens from position {start}, and a row has {length}"
                )
            ids.extend(token_ids)
            counts.extend([0] * start + row_counts + [0] * (length - start - len(row_counts)))
        return cls(_integers(ids, "masks"), torch.tensor(counts).cumsum(0), missing_target)

    def to(self, device: torch.device | str) -> KeptTokens:
        """Return the kept tokens with their tensors on a device.

        Raises:
            OptionError: the string names no device.
        """
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise OptionError(f"device {device!r} is unknown: {error}") from error
        return self._with(self.ids.to(device), self.offsets.to(device))

    def select(self, rows: torch.Tensor) -> KeptTokens:
        """Return the rows of some tokens; the host waits for an accelerator, because the size is a device value.

        Args:
            rows: integers of any shape, the positions of the tokens among the flattened ones.  For context parallelism:
                ``sequence_shard(torch.arange(batch * seq).view(batch, seq), permutation, group)``.

        Raises:
            DtypeError: the rows are not integers.
            OptionError: the rows are on another device.
            ShapeError: there is no such row.  On an accelerator the check runs there.

        Example:
            >>> import torch
            >>> from rl_logprobs import KeptTokens
            >>> KeptTokens.from_rows([[4, 7], [5], [1]]).select(torch.tensor([2, 0])).ids
            tensor([1, 4, 7])
        """
        if not is_integral(rows.dtype):
            raise DtypeError(f"rows must be integers, got {rows.dtype}")
        require_same_device(kept_tokens=self.ids, rows=rows)
        rows = rows.reshape(-1)
        inside = ((rows >= 0) & (rows < self.num_tokens)).all()
        if fails(inside, f"a row is outside [0, {self.num_tokens})"):
            raise ShapeError(f"rows must be in [0, {self.num_tokens}), got {rows.min().item()} to {rows.max().item()}")
        rows = rows.long()
        starts, counts = self.offsets[rows], self.offsets.diff()[rows]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        within = torch.arange(int(offsets[-1]), device=rows.device) - offsets[:-1].repeat_interleave(counts)
        return self._with(self.ids[starts.repeat_interleave(counts) + within], offsets)

    def next_token(self) -> KeptTokens:
        """Return rows for targets that ``next_token_targets`` has shifted: row ``i`` belongs to token ``i + 1``.

        The last row gets the first row's ids.  The last position of a sequence has no target, so that no row of another
        sequence counts.

        Example:
            >>> from rl_logprobs import KeptTokens
            >>> KeptTokens.from_rows([[], [5, 6], [1]]).next_token().offsets
            tensor([0, 2, 3, 3])
        """
        entries, first = self.ids.shape[0], self.offsets[1 : 2 if self.num_tokens else 1].sum()
        order = (torch.arange(entries, device=self.ids.device) + first) % max(1, entries)
        offsets = torch.cat([self.offsets[1:] - first, self.offsets[-1:]])
        return self._with(self.ids[order], offsets)

    def rows(self) -> torch.Tensor:
        """Return the row of each entry, ``[entries]`` int64."""
        tokens = torch.arange(self.num_tokens, device=self.ids.device)
        return tokens.repeat_interleave(self.offsets.diff(), output_size=self.ids.shape[0])

    def _with(self, ids: torch.Tensor, offsets: torch.Tensor) -> KeptTokens:
        """Return kept tokens with tensors made from this value's checked tensors."""
        other = copy(self)
        object.__setattr__(other, "ids", ids)
        object.__setattr__(other, "offsets", offsets)
        return other

    def _check_ids(self) -> None:
        if self.ids.shape[0] == 0:
            return
        ids, order = self.ids.sort(stable=True)
        rows, by_row = self.rows()[order].sort(stable=True)
        ids = ids[by_row]
        twice = (ids[1:] == ids[:-1]) & (rows[1:] == rows[:-1])
        valid = ~twice.any() & (ids >= 0).all()
        if fails(valid, "a kept set contains an id twice, or a negative id"):
            wrong = int(torch.cat([twice.new_zeros(1), twice]).logical_or(ids < 0).int().argmax())
            raise KeptTokensError(
                f"the kept set of token {rows[wrong].item()} contains id {ids[wrong].item()}"
                + (", which is no vocabulary id" if ids[wrong] < 0 else " twice; give each id once")
            )


def _flattened(mask: Any, name: str) -> tuple[list[int], list[int]]:
    """Return all ids of a completion, and the number of ids of each token."""
    if isinstance(mask, Sequence):
        return _rows(mask, name)
    if not (hasattr(mask, "token_ids") and hasattr(mask, "offsets")):
        raise DtypeError(
            f"{name} is of type {type(mask).__qualname__}: give one list of ids per token, or a sampling mask with "
            "token_ids and offsets"
        )
    token_ids = _listed(mask.token_ids, f"{name}.token_ids")
    offsets = _integers(_listed(mask.offsets, f"{name}.offsets"), f"{name}.offsets").tolist()
    counts = [end - start for start, end in pairwise(offsets)]
    if not offsets or offsets[0] != 0 or offsets[-1] != len(token_ids) or min(counts, default=0) < 0:
        raise ShapeError(f"{name}.offsets must ascend from 0 to its {len(token_ids)} token_ids")
    return token_ids, counts


def _rows(rows: Iterable[Sequence[int]], name: str) -> tuple[list[int], list[int]]:
    """Return the ids of all rows, and the number of ids per row; only the number of ids costs time."""
    listed = [_listed(row, name) for row in _listed(rows, name)]
    return [kept for row in listed for kept in row], [len(row) for row in listed]


def _listed(values: Any, name: str) -> list[Any]:
    try:
        return list(values)
    except (TypeError, RuntimeError) as error:  # torch's own for tensors without dims or values
        raise DtypeError(f"{name} contains a value of type {type(values).__qualname__}, which is no list") from error


def _integers(values: list[Any], name: str) -> torch.Tensor:
    """Return integers as a tensor; torch finds their type faster than a loop over them."""
    try:
        integers = torch.tensor(values) if values else torch.tensor(values, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DtypeError(f"{name} must contain integers alone: {error}") from error
    if not is_integral(integers.dtype) or integers.dim() != 1:
        raise DtypeError(f"{name} must contain integers alone, got {integers.dtype} of shape {tuple(integers.shape)}")
    return integers
