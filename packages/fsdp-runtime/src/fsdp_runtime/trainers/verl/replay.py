"""Router replay as verl's engines have it: R2 replays the actor's routes, R3 the rollout's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsdp_runtime import record_routes, replay_routes
from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl.rows import Rows

Way = Literal["none", "record", "replay"]


def way_of(mode: str, *, forward_only: bool, has_loss: bool, asked: bool | None) -> Way:
    """Return how a forward treats routes."""
    # verl's worker sets ``asked`` in the batch for its own engine names only; for other engines the call decides:
    # ``compute_log_prob`` runs forward without a loss.
    if mode == "disabled" or asked is False:
        return "none"
    if mode == "R2" and forward_only:
        return "none" if has_loss else "record"
    return "replay"


@contextmanager
def recorded_or_replayed(way: Way, model: nn.Module, rows: Rows, micro_batch: Any) -> Iterator[Any]:
    """Run a forward with routes recorded or replayed; yields recorded routes."""
    if way == "record":
        with record_routes(model) as routes:
            yield routes
        return
    given = micro_batch.get("routed_experts", None) if way == "replay" else None
    if way == "replay" and given is None:
        raise OptionError(
            "router_replay: the batch has no routed_experts: R2 needs compute_log_prob before the update, R3 a rollout "
            "with enable_rollout_routing_replay=True"
        )
    with nullcontext() if given is None else replay_routes(model, _routes(given, rows)):
        yield None


def _routes(given: Any, rows: Rows) -> Tensor:
    """Return verl's ``[samples, length, layers, k]`` as ``[layers, rows * length, k]``, -1 where no route exists."""
    full = rows.flat(given, -1).to(torch.int32)
    if full.shape[-1] > 1:  # verl fills unrun tokens with zeros: no token has one expert twice
        full = full.masked_fill((full == 0).all(-1, keepdim=True), -1)
    return full.flatten(0, 1).transpose(0, 1).contiguous()


def nested_routes(routes: Any, rows: Rows) -> Tensor:
    """Return recorded routes in verl's form, nested ``[samples, length, layers, k]`` int16."""
    stacked = routes.stacked().transpose(0, 1)
    full = stacked.view(*rows.tokens.shape, *stacked.shape[1:]).to(torch.int16)
    return torch.nested.nested_tensor_from_jagged(full[rows.tokens], rows.offsets)
