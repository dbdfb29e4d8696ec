"""Outputs of full rows from a rank's tokens: router logits, kept logits, scores and the model's loss.

Every rank has the output of the full rows, with the gradient of the rank's tokens: the sum over ``cp`` counts a
gradient once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_runtime._transformers_compat.models import is_causal_lm_loss
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.steps.context.exchange import gather_tokens, sum_over_ranks
from fsdp_runtime.steps.context.sharding import SequenceLayout


@dataclass(frozen=True, eq=False)
class GlobalRows:
    """The rows of one forward."""

    batch: int
    layout: SequenceLayout
    group: ProcessGroup

    def full(self, own: Tensor) -> Tensor:
        """Return ``[batch, seq, ...]`` from this rank's tokens ``[batch, seq / cp, ...]``."""
        gathered = gather_tokens(own.detach(), self.layout, self.group, dim=1)
        return gathered.index_copy(1, self.layout.positions.to(own.device), own)

    def router_logits(self, local: Tensor) -> Tensor:
        """Return ``[batch * seq, experts]`` from ``[batch * seq / cp, experts]``; full logits unchanged."""
        share = self.layout.length // self.layout.ranks
        if local.shape[0] == self.batch * self.layout.length:  # a model inside has gathered them
            return local
        if local.dim() != 2 or local.shape[0] != self.batch * share:
            raise LayoutError(
                f"router logits {tuple(local.shape)} are not [{self.batch * share}, experts] for {self.batch} rows of "
                f"{share} tokens: pass output_router_logits=False, or use cp=1"
            )
        return self.full(torch.unflatten(local, 0, (self.batch, share))).flatten(0, 1)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return sum_over_ranks(own, self.group)


class KeptLogits:
    """``logits_to_keep`` of full rows, a number at the end or places ``[kept]``: a rank computes its tokens' logits."""

    def __init__(self, kept: int | Tensor, rows: GlobalRows) -> None:
        every = torch.arange(rows.layout.length)
        places = every[-kept:] if isinstance(kept, int) else every[kept.cpu()]
        self.rows, self.count = rows, len(places)
        here = places[:, None] == rows.layout.positions
        self.own, self.local = here.nonzero(as_tuple=True)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits ``[batch, kept, vocab]`` from the logits of this rank's tokens."""
        if isinstance(logits, DTensor):
            local = self(logits.to_local())
            shape = torch.Size((logits.shape[0], self.count, *logits.shape[2:]))
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                local, logits.device_mesh, logits.placements, shape=shape, stride=stride, run_check=False
            )
        own = self.own.to(logits.device)
        empty = logits.new_zeros(logits.shape[0], self.count, *logits.shape[2:])
        return self.rows.sum(empty.index_copy(1, own, logits))


class LossOfRows:
    """A model's loss function for a rank's tokens."""

    # The loss of a causal language model gets a rank's tokens; their ``labels`` are the next tokens in the full row.
    # Any other loss gets the full rows.

    def __init__(self, function: Callable[..., Tensor], rows: GlobalRows) -> None:
        self.function, self.rows = function, rows
        #: Read by :mod:`fsdp_runtime.steps.outputs.full_tensors`.
        self.takes_sharded_logits = bool(getattr(function, "takes_sharded_logits", False))

    def __call__(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the full rows."""
        share = self.rows.layout.length // self.rows.layout.ranks
        if tuple(logits.shape[:2]) != (self.rows.batch, share):
            raise LayoutError(
                f"logits {tuple(logits.shape)} of a loss are not [{self.rows.batch}, {share}, ...], one for each "
                "token: leave labels out, and compute the loss from the logits"
            )
        if not (self.takes_sharded_logits or is_causal_lm_loss(self.function)):
            return self.function(self.rows.full(logits), self.rows.full(labels), *args, **kwargs)
        ignored = kwargs.setdefault("ignore_index", -100)
        if kwargs.get("shift_labels") is None:
            shifted = nn.functional.pad(self.rows.full(labels)[:, 1:], (0, 1), value=ignored)
            kwargs["shift_labels"] = self.rows.layout.shard(shifted)
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = self.rows.sum((kwargs["shift_labels"] != ignored).sum())
        return self.rows.sum(self.function(logits, labels, *args, **kwargs))
