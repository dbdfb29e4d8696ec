"""An optimizer built before ``parallelize`` is refused at its first step."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import FSDPOptions, MeshSpec, ModelError, parallelize
from fsdp_runtime.parallel.stale_optimizers import _MARK
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool


def _step_of_an_early_optimizer(axes: dict[str, int]) -> tuple[str, int]:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    inputs = tiny_inputs(model, batch=1, length=5)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    options = None
    if "dp_shard" in axes:  # a master dtype exchanges the data of parameters before they are sharded
        options = FSDPOptions(mp_policy=MixedPrecisionPolicy(torch.float32), master_dtype=torch.float64)
    parallelize(model, MeshSpec(**axes).build(device_type="cpu"), logits="full", fsdp=options)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs, use_cache=False).logits.sum().backward()
    late.step()
    try:
        early.step()
        message = ""
    except ModelError as error:
        message = f"{type(error).__name__}: {error}"
    return message, sum(hasattr(parameter, _MARK) for parameter in model.parameters())


def test_the_step_of_an_optimizer_built_too_early_raises(two_ranks: RankPool) -> None:
    for axes in ({"tp": 2}, {"dp_shard": 2}):
        for message, marked in two_ranks.run(_step_of_an_early_optimizer, axes):
            assert message.startswith("ModelError: this SGD holds")
            assert "build the optimizer after parallelize" in message
            assert marked == 0


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
