"""Compare loss and every gradient of a step on every axis with one process; move weights from mesh to mesh."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tp_plans
from fsdp_runtime import MeshSpec, parallelize, sequence_layout, submesh
from fsdp_runtime.gpu_check.check_result import CheckResult, within
from fsdp_runtime.gpu_check.machine import World
from fsdp_runtime.meters.step_meter import synchronize
from fsdp_runtime.sync import ModelShards, execute_transfer, verify_transfer

ROWS, LENGTH, VOCABULARY = 8, 64, 512
#: Tokens of a row on a CPU, where a step in bfloat16 may take ten times as long as one in float32.
LENGTH_ON_CPU = 16
#: Largest differences, relative to the largest element of a tensor.  float32 without TF32; bfloat16 has 8 bits, and its
#: gradients are sums of products that are rounded in another order.
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 0.15}


@dataclass(frozen=True)
class Setting:
    """A mesh and options of ``parallelize``; ``experts`` asks for the mixture."""

    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    experts: bool = False

    def __str__(self) -> str:
        """Return the axes and options as the report names them."""
        axes = [f"{name}={size}" for name, size in self.sizes.items()]
        return " ".join(axes + [name if value is True else f"{name}={value}" for name, value in self.options.items()])


def settings(size: int) -> list[Setting]:
    """Return every axis and their products for a number of ranks."""
    if size == 1:
        return [Setting({"dp_shard": 1}), Setting({"dp_shard": 1}, experts=True)]
    half = size // 2
    cases = [
        Setting({"dp_shard": size}),
        Setting({"tp": size}),
        Setting({"tp": size}, {"sequence_parallel": True}),
        *(Setting({"cp": size}, {"context_parallel": way}) for way in ("allgather", "ulysses", "ring")),
        Setting({"dp_shard": size, "ep": size}, experts=True),
        Setting({"tp": size}, experts=True),
    ]
    if half > 1:
        cases += [
            Setting({"dp_shard": half, "tp": 2}, {"sequence_parallel": True}),
            Setting({"dp_replicate": 2, "dp_shard": half}),
            Setting({"cp": 2, "tp": half}),
            Setting({"dp_shard": half, "tp": 2, "ep": 2}, experts=True),
        ]
    return cases


def check_parity(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield one finding for each setting and dtype; every rank's worst difference counts."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for setting in settings(world.size):
        for dtype, bound in BOUNDS.items():
            model = build(setting.experts).to(device, dtype)
            what = f"{type(model).__name__}, {setting}, {str(dtype).removeprefix('torch.')} ({world.name})"
            try:
                value = torch.tensor(largest_difference(model, setting, device), device=device)
            except Exception as error:  # noqa: BLE001  # every rank of a small model raises; the next model goes on
                yield CheckResult("Parity", what, f"{type(error).__name__}: {str(error)[:200]}", "no error", "failed")
                continue
            dist.all_reduce(value, dist.ReduceOp.MAX)
            yield within("Parity", what, float(value), bound)


def build(experts: bool) -> nn.Module:
    """Return a small Llama or Qwen3-MoE, the same on every rank, with every parameter off its initial value."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    common: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "use_cache": False,
    }
    mixture: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**common, **mixture) if experts else LlamaConfig(**common)
    generator = torch.Generator().manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            center = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(center + 0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def largest_difference(model: nn.Module, setting: Setting, device: torch.device) -> float:
    """Return the largest relative difference of the loss and the gradients on this rank."""
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    length = LENGTH_ON_CPU if device.type == "cpu" else LENGTH
    tokens = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator).to(device)
    targets = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator).to(device)
    expected = loss_of(reference, {"input_ids": tokens}, targets, tokens.numel())
    expected.backward()  # type: ignore[no-untyped-call]
    expected = expected.detach()
    mesh = MeshSpec(**setting.sizes).build(device_type=device.type)
    parallelize(model, mesh, **setting.options)
    data = submesh(mesh, "dp")
    rank, size = data.get_local_rank(), data.size()
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    inputs, targets = {"input_ids": tokens[mine]}, targets[mine]
    if setting.sizes.get("cp", 1) > 1:
        layout = sequence_layout(mesh, length=length)
        inputs, targets = layout.shard_batch(inputs), layout.shard(targets)
    loss = loss_of(model, inputs, targets, tokens.numel() // size)
    loss.backward()  # type: ignore[no-untyped-call]
    total = loss.detach().double()
    dist.all_reduce(total)
    copies = dist.get_world_size() // (size * setting.sizes.get("cp", 1))
    differences = [abs(float(total) / (size * copies) - float(expected)) / abs(float(expected))]
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad, gradients[name].grad
        if gradient is None or wanted is None:
            differences.append(float("inf") if (gradient is None) != (wanted is None) else 0.0)
            continue
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        differences.append(float((full - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)))
    return max(differences)


def loss_of(model: nn.Module, inputs: dict[str, Any], targets: Tensor, tokens: int) -> Tensor:
    """Return the cross-entropy summed over this rank's tokens, over a number of tokens, in float32."""
    logits = model(**inputs).logits
    logits = (logits.full_tensor() if isinstance(logits, DTensor) else logits).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens


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
