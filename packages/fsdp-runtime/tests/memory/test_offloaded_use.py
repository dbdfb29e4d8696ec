"""Every use of an offloaded model raises a typed error that names ``onload``; nothing ends the process."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import rl_logprobs
from fsdp_runtime import (
    MeshSpec,
    ModelError,
    assert_finite_gradients,
    assert_replicas_equal,
    describe_parallelism,
    load_weights,
    offload,
    onload,
    parallelize,
    save_training_state,
    save_weights,
    stream_weights,
    unsharded,
)
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool

Use = Callable[[Any, Optimizer, str], Any]


def _unshard_directly(model: Any, _optimizer: Optimizer, _directory: str) -> None:
    model.unshard() if hasattr(model, "unshard") else model()


USES: dict[str, Use] = {
    "forward": lambda m, o, d: m(**tiny_inputs(m, batch=1, length=4), use_cache=False),
    "inner forward": lambda m, o, d: m.model(**tiny_inputs(m, batch=1, length=4), use_cache=False),
    "block": lambda m, o, d: m.model.layers[0](torch.randn(1, 4, 64)),
    "head": lambda m, o, d: m.lm_head(torch.randn(1, 64)),
    "unsharded": lambda m, o, d: unsharded(m).__enter__(),
    "unshard": _unshard_directly,
    "stream_weights": lambda m, o, d: list(stream_weights(m)),
    "save_weights": lambda m, o, d: save_weights(m, d),
    "load_weights": lambda m, o, d: load_weights(m, d),
    "save_training_state": lambda m, o, d: save_training_state(d, m, o, step=1),
    "assert_finite_gradients": lambda m, o, d: assert_finite_gradients(m),
    "assert_replicas_equal": lambda m, o, d: assert_replicas_equal(m),
    "state_dict": lambda m, o, d: m.state_dict(),
    "inner state_dict": lambda m, o, d: m.model.layers[0].state_dict(),
    "step": lambda m, o, d: o.step(),
    "step of another optimizer": lambda m, o, d: torch.optim.SGD(m.parameters(), lr=0.1).step(),
    "deepcopy": lambda m, o, d: copy.deepcopy(m),
    "pickle": lambda m, o, d: pickle.dumps(m),
}


def _model(mesh: dict[str, int]) -> tuple[nn.Module, Optimizer]:
    model = parallelize(
        tiny_model("Qwen3ForCausalLM", dtype=torch.float32), MeshSpec(**mesh).build(device_type="cpu"), logits="full"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**tiny_inputs(model, batch=1, length=4), use_cache=False).logits.square().mean().backward()
    optimizer.step()
    return model, optimizer


def _outcomes(mesh: dict[str, int]) -> dict[str, str]:
    model, optimizer = _model(mesh)
    before = [p.detach().clone() for p in model.parameters()]
    offload(model, optimizer, device="cpu")
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, use in USES.items():
            try:
                use(model, optimizer, directory)
                found[name] = "no error"
            except ModelError as error:
                found[name] = "ModelError" if "onload(" in str(error) else str(error)
    describe_parallelism(model)
    try:
        rl_logprobs.clip_grad_norm_(model.parameters(), 1.0)
        found["norm"] = "no error"
    except rl_logprobs.LogprobsError as error:
        found["norm"] = "LogprobsError" if "freed" in str(error) else str(error)
    onload(model)
    optimizer.step()
    model(**tiny_inputs(model, batch=1, length=4), use_cache=False)
    copy.deepcopy(model) if not mesh.get("dp_shard") else None
    assert len(model.state_dict()) > 0
    assert len(before) == len(list(model.parameters()))
    return found


EXPECTED = {**dict.fromkeys(USES, "ModelError"), "norm": "LogprobsError"}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}], ids=["tp", "dp_shard"])
def test_every_use_on_a_mesh_names_onload(two_ranks: RankPool, mesh: dict[str, int]) -> None:
    assert two_ranks.run(_outcomes, mesh) == [EXPECTED, EXPECTED]


def test_every_use_of_a_plain_model_names_onload() -> None:
    assert _outcomes({}) == EXPECTED


def test_a_state_dict_can_be_read_while_only_the_optimizer_is_offloaded() -> None:
    model, optimizer = _model({})
    offload(model, optimizer, parts=("optimizer",), device="cpu")
    assert len(model.state_dict()) > 0
    with pytest.raises(ModelError, match="onload"):
        optimizer.step()
