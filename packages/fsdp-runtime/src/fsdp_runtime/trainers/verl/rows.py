"""verl's nested micro-batches as a model's inputs, and values and routes of tokens back in verl's form.

``log_probs[t]`` of verl is the log-probability of token ``t + 1``.  The last value of a sample has no next token and is
0 here; verl's own engine scores the first token of the next sample there.  The only loss of verl that reads it is
an SFT sample's with ``loss_mask`` 1 at its first token.

Router replay follows verl's engines: R2 replays the actor's routes, R3 the rollout's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import record_routes, replay_routes, sequence_layout
from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.trainers.verl.config import FsdpRuntimeEngineConfig
from fsdp_runtime.trainers.verl.verl_api import extract_multi_modal_inputs, get_device_id, tensordict_utils

_IGNORED = -100
Way = Literal["none", "record", "replay"]


@dataclass(frozen=True)
class Rows:
    """One micro-batch as rows, packed or padded."""

    inputs: Mapping[str, Any]  # the model's inputs, ``[rows, length]``; under ``cp`` this rank's
    targets: Tensor  # ``[rows, length]`` int64, the next token or -100; under ``cp`` this rank's
    temperature: Tensor  # ``[rows, length]`` float32, as the targets
    tokens: Tensor  # ``[rows, length]`` bool, the tokens of samples in full rows
    offsets: Tensor  # ``[samples + 1]`` offsets of verl's nested tensors
    mesh: DeviceMesh
    layout: Any = None  # how ``cp`` cuts rows, ``None`` without it

    def nested(self, values: Tensor) -> Tensor:
        """Return values of this rank's tokens ``[rows, length, ...]`` nested by sample; under cp collective."""
        if self.layout is not None:
            values = rl_logprobs().gather_sequence(values, self.layout.permutation, self.mesh.get_group("cp"), dim=1)
        return torch.nested.nested_tensor_from_jagged(values[self.tokens], self.offsets)

    def flat(self, nested: Tensor, fill: float) -> Tensor:
        """Return a nested tensor of samples ``[samples, length, ...]`` as full rows ``[rows, length, ...]``."""
        values = nested.values()
        rows = values.new_full((*self.tokens.shape, *values.shape[1:]), fill)
        rows[self.tokens] = values
        return rows

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's tokens of full rows."""
        return full if self.layout is None else self.layout.shard(full)


def rows_of(micro_batch: Any, mesh: DeviceMesh, config: FsdpRuntimeEngineConfig, *, packs: bool) -> Rows:
    """Return a micro-batch on this rank's device as rows; ``packs``: the model separates packed documents."""
    ids, positions = micro_batch["input_ids"], micro_batch["position_ids"]
    temperature = tensordict_utils.get_non_tensor_data(micro_batch, "temperature", 1.0)  # a batch of SFT has none
    if not isinstance(temperature, Tensor):
        temperature = torch.full((len(ids),), float(temperature))
    temperature = temperature.to(ids.device, torch.float32)
    packed = tensordict_utils.get_non_tensor_data(micro_batch, "use_remove_padding", True)
    if packed and not packs:
        raise OptionError("the batch has use_remove_padding=True, but the model's is False: set both to one value")
    pad = tensordict_utils.get_non_tensor_data(micro_batch, "pad_token_id", 0) or 0
    media = extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", []))
    if packed:
        inputs, targets, heat, tokens = _packed(ids, positions, temperature, pad, config)
    else:
        inputs, targets, heat, tokens = _padded(ids, positions, temperature, pad, config, packs=packs)
    return _of_rank(Rows(inputs, targets, heat, tokens, ids.offsets(), mesh), config, media)


def idle_rows(mesh: DeviceMesh, config: FsdpRuntimeEngineConfig) -> Rows:
    """Return a row of padding that no loss reads, for a rank with fewer micro-batches than its peers."""
    device = get_device_id()
    length = 2 * config.axes.cp
    ids = torch.zeros((1, length), dtype=torch.int64, device=device)
    inputs = {"input_ids": ids, "position_ids": torch.arange(length, device=device)[None]}
    targets = torch.full_like(ids, _IGNORED)
    offsets = torch.tensor([0, length], device=device)
    heat = torch.ones_like(ids, dtype=torch.float32)
    return _of_rank(Rows(inputs, targets, heat, torch.ones_like(ids, dtype=torch.bool), offsets, mesh), config, {})


def _of_rank(full: Rows, config: FsdpRuntimeEngineConfig, media: Mapping[str, Any]) -> Rows:
    """Return this rank's tokens of full rows, with media, which ``cp`` does not cut."""
    inputs, layout = full.inputs, None
    if config.axes.cp > 1:
        layout = sequence_layout(full.mesh, full.targets.shape[1], load_balancer=config.load_balancer)  # type: ignore[arg-type]
        inputs = layout.shard_batch(inputs)
    full = replace(full, inputs={**inputs, **media}, layout=layout)
    return replace(full, targets=full.shard(full.targets), temperature=full.shard(full.temperature))


def _multiple(config: FsdpRuntimeEngineConfig) -> int:
    """The number that the length of a row must be a multiple of."""
    axes = config.axes
    # Code compiled for shards of one length fails on longer shards, which occur if ranks have different token counts.
    shards = axes.tp if config.sequence_parallel and config.compile else 1
    return shards * (2 * axes.cp if axes.cp > 1 else 1)


def _packed(ids: Any, positions: Any, temperature: Tensor, pad: int, config: FsdpRuntimeEngineConfig) -> Any:
    """One row of all samples; padding at its end is a separate document."""
    flat, offsets = ids.values(), ids.offsets()
    multiple = _multiple(config)
    if config.pad_to_length:
        multiple *= -(-config.pad_to_length_bucket // multiple)
    extra = -len(flat) % multiple
    targets = rl_logprobs().next_token_targets(flat, cu_seqlens=offsets, ignore_index=_IGNORED)
    where = positions.values()
    where = torch.cat([where, torch.arange(extra, device=flat.device).expand(*where.shape[:-1], extra)], -1)
    tokens = torch.arange(len(flat) + extra, device=flat.device) < len(flat)
    heat = torch.nn.functional.pad(temperature.repeat_interleave(offsets.diff()), (0, extra), value=1.0)
    inputs = {
        "input_ids": torch.nn.functional.pad(flat, (0, extra), value=pad)[None],
        "position_ids": where.unsqueeze(-2),
    }
    targets = torch.nn.functional.pad(targets, (0, extra), value=_IGNORED)
    return inputs, targets[None], heat[None], tokens[None]


def _padded(
    ids: Any, positions: Any, temperature: Tensor, pad: int, config: FsdpRuntimeEngineConfig, *, packs: bool
) -> Any:
    """One row per sample, padded on the right; for a packing model, padding is a separate document."""
    lengths = ids.offsets().diff()
    rows, longest = len(lengths), int(lengths.max())
    longest += -longest % _multiple(config)
    padded = torch.nested.to_padded_tensor(ids, padding=pad, output_size=(rows, longest))
    places = torch.arange(longest, device=lengths.device)
    tokens = places < lengths[:, None]
    values = positions.values()  # axes of multimodal positions come first
    where = (places - lengths[:, None]).expand(*values.shape[:-1], rows, longest).clone()
    where[..., tokens] = values
    targets = rl_logprobs().next_token_targets(padded, attention_mask=tokens.long(), ignore_index=_IGNORED)
    mask = {} if packs else {"attention_mask": tokens.long()}
    inputs = {"input_ids": padded, **mask, "position_ids": where}
    return inputs, targets, temperature[:, None].expand(rows, longest).contiguous(), tokens


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
