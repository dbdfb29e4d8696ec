"""Torch's ring is asked for where it can run; on a stand-in, since its kernels are CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_runtime.parallel.context.ring
from fsdp_runtime import (
    BackendError,
    ContextAttention,
    MeshSpec,
    ModelError,
    OptionError,
    ring_attention,
)
from fsdp_runtime.parallel.context.apply import attention_of, replace_attention
from harness.models import tiny_inputs, tiny_model

LENGTH = 6


class _CudaMesh(DeviceMesh):
    """A mesh of one rank that says it is on CUDA."""

    device_type = "cuda"
    mesh_dim_names = ("cp",)

    def __init__(self) -> None:
        self.built = MeshSpec().build(device_type="cpu")

    def __getitem__(self, axis: str) -> Any:
        return self.built[axis]


def _model(architecture: str = "LlamaForCausalLM", load_balancer: Any = "headtail") -> nn.Module:
    model = tiny_model(architecture, num_key_value_heads=2)
    replace_attention(model, ContextAttention(MeshSpec().build(device_type="cpu").get_group("cp"), load_balancer))
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches torch: the arguments of its context, then each call of attention by its own name."""
    found: list[Any] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    @contextmanager
    def stand_in(mesh: Any, *, buffers: list[torch.Tensor], **_: Any) -> Iterator[None]:
        found.append((mesh.size(), buffers[0].tolist()))

        def noted(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            found.append((tuple(query.shape), tuple(key.shape), options["is_causal"]))
            return attention(query, key, *rest, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
            yield

    monkeypatch.setattr(fsdp_runtime.parallel.context.ring, "context_parallel", stand_in)
    monkeypatch.setattr(
        torch, "arange", lambda *sizes, device=None, arange=torch.arange, **rest: arange(*sizes, **rest)
    )
    return found


def test_unmasked_layers_go_through_the_name_that_torch_replaces(calls: list[Any]) -> None:
    model = _model()
    inputs = tiny_inputs(model, batch=1, length=LENGTH)
    expected = model(**inputs).logits
    with ring_attention(model, _CudaMesh(), LENGTH):
        logits = model(**inputs).logits
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=0)
    one_call = ((1, 4, LENGTH, 16), (1, 4, LENGTH, 16), True)  # two key/value heads repeated to four
    assert calls == [(1, list(range(LENGTH))), one_call, one_call]
    assert not attention_of(model).ring


def test_masked_layers_go_on_gathering(calls: list[Any]) -> None:
    model = _model("Gemma3ForCausalLM")  # its first layer has a sliding window
    with ring_attention(model, _CudaMesh(), LENGTH):
        model(**tiny_inputs(model, batch=1, length=LENGTH))
    assert len(calls) == 2


def test_where_it_cannot_run_the_alternative_is_named() -> None:
    mesh = MeshSpec().build(device_type="cpu")
    with (
        pytest.raises(BackendError, match="calls CUDA kernels only, and the mesh is on cpu: leave it out"),
        ring_attention(_model(), mesh, LENGTH),
    ):
        pass
    with (
        pytest.raises(OptionError, match="needs cp_load_balancer='headtail', and the model's is None"),
        ring_attention(_model(load_balancer=None), _CudaMesh(), LENGTH),
    ):
        pass
    with (
        pytest.raises(ModelError, match="is not under context parallelism"),
        ring_attention(nn.Linear(2, 2), mesh, LENGTH),
    ):
        pass
