"""Check a run of training: losses, clipping and a fused optimizer; routes; files; offload; host waits of a step."""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tp_plans
from fsdp_runtime import (
    MeshSpec,
    load_weights,
    offload,
    onload,
    parallelize,
    record_routes,
    replay_routes,
    save_weights,
)
from fsdp_runtime.gpu_check.check_result import CheckResult, judged, largest, within
from fsdp_runtime.gpu_check.machine import World, optional
from fsdp_runtime.gpu_check.models import build, inputs_of, loss_of
from fsdp_runtime.gpu_check.parity import BOUNDS, Setting, backward, gradient_difference, own_part, worst
from fsdp_runtime.gpu_check.ranks import NotRun
from fsdp_runtime.meters.step_meter import synchronize
from fsdp_runtime.sync import ModelShards, execute_transfer, verify_transfer

STEPS, RATE = 20, 1e-3
#: The norm that clips some steps of a run, and the largest relative difference of its losses and norms.
MAX_NORM, RUN_BOUND = 1.0, 1e-3


def check_steps(sizes: dict[str, int], world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield the largest difference of losses and norms between a run on a mesh and one process."""
    clip = clipping()
    model, mesh, reference = _on_mesh("dense", sizes, device)
    expected = list(_run(reference, None, nn.utils.clip_grad_norm_, device))
    figures = list(_run(model, mesh, clip, device))
    pairs = zip((v for step in figures for v in step), (v for step in expected for v in step), strict=True)
    difference = largest(abs(value - single) / single for value, single in pairs)
    what = f"losses and norms of {STEPS} steps, fused AdamW, {Setting(sizes)} ({world.name})"
    yield within("Training", what, worst(difference, device), RUN_BOUND)


def _on_mesh(kind: str, sizes: dict[str, int], device: torch.device) -> tuple[nn.Module, DeviceMesh, nn.Module]:
    """Return a small model on a mesh, the mesh, and the model of one process."""
    reference, mesh = build(kind).to(device), MeshSpec(**sizes).build(device_type=device.type)
    return parallelize(copy.deepcopy(reference), mesh), mesh, reference


def clipping() -> Any:
    """Return rl-logprobs' ``clip_grad_norm_``."""
    rl_logprobs = optional("rl_logprobs")
    if rl_logprobs is None:
        raise NotRun("rl-logprobs is not installed")
    return rl_logprobs.clip_grad_norm_


def _run(model: nn.Module, mesh: DeviceMesh | None, clip: Any, device: torch.device) -> Iterator[tuple[float, ...]]:
    """Yield the loss of all ranks and the norm of the gradients before and after clipping, of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    inputs, targets = inputs_of("dense", device, torch.float32)
    tokens = targets.numel()
    if mesh is not None:
        inputs, targets, tokens = own_part(mesh, inputs, targets)
    for _ in range(STEPS):
        loss = torch.tensor(backward(loss_of(model, inputs, targets, tokens)), device=device)
        norms = [float(clip(model.parameters(), limit)) for limit in (MAX_NORM, float("inf"))]
        optimizer.step()
        optimizer.zero_grad()
        if mesh is not None:
            dist.all_reduce(loss, dist.ReduceOp.AVG)
        yield float(loss), *norms


def check_routes(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield the differences of recorded routes, and of gradients under replayed other routes, from one process."""
    model, mesh, reference = _on_mesh("routed", {"dp_shard": world.size, "ep": world.size}, device)
    inputs, targets = inputs_of("routed", device, torch.float32)
    with torch.no_grad(), record_routes(reference) as routes:
        reference(**inputs)
    stacked = routes.stacked().to(device)

    def own(layers: Tensor) -> Tensor:
        rows = layers.transpose(0, 1).reshape(*targets.shape, *layers.shape[::2])
        return own_part(mesh, {"routes": rows}, targets)[0]["routes"].flatten(0, 1).transpose(0, 1)

    own_inputs, own_targets, tokens = own_part(mesh, inputs, targets)
    with torch.no_grad(), record_routes(model) as recorded:
        model(**own_inputs)
    others = float((recorded.stacked().to(device) != own(stacked)).float().mean())
    yield within("Routes", f"recorded, ep={world.size} ({world.name})", worst(others, device), 0.0)
    other = (stacked + 1) % 8
    with replay_routes(reference, other):
        backward(loss_of(reference, inputs, targets, targets.numel()))
    with replay_routes(model, own(other)):
        backward(loss_of(model, own_inputs, own_targets, tokens))
    difference = worst(gradient_difference(model, reference), device)
    yield within("Routes", f"replayed, ep={world.size} ({world.name})", difference, BOUNDS[torch.float32])


def check_weights(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield whether weights of ``dp_shard`` arrive on ``tp``: sent from shards to shards, and by files."""
    trainer, engine = (MeshSpec(**{axis: world.size}).build(device_type=device.type) for axis in ("dp_shard", "tp"))
    reference = build("dense").to(device)
    model, received = parallelize(copy.deepcopy(reference), trainer), parallelize(_zeros(reference), engine)
    source, target = ModelShards(model), ModelShards(received)
    plan = tp_plans.transfer.plan_transfer(source.layout, target.layout)
    synchronize(device)
    begin = time.perf_counter()
    execute_transfer(plan, source=source, destination=target.local)
    synchronize(device)
    seconds = time.perf_counter() - begin
    verify_transfer(plan, source=source, destination=target.local)
    total = sum(plan.bytes_sent(rank) for rank in range(dist.get_world_size()))
    figure = f"every block arrived; {total / 2**20:.1f} MiB sent in {seconds:.3f} s"
    yield CheckResult("Weights", f"sent from dp_shard to tp ({world.name})", figure, "hashes of all blocks", "passed")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)
        save_weights(model, folders[0])
        loaded = parallelize(_zeros(reference), engine)
        load_weights(loaded, folders[0])
        difference = worst(parameter_difference(loaded, reference), device)
    yield within("Weights", f"saved from dp_shard, loaded on tp ({world.name})", difference, 0.0)


def _zeros(model: nn.Module) -> nn.Module:
    zeros = copy.deepcopy(model)
    for parameter in zeros.parameters():
        nn.init.zeros_(parameter)
    return zeros


def parameter_difference(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of two models' parameters."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    with torch.no_grad():
        full = [(p.full_tensor() if isinstance(p, DTensor) else p, expected) for p, expected in pairs]
        return largest(float((parameter - expected).abs().max()) for parameter, expected in full)


def check_offload(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield the bytes that an offload frees; it raises if the device does not get them back."""
    model, _, before = _on_mesh("dense", {"dp_shard": world.size}, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    inputs, targets = inputs_of("dense", device, torch.float32)
    backward(loss_of(model, inputs, targets, targets.numel()))
    optimizer.step()
    report, returned = offload(model, optimizer, device=device), onload(model)
    optimizer.step()
    difference = parameter_difference(model, before)
    figure = f"{report.total:,} bytes moved, {returned.total:,} back, difference {difference:.2g}"
    if report.allocated_before is not None and report.allocated_after is not None:
        figure += f"; {report.allocated_before - report.allocated_after:,} of {report.allocated_before:,} bytes freed"
    unchanged = returned.total == report.total and difference == 0
    yield judged("Offload", f"parameters, gradients, optimizer ({world.name})", figure, "all, unchanged", unchanged)


def check_host_waits(kind: str, world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield how often a step of training waits for the device, by the place of the call."""
    if device.type != "cuda":
        raise NotRun("only CUDA and ROCm devices count synchronizing calls")
    clip = clipping()
    model = _on_mesh(kind, {"dp_shard": world.size}, device)[0].train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs, targets = inputs_of(kind, device, torch.float32)
    places: Counter[str] = Counter()
    for _ in range(4):  # the first two compare the inputs of ranks
        places.clear()
        with synchronizing_calls(places):
            loss_of(model, inputs, targets, targets.numel()).backward()  # type: ignore[no-untyped-call]
            clip(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    figure = ", ".join(f"{count} at {place}" for place, count in places.most_common()) or "none"
    yield CheckResult("Host waits", f"of a step, {kind} ({world.name})", f"{places.total()}: {figure}")


@contextmanager
def synchronizing_calls(places: Counter[str]) -> Iterator[None]:
    """Count the calls that wait for a CUDA device, by file and line."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    texts = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    places.update(f"{Path(warning.filename).name}:{warning.lineno}" for warning in texts)
