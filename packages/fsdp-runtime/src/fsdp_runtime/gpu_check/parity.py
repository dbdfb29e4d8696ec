"""Compare loss and every gradient of a step with one process: on every axis, with options, for each kind of model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime import MeshSpec, parallelize, sequence_layout, submesh
from fsdp_runtime.gpu_check.check_result import CheckResult, largest, within
from fsdp_runtime.gpu_check.machine import World
from fsdp_runtime.gpu_check.models import build, inputs_of, loss_of
from fsdp_runtime.gpu_check.ranks import NotRun
from fsdp_runtime.steps import Compile

#: Largest differences, relative to the largest element of a tensor.  float32 without TF32; bfloat16 has 8 bits, and its
#: gradients are sums of products that are rounded in another order.
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 0.15}
#: The same for the products of ``fla``'s kernels, which are in TF32.
FLA_BOUND = 0.02
#: A gradient that is smaller, relative to the model's largest one, may vanish but for rounding, as of a key's bias.
SMALLEST = 1e-3
#: Attention implementations for packed rows: the package that each one needs, and whether a CPU and float32 have it.
KERNELS = {
    "sdpa": ("torch", True),
    "eager": ("torch", True),
    "flex_attention": ("triton", False),
    "flash_attention_2": ("flash_attn", False),
    "flash_attention_3": ("flash_attn_interface", False),
}
_WAYS = ("allgather", "ulysses", "ring")
_SP, _PACKED = {"sequence_parallel": True}, {"packed_sequences": True}
_RECOMPUTED = [{"activation_checkpointing": mode} for mode in ("block", "selective")]


@dataclass(frozen=True)
class Setting:
    """A mesh, options of ``parallelize``, a kind of model, and the attention of packed rows (empty: whole rows)."""

    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "dense"
    packed: str = ""
    half: bool = True  # compared in bfloat16 too

    def __str__(self) -> str:
        """Return the kind, axes and options as the report names them."""
        axes = [f"{name}={size}" for name, size in self.sizes.items()]
        options = [name if value is True else f"{name}={value}" for name, value in self.options.items()]
        return f"{self.kind}, {' '.join([*axes, *options, *([self.packed] if self.packed else [])])}"


def check_setting(setting: Setting, dtype: torch.dtype, world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield the difference between a setting and one process; every rank's worst one counts."""
    package, everywhere = KERNELS.get(setting.packed, ("torch", True))
    if find_spec(package) is None or (device.type == "cpu" and not everywhere):
        raise NotRun(f"{setting.packed} needs {package} and an accelerator")
    if setting.packed.startswith("flash") and dtype == torch.float32:
        raise NotRun(f"{setting.packed} takes no float32")
    value = largest_difference(build(setting.kind).to(device, dtype), setting, device)
    bound = BOUNDS[dtype]
    if setting.kind == "hybrid" and device.type != "cpu" and find_spec("fla") is not None:
        bound = max(bound, FLA_BOUND)
    what = f"{setting}, {str(dtype).removeprefix('torch.')} ({world.name})"
    yield within("Parity", what, worst(value, device), bound)


