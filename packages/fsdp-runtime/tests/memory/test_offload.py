"""Offload and onload: memory really freed, nothing changed by the journey, and nothing usable meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import MeshSpec, ModelError, OptionError, offload, onload, parallelize, unsharded
from fsdp_runtime.errors import OffloadError
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(**tiny_inputs(model, batch=2, length=5, seed=seed), use_cache=False).logits.sum().backward()
    optimizer.step()


def _locals(tensors: Any) -> list[Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _bytes(tensors: Any) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _locals(tensors)}
    return sum(storages.values())


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _journey(mesh: dict[str, int], architecture: str) -> dict[str, Any]:
    """Two steps with everything offloaded and back in between, beside a twin that stays."""
    built = MeshSpec(**mesh).build(device_type="cpu")
    models = [parallelize(tiny_model(architecture, tied=True), built) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        _step(model, optimizer, seed=1)
    model, optimizer = models[0], optimizers[0]
    held = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
        "optimizer": _state(optimizer),
    }
    before = {part: _bytes(tensors) for part, tensors in held.items()}
    report = offload(model, optimizer, device="cpu")
    away = {part: _bytes(tensors) for part, tensors in held.items()}
    again = offload(model, optimizer, device="cpu").total
    back = onload(model)
    after = {part: _bytes(tensors) for part, tensors in held.items()}
    for one, other in zip(models, optimizers, strict=True):
        _step(one, other, seed=2)
    return {
        "freed what there was": dict(report.bytes_moved) == before,
        "left": away,
        "moved again": again,
        "brought back": after == before and back.total == report.total,
        "same objects": all(a is b for a, b in zip(held["parameters"], model.parameters(), strict=True)),
        "same training": all(
            torch.equal(a, b)
            for a, b in zip(_locals(models[0].parameters()), _locals(models[1].parameters()), strict=True)
        ),
        "total": report.total,
    }


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, pytest.param({"tp": 4}, marks=pytest.mark.slow)], ids=str)
def test_the_journey_frees_every_byte_and_changes_nothing(four_ranks: RankPool, mesh: dict[str, int]) -> None:
    for found in four_ranks.run(_journey, mesh, "Qwen3ForCausalLM"):
        assert found.pop("total") > 100_000
        assert found == {
            "freed what there was": True,
            "left": {"parameters": 0, "gradients": 0, "buffers": 0, "optimizer": 0},
            "moved again": 0,
            "brought back": True,
            "same objects": True,
            "same training": True,
        }


def _plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny_model("LlamaForCausalLM")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(model, optimizer, seed=1)
    return model, optimizer


def test_parts_travel_alone() -> None:
    model, optimizer = _plain()
    inputs = tiny_inputs(model, batch=1, length=4)
    expected = model(**inputs).logits
    assert set(offload(model, optimizer, device="cpu").bytes_moved) == {
        "parameters",
        "gradients",
        "buffers",
        "optimizer",
    }
    onload(model, parts=("parameters", "buffers"))
    assert _bytes(_state(optimizer)) == 0
    with pytest.raises(ModelError, match=r"gradients, optimizer are offloaded to host memory: call onload\(model, p"):
        optimizer.step()
    onload(model)
    assert torch.equal(model(**inputs).logits, expected)
    optimizer.step()


def test_a_model_computes_while_only_the_optimizer_is_away() -> None:
    model, optimizer = _plain()
    assert offload(model, parts=("gradients",), device="cpu").total > 0
    offload(model, optimizer, parts=("optimizer",), device="cpu")
    assert model(**tiny_inputs(model, batch=1, length=4)).logits.isfinite().all()
    with pytest.raises(ModelError, match="gradients, optimizer are offloaded"):
        optimizer.step()
    assert onload(model, parts=("gradients",)).total > 0
    with pytest.raises(ModelError, match=r"optimizer are offloaded.*parts=\('optimizer',\)"):
        optimizer.step()
    assert onload(model, parts=("optimizer",)).total > 0
    optimizer.step()


def test_using_what_is_away_is_refused_with_the_fix() -> None:
    model, optimizer = _plain()
    offload(model, optimizer, device="cpu")
    with pytest.raises(
        ModelError, match=r"parameters, buffers are offloaded to host memory: call onload\(model, parts="
    ):
        model(**tiny_inputs(model, batch=1, length=4))
    with pytest.raises(ModelError, match="call onload"):
        optimizer.step()


def test_the_cpu_is_left_alone_unless_it_is_named() -> None:
    model, optimizer = _plain()
    assert offload(model, optimizer).total == 0
    assert model(**tiny_inputs(model, batch=1, length=4)).logits is not None
    assert onload(model).total == 0


def _inside_unsharded() -> str:
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(dp_shard=2).build(device_type="cpu"))
    with unsharded(model):
        try:
            offload(model, device="cpu")
        except ModelError as error:
            return str(error)
    raise AssertionError("accepted")


def test_offload_inside_unsharded_is_refused(two_ranks: RankPool) -> None:
    assert "leave it before offload(model)" in two_ranks.run(_inside_unsharded)[0]


def test_memory_that_is_not_the_tensors_own_is_refused(tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    file = tmp_path / "weights"
    model.weight.data = torch.from_file(str(file), shared=True, size=4).view(2, 2)
    with pytest.raises(OffloadError, match=r"weight: its memory belongs to a file or another process"):
        offload(model, device="cpu")


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="'momentum' is not one of 'parameters', 'gradients', 'buffers', 'optimizer'"):
        offload(nn.Linear(2, 2), parts=("momentum",))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="without an optimizer"):
        offload(nn.Linear(2, 2), parts=("optimizer",))
