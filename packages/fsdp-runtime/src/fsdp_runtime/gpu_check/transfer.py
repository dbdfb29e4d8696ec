"""Weights from a mesh to another mesh, shards to shards, over the world's backend."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import tp_plans
from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.gpu_check.check_result import CheckResult
from fsdp_runtime.gpu_check.machine import World
from fsdp_runtime.gpu_check.parity import build
from fsdp_runtime.meters.step_meter import synchronize
from fsdp_runtime.sync import ModelShards, execute_transfer, verify_transfer


def check_transfer(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield whether weights of ``dp_shard`` arrive on ``tp``, and the seconds that they took."""
    trainer, engine = (MeshSpec(**{axis: world.size}).build(device_type=device.type) for axis in ("dp_shard", "tp"))
    source = ModelShards(parallelize(build(experts=False).to(device), trainer))
    model = build(experts=False).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    target = ModelShards(parallelize(model, engine))
    plan = tp_plans.transfer.plan_transfer(source.layout, target.layout)
    synchronize(device)
    begin = time.perf_counter()
    execute_transfer(plan, source=source, destination=target.local)
    synchronize(device)
    seconds = time.perf_counter() - begin
    verify_transfer(plan, source=source, destination=target.local)
    total = sum(plan.bytes_sent(rank) for rank in range(dist.get_world_size()))
    figure = f"every block arrived; {total / 2**20:.1f} MiB sent in {seconds:.3f} s"
    yield CheckResult("Weight sync", f"dp_shard to tp ({world.name})", figure, "hashes of all blocks equal", "passed")