def worst(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks, infinity for NaN."""
    every = torch.tensor(largest([value]), device=device)  # gloo's maximum loses NaN
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return float(every)


def largest_difference(model: nn.Module, setting: Setting, device: torch.device) -> float:
    """Return the largest relative difference of the loss and the gradients on this rank."""
    inputs, targets = inputs_of(setting.kind, device, next(model.parameters()).dtype)
    reference = copy.deepcopy(model)
    if setting.packed:
        model.set_attn_implementation(setting.packed)  # type: ignore[operator]
        expected = sum(_documents_alone(reference, inputs["input_ids"], targets))
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in _lengths(targets)])
        inputs["position_ids"] = inputs["position_ids"].to(device)
    else:
        expected = backward(loss_of(reference, inputs, targets, targets.numel()))
    mesh = MeshSpec(**setting.sizes).build(device_type=device.type)
    model = parallelize(model, mesh, **on_device(setting.options, device))
    inputs, targets, tokens = own_part(mesh, inputs, targets)
    total = torch.tensor(backward(loss_of(model, inputs, targets, tokens)), device=device)
    dist.all_reduce(total)
    mean = float(total) / (dist.get_world_size() // setting.sizes.get("cp", 1))
    return largest([abs(mean - expected) / abs(expected), gradient_difference(model, reference)])


def backward(loss: Tensor) -> float:
    """Run the backward of a loss, and return its value."""
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def on_device(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the options for a device: on a CPU the compiler traces blocks and generates no code."""
    if device.type == "cpu" and options.get("compile"):
        return {**options, "compile": Compile({"backend": "aot_eager"})}
    return options


def own_part(mesh: DeviceMesh, inputs: dict[str, Tensor], targets: Tensor) -> tuple[dict[str, Tensor], Tensor, int]:
    """Return this rank's rows and tokens of inputs and targets, and the tokens that its loss is divided by."""
    data, rows = submesh(mesh, "dp"), len(targets)
    rank, size = data.get_local_rank(), data.size()
    mine = slice(rank * rows // size, (rank + 1) * rows // size)
    layout = sequence_layout(mesh, length=targets.shape[1])
    inputs = {name: value[mine] for name, value in inputs.items()}
    tokens = targets.numel() // size
    if layout.ranks == 1:
        return inputs, targets[mine], tokens
    return layout.shard_batch(inputs), layout.shard(targets[mine]), tokens


def gradient_difference(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of two models' gradients, relative to each gradient's largest element."""
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    floor = SMALLEST * max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    differences = [0.0]
    for name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad, expected[name]
        if gradient is None or wanted is None:
            differences.append(0.0 if gradient is wanted else float("inf"))
            continue
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        differences.append(float((full - wanted).abs().max() / wanted.abs().max().clamp(min=floor)))
    return largest(differences)


def _lengths(targets: Tensor) -> list[list[int]]:
    """Return the lengths of the documents of each row, which differ from row to row."""
    return [[3 + row, 4, targets.shape[1] - 7 - row] for row in range(len(targets))]


def _documents_alone(model: nn.Module, tokens: Tensor, targets: Tensor) -> Iterator[float]:
    """Run each document as a row, forward and backward, and yield its share of the loss."""
    for row, lengths in enumerate(_lengths(targets)):
        parts = (torch.split(part[row : row + 1], lengths, 1) for part in (tokens, targets))
        for ids, document_targets in zip(*parts, strict=True):
            yield backward(loss_of(model, {"input_ids": ids}, document_targets, targets.numel()))


def settings(size: int, *, shared: bool = False) -> list[Setting]:
    """Return the settings for a number of ranks; ranks that share a device leave axes alone to a world of two."""
    if size == 1:
        one = {"dp_shard": 1}
        whole = [Setting(one, kind=kind) for kind in ("dense", "mixture", "images", "hybrid")]
        return [*whole, *(Setting(one, _PACKED, packed=kernel) for kernel in KERNELS)]
    alone = [
        Setting({"dp_shard": size}),
        Setting({"tp": size}),
        Setting({"tp": size}, _SP),
        *(Setting({"cp": size}, {"context_parallel": way}) for way in _WAYS),
        Setting({"dp_shard": size, "ep": size}, kind="mixture"),
        Setting({"tp": size}, kind="mixture"),
    ]
    return (alone if size == 2 or not shared else []) + (_features() if size == 2 else _products(size))


def _features() -> list[Setting]:
    """Return the settings of two ranks beside one axis alone."""
    cases = [
        *(Setting({"tp": 2}, {**options, "compile": True}) for options in ({}, _SP)),
        *(Setting({"tp": 2}, {**_SP, **options}) for options in _RECOMPUTED),
        *(Setting({"dp_shard": 2}, options) for options in _RECOMPUTED),
        *(Setting({axis: 2}, kind=kind) for axis in ("dp_shard", "tp") for kind in ("LoRA", "value head", "images")),
        Setting({"tp": 2}, _SP, "hybrid"),
        Setting({"cp": 2}, kind="hybrid"),
    ]
    packed = [Setting({"cp": 2}, {**_PACKED, "context_parallel": way}, packed="sdpa") for way in _WAYS]
    return packed + [replace(case, half=False) for case in cases]


def _products(size: int) -> list[Setting]:
    """Return products of axes for four or more ranks."""
    half = size // 2
    cases = [
        Setting({"dp_shard": half, "tp": 2}, _SP),
        Setting({"dp_replicate": 2, "dp_shard": half}),
        Setting({"cp": 2, "tp": half}),
        Setting({"dp_shard": half, "tp": 2, "ep": 2}, kind="mixture"),
        Setting({"dp_shard": half, "cp": 2}, _PACKED, packed="sdpa"),
    ]
    if half > 2:
        cases += [
            Setting({"dp_shard": 2, "cp": 2, "tp": half // 2}, {**_SP, **_RECOMPUTED[0]}),
            Setting({"dp_shard": half, "tp": 2, "ep": half}, _SP, "mixture"),
        ]
    return cases
