"""Parameters that ``parallelize`` replaces: attributes and hooks are carried over, early optimizers refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime import FSDP2, MeshSpec, ModelError, load_weights, parallelize, save_weights
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool


def _step_of_an_early_optimizer(axes: dict[str, int], options: dict[str, Any]) -> tuple[str, bool]:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    inputs = tiny_inputs(model, batch=1, length=5)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(model, MeshSpec(**axes).build(device_type="cpu"), logits="full", **options)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs, use_cache=False).logits.sum().backward()
    late.step()
    try:
        early.step()
        message = ""
    except ModelError as error:
        message = f"{type(error).__name__}: {error}"
    marked = any("replaced" in name for parameter in model.parameters() for name in vars(parameter))
    return message, marked


def test_the_step_of_an_optimizer_built_too_early_raises(two_ranks: RankPool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    master = {"fsdp": FSDP2(mp_policy=policy, master_dtype=torch.float64)}
    for axes, options in (({"tp": 2}, {}), ({"dp_shard": 2}, {}), ({"dp_shard": 2}, master)):
        for message, marked in two_ranks.run(_step_of_an_early_optimizer, axes, options):
            assert message.startswith("ModelError: this SGD holds")
            assert "build the optimizer after parallelize" in message
            assert not marked


def _another_model_trains() -> bool:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    parallelize(model, MeshSpec(tp=2).build(device_type="cpu"))
    other(torch.ones(1, 3)).sum().backward()
    before = other.weight.detach().clone()
    optimizer.step()
    return not torch.equal(before, other.weight)


def test_optimizers_of_other_models_are_left_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(_another_model_trains) == [True, True]


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()


def _wrong_hooks(axes: dict[str, int], options: dict[str, Any], folder: str | None) -> list[str]:
    """Parameters whose attribute was lost or whose hooks saw another gradient than in one process."""
    gradients: dict[tuple[str, str, bool], torch.Tensor] = {}
    handles = []
    architecture = "Qwen3MoeForCausalLM" if "ep" in axes else "Qwen3ForCausalLM"  # with norms of heads

    def attach(model: torch.nn.Module, parallel: bool) -> None:
        for name, parameter in model.named_parameters():
            parameter.tag = name  # type: ignore[attr-defined]

            def before(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
                gradients["before", name, parallel] = _whole(gradient)
                return gradient * 3

            def after(parameter: torch.Tensor, name: str = name) -> None:
                gradients["after", name, parallel] = _whole(parameter.grad)

            if "dp_shard" not in axes:
                handles.append(parameter.register_hook(before))
            handles.append(parameter.register_post_accumulate_grad_hook(after))

    plain = tiny_model(architecture, dtype=torch.float32, tied=axes == {"tp": 2} and folder is None)
    inputs = tiny_inputs(plain, batch=2, length=5)
    model = tiny_model(architecture, dtype=torch.float32, tied=axes == {"tp": 2} and folder is None)
    if folder is not None:
        model = model.to("meta")
    for each in (plain, model):
        attach(each, each is model)
    parallelize(model, MeshSpec(**axes).build(device_type="cpu"), **options)
    if folder is not None:
        save_weights(plain, folder)
        load_weights(model, folder)
    for each in (plain, model):
        each(**inputs, use_cache=False).logits.sum().backward()
    wrong = [f"{name}: tag" for name, parameter in model.named_parameters() if getattr(parameter, "tag", None) != name]
    for (kind, name, parallel), wanted in gradients.items():
        found = gradients.get((kind, name, True))
        if not parallel and (found is None or not torch.allclose(found, wanted, atol=1e-4, rtol=1e-3)):
            wrong.append(f"{name}: {kind}")
    for handle in handles:
        handle.remove()
    gradients.clear()
    model(**inputs, use_cache=False).logits.sum().backward()
    return wrong + [f"{name}: runs though removed" for _, name, _ in gradients]


MASTER = FSDP2(mp_policy=MixedPrecisionPolicy(torch.float32), master_dtype=torch.float64)
HOOKS: list[tuple[dict[str, int], dict[str, Any], bool]] = [
    ({"tp": 2}, {}, False),
    ({"tp": 2}, {"sequence_parallel": True}, True),
    ({"dp_shard": 2}, {}, True),
    ({"dp_shard": 2}, {"fsdp": MASTER}, False),
]


@pytest.mark.parametrize(("axes", "options", "meta"), HOOKS, ids=str)
def test_attributes_and_hooks_are_carried_over(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int], options: dict[str, Any], meta: bool
) -> None:
    assert two_ranks.run(_wrong_hooks, axes, options, str(tmp_path) if meta else None) == [[], []]


def test_attributes_and_hooks_of_experts_are_carried_over(four_ranks: RankPool) -> None:
    assert four_ranks.run(_wrong_hooks, {"dp_shard": 2, "tp": 2, "ep": 2}, {}, None) == [[]] * 4


def _hooks_that_fsdp2_does_not_run() -> list[str]:
    found = []
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    inputs = tiny_inputs(model, batch=2, length=5)
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    early = model.lm_head.weight.register_hook(lambda gradient: gradient)
    for _ in range(2):
        try:
            parallelize(model, mesh)
            late = model.lm_head.weight.register_hook(lambda gradient: gradient)
            model(**inputs, use_cache=False)
        except ModelError as error:
            found.append(str(error))
        early.remove()
    late.remove()
    model(**inputs, use_cache=False)
    return found


def test_hooks_that_fsdp2_does_not_run_are_refused_by_name(two_ranks: RankPool) -> None:
    for before, after in two_ranks.run(_hooks_that_fsdp2_does_not_run):
        for message in (before, after):
            assert message.startswith("1 parameters have hooks of register_hook, first lm_head.weight, which FSDP2")
            assert "use register_post_accumulate_grad_hook" in message
