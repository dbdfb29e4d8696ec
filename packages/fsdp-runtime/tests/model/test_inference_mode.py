"""Inference mode first and training afterwards, on FSDP2 models: gathers, streams and forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import parallelize, stream_weights, unsharded
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

AXES = {"dp_shard": 2}


def _model(*, sharded: bool = True) -> nn.Module:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    return parallelize(model, mesh_for(AXES)) if sharded else model


def _forward(model: nn.Module) -> Tensor:
    logits: Tensor = model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits
    return logits


def _gradients(model: nn.Module) -> list[Tensor]:
    _forward(model).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]


def _stream(model: nn.Module) -> None:
    expected = dict(_model(sharded=False).named_parameters())
    for name, tensor in stream_weights(model):
        assert torch.equal(tensor, expected[name])
        assert not tensor.is_inference()


def _forward_twice_unsharded(model: nn.Module) -> None:
    with unsharded(model):
        _forward(model)
        _forward(model)


def _forward_partly_unsharded(model: nn.Module) -> None:
    with unsharded(model, max_bytes=300_000):
        _forward(model)


FIRST: dict[str, Callable[[nn.Module], Any]] = {
    "forward": _forward,
    "stream": _stream,
    "unsharded": _forward_twice_unsharded,
    "partly unsharded": _forward_partly_unsharded,
}


def _gradients_after_inference_mode() -> dict[str, float]:
    """The largest difference of a gradient from a single process's, by what ran in inference mode before."""
    expected = _gradients(_model(sharded=False))
    errors = {}
    for name, first in FIRST.items():
        model = _model()
        with torch.inference_mode():
            first(model)
        errors[name] = max(float((a - b).abs().max()) for a, b in zip(_gradients(model), expected, strict=True))
        with torch.inference_mode():
            first(model)  # and again after training
    return errors


def test_a_model_trains_after_it_ran_in_inference_mode_first(two_ranks: RankPool) -> None:
    for errors in two_ranks.run(_gradients_after_inference_mode):
        assert errors.keys() == FIRST.keys()
        assert max(errors.values()) < 1e-6
