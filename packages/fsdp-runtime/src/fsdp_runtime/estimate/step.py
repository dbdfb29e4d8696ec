"""One training step of a model on a mesh, recorded."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime.debug.describe import describe_parallelism
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.estimate.build_model import vocabulary_of
from fsdp_runtime.estimate.losses import accelerator_workspaces, clipping, loss_named
from fsdp_runtime.estimate.scale.summary import Summary, starred, summarize
from fsdp_runtime.estimate.trace.fake_world import without_data
from fsdp_runtime.estimate.trace.module_tracker import Places
from fsdp_runtime.estimate.trace.recorder import Recorder
from fsdp_runtime.mesh.spec import axis_size
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.parallel.context.sharding import sequence_layout
from fsdp_runtime.parallel.fsdp_options import FSDPOptions
from fsdp_runtime.parallelize import parallelize


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step is made of; the arguments of ``estimate`` that are about the step, as torch's objects."""

    seq_len: int
    micro_batch: int
    dtype: torch.dtype
    master_dtype: torch.dtype | None
    optimizer: str
    logprobs: str | Callable[..., Any]
    clip: bool
    offload: bool
    parallelize: Mapping[str, Any]


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer] | None] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-5, foreach=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-5, momentum=0.9, foreach=True),
    "none": None,
}


def trace(model: nn.Module, mesh: DeviceMesh, step: Step, idle: frozenset[str] = frozenset()) -> Summary:
    """Parallelize a model on the meta device, run the step without data, and sum up what it did.

    Args:
        model: on the meta device.
        mesh: of the fake world.
        step: what to run.
        idle: patterns of trainable parameters that are known to get no gradient, and so no optimizer state.
    """
    anatomy = inspect_model(model)
    vocabulary = vocabulary_of(model, anatomy.embedding)
    parallelize(model, mesh, fsdp=fsdp_options(step), **step.parallelize)
    whole = _whole(model)
    with without_data(), accelerator_workspaces():
        model.to_empty(device="cpu")
        inputs = _inputs(model, mesh, step, vocabulary)
        optimizer = _optimizer(model, step, idle)
        recorder = Recorder(Places(model))
        recorder.adopt(model.parameters(), "parameters")
        recorder.adopt(model.buffers(), "buffers")
        recorder.adopt(inputs.values(), "inputs")
        if optimizer is not None:
            recorder.adopt(_state(optimizer), "optimizer_state")
        forward = loss_named(step.logprobs, anatomy.head)
        with recorder.phase("forward"):
            finish = forward(model, inputs)
        with recorder.phase("loss"):
            loss = finish()
        del finish
        with recorder.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        found_idle = _without_gradient(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        recorder.relabel(gradients, "gradients")
        del gradients
        if step.clip and (clip := clipping()) is not None:
            with recorder.phase("clip"):
                clip(model.parameters(), 1.0)
        if optimizer is not None:
            with recorder.phase("optimizer"):
                optimizer.step()
        recording = recorder.recording
        widths = {vocabulary, -(-vocabulary // axis_size(mesh, "tp"))}
        summary = summarize(recording, anatomy.decoder, widths)
    return replace(summary, whole=whole, idle=found_idle)


def _without_gradient(model: nn.Module) -> frozenset[str]:
    """By pattern of names, the trainable parameters of which none has a gradient, such as those of an unused tower."""
    reached = {
        name: parameter.grad is not None for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    return frozenset(map(starred, reached)) - {starred(name) for name, has in reached.items() if has}


def fsdp_options(step: Step) -> FSDPOptions:
    """FSDP2's dtypes and offload."""
    offload_policy = CPUOffloadPolicy() if step.offload else None
    if step.master_dtype is None:
        return FSDPOptions(offload_policy=offload_policy)
    return FSDPOptions(
        mp_policy=MixedPrecisionPolicy(param_dtype=step.dtype, reduce_dtype=step.master_dtype),
        master_dtype=step.master_dtype,
        offload_policy=offload_policy,
    )


def _whole(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By pattern of names, the parameters that every rank holds whole, and their bytes."""
    parameters = dict(model.named_parameters())
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for name in describe_parallelism(model).replicated:
        if name in parameters:  # aliases of tied ones are listed too
            count[starred(name)] += 1
            nbytes[starred(name)] += parameters[name].numel() * parameters[name].element_size()
    return {pattern: (count[pattern], nbytes[pattern]) for pattern in count}


def _inputs(model: nn.Module, mesh: DeviceMesh, step: Step, vocabulary: int) -> dict[str, Tensor]:
    """What the model is called with: this rank's token ids and what its ``forward`` asks for beside them."""
    shape = (step.micro_batch, step.seq_len)
    inputs: dict[str, Any] = {"input_ids": torch.zeros(shape, dtype=torch.int64)}
    accepted = inspect.signature(model.forward).parameters
    for name in ("token_type_ids", "mm_token_type_ids"):  # models with images tell the kinds of tokens apart
        if name in accepted and hasattr(getattr(model, "config", None), "vision_config"):
            inputs[name] = torch.zeros(shape, dtype=torch.int64)
    if axis_size(mesh, "cp") > 1:
        inputs = sequence_layout(mesh, length=step.seq_len).shard_batch(inputs)
    return inputs


def _optimizer(model: nn.Module, step: Step, idle: frozenset[str]) -> torch.optim.Optimizer | None:
    """The optimizer with its state made, as it is from the second step on; parameters without a gradient have none."""
    if step.optimizer not in OPTIMIZERS:
        raise EstimateError(f"optimizer {step.optimizer!r}: write one of {', '.join(OPTIMIZERS)}")
    make = OPTIMIZERS[step.optimizer]
    if make is None:
        return None
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)  # one call takes tensors of one mesh
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    optimizer = make([{"params": parameters} for parameters in groups.values()])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and starred(name) not in idle:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
