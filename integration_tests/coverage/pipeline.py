"""Pipeline stages of one architecture: losses, logits and every gradient on every rank, in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from coverage.measure import default_dtype
from coverage.multimodal import multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from coverage.packing import ROWS, documents, packed_positions
from coverage.shrink import VOCAB
from coverage.table import coverage_entries, deeper, tiny_model
from fsdp_runtime import FsdpRuntimeError, parallelize, sequence_layout, submesh
from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.steps.pipeline.schedule import forward_backward, forward_only
from fsdp_runtime.steps.pipeline.step import Pipeline
from harness.adapters import filled
from harness.float64 import compute_in_float64
from harness.options import load_balancer_of
from harness.parity import gradient_errors, largest, mesh_for
from rl_logprobs import grad_norm

PIPELINE_BOUND = 1e-12


def measure_pipeline(
    name: str,
    axes: Mapping[str, int],
    step: Pipeline,
    *,
    layers: int | None = None,
    packed: bool = False,
    adapted: str | None = None,
    media: str = "",
    **options: Any,
) -> dict[str, float]:
    """Compare one architecture in pipeline stages with the plain model, on this rank.

    Args:
        name: the row.
        axes: the mesh.
        step: the schedule.
        layers: blocks of the model, with the row's kinds of layers in turn; by default the row's own.
        packed: give rows of several documents.
        adapted: train adapters of these modules alone.
        media: give rows with ``"image"``, ``"video"`` or ``"audio"`` to a multimodal model of this type.
        options: further keywords of ``parallelize``.
    """
    with default_dtype(torch.float64), compute_in_float64():
        plain = _plain(name, layers, media, step)
        if adapted:
            torch.manual_seed(0)
            plain = filled(get_peft_model(plain, LoraConfig(r=4, target_modules=adapted)))
        mesh = mesh_for(axes)
        staged = parallelize(copy.deepcopy(plain), mesh, steps=(step,), logits="full", **options)
        data = submesh(mesh, "dp")
        batches = [_batches(step.microbatches, rank, packed, base_model(plain), media) for rank in range(data.size())]
        for mine in batches:
            for batch in mine:
                logits = _alone(plain, batch, packed)
                (logits * _weights(logits, batch)).sum().backward()
        parts = [_Part.of(plain, batch, packed, mesh, options) for batch in batches[data.get_local_rank()]]
        part_of = {id(part.inputs): part for part in parts}

        def loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
            return (_of(output) * part_of[id(batch)].weights).sum() * data.size()

        losses = forward_backward(staged, [part.inputs for part in parts], loss)
        scored = forward_only(staged, [part.inputs for part in parts], lambda output, _: _of(output))
    norm, own_norm = (grad_norm(model.parameters()) for model in (plain, staged))
    targets = torch.stack([(part.logits * part.weights).sum() for part in parts])
    errors = {
        "losses": largest(losses / data.size() - targets) / largest(targets),
        "norm": float(abs(own_norm - norm) / norm),
    }
    if scored is not None:
        errors["logits"] = max(largest(a - part.logits) for a, part in zip(scored, parts, strict=True))
    return errors | gradient_errors({name: p.grad for name, p in plain.named_parameters()}, staged)


@dataclass(frozen=True)
class _Part:
    """This rank's tokens of a micro-batch, and of its logits and their weights in the loss."""

    inputs: dict[str, Tensor]
    logits: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls, plain: nn.Module, batch: dict[str, Tensor], packed: bool, mesh: DeviceMesh, options: Mapping[str, Any]
    ) -> _Part:
        with torch.no_grad():
            logits = _alone(plain, batch, packed)
        weights = _weights(logits, batch)
        if "cp" not in (mesh.mesh_dim_names or ()) or mesh["cp"].size() == 1:
            return cls(batch, logits, weights)
        layout = sequence_layout(mesh, logits.shape[1], load_balancer=load_balancer_of(options))
        return cls(layout.shard_batch(batch), layout.shard(logits), layout.shard(weights))


def _plain(name: str, layers: int | None, media: str, step: Pipeline) -> nn.Module:
    """Return the model of one process."""
    if media:
        return multimodal_model(name, blocks=sum(step.layers or ()) or None)
    entry = coverage_entries()[name]
    return tiny_model(entry if layers is None else deeper(entry, layers))


def _batches(count: int, rank: int, packed: bool, model: nn.Module, media: str) -> list[dict[str, Tensor]]:
    """Return micro-batches of two lengths, packed rows, or rows with media; one micro-batch has text alone."""
    if media:
        rows = [multimodal_inputs(model, media=media, seed=rank * count + i) for i in range(count)]
        return [*rows[:-1], {"input_ids": torch.randint(3, 90, (2, 7))}]
    generator = torch.Generator().manual_seed(rank)
    if packed:
        positions = packed_positions()
        ids = [torch.randint(3, VOCAB, positions.shape, generator=generator) for _ in range(count)]
        return [{"input_ids": each, "position_ids": positions} for each in ids]
    lengths = [(8, 12)[i % 2] for i in range(count)]
    return [{"input_ids": torch.randint(3, VOCAB, (2, length), generator=generator)} for length in lengths]


def _weights(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the weights of a micro-batch's logits in the loss."""
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    return torch.randn(logits.shape, generator=generator, dtype=torch.float64)


def _alone(model: nn.Module, batch: Mapping[str, Tensor], packed: bool) -> Tensor:
    """Return the logits of the plain model, of each document by itself."""
    if not packed:
        return _of(model(**batch, use_cache=False))
    ids = batch["input_ids"]
    parts = [_of(model(input_ids=ids[row : row + 1, tokens], use_cache=False)) for row, tokens in documents()]
    return torch.stack(
        [torch.cat([p[0] for p in parts[: len(ROWS[0])]]), torch.cat([p[0] for p in parts[len(ROWS[0]) :]])]
    )


def _of(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits


def pipeline_outcome(name: str, axes: Mapping[str, int], step: Pipeline, **options: Any) -> dict[str, Any]:
    """Return the status of one row on this rank: right, refused, wrong or failed."""
    try:
        errors = measure_pipeline(name, axes, step, **options)
    except FsdpRuntimeError as error:
        return {"status": "refused", "note": str(error)}
    except Exception as error:  # of any kind: a row that fails costs itself only
        return {"status": "failed", "note": f"{type(error).__name__}: {error}"[-600:]}
    wrong = {path: error for path, error in errors.items() if not error <= PIPELINE_BOUND}
    if not wrong:
        return {"status": "right"}
    worst = max(wrong, key=lambda path: wrong[path])
    return {"status": "wrong", "note": f"{len(wrong)} tensors, {worst} off by {wrong[worst]:.1e}"}
