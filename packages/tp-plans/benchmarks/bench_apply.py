"""Applying a plan to an 80-layer model without weights, beside torch's own styles in equal number."""

from __future__ import annotations

import argparse
import copy

import torch.distributed as dist
from deep import deep_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import table, take_turns

import tp_plans

TP = 8


def torch_styles(plan: tp_plans.Plan) -> dict[str, ParallelStyle]:
    """A style of torch's for every rule of a plan."""
    return {pattern: torch_style(style) for pattern, style in plan.items()}


def torch_style(style: tp_plans.Style) -> ParallelStyle:
    match style:
        case tp_plans.ColwiseParallel():
            return ColwiseParallel()
        case tp_plans.RowwiseParallel():
            return RowwiseParallel(output_layouts=Shard(1))
        case tp_plans.VocabParallelEmbedding():
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        case tp_plans.SequenceParallel():
            return SequenceParallel()
        case _:
            return PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    model = deep_model()
    plan = tp_plans.plan_for(model, sequence_parallel=True)

    def fresh() -> nn.Module:
        return copy.deepcopy(model)

    steps = {
        "torch's styles": (fresh, lambda m: parallelize_module(m, mesh, torch_styles(plan))),
        "tp_plans": (fresh, lambda m: parallelize_module(m, mesh, plan.to_torch())),
    }
    times = take_turns(steps, options.rounds)
    table(f"{len(plan)} styles on 80 layers, tp={TP}", times, "torch's styles", "within 1.5 times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
