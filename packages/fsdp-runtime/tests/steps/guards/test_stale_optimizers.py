"""An optimizer built before ``parallelize`` is refused at its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import FSDPOptions, MeshSpec, ModelError, parallelize
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
    master = {"fsdp": FSDPOptions(mp_policy=policy, master_dtype=torch.float64)}
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
