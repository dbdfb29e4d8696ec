"""One training step of a model on a mesh, run on fake tensors and recorded."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime import describe_parallelism, sequence_layout
from fsdp_runtime._torch_compat import local_tensor, viewed_tensor
from fsdp_runtime.dry_run.allocator.caching import AllocatorSettings
from fsdp_runtime.dry_run.allocator.constants import WORKSPACES
from fsdp_runtime.dry_run.build_model import vocabulary_size
from fsdp_runtime.dry_run.losses import clip_function, resolve_loss, rl_logprobs_on_accelerator
from fsdp_runtime.dry_run.parse_args import parse_allocator, parse_dtype
from fsdp_runtime.dry_run.scale.repeated_blocks import TracedModel
from fsdp_runtime.dry_run.scale.summary import Summary, add_up, summarize, wildcard
from fsdp_runtime.dry_run.trace.assumed_values import Routing
from fsdp_runtime.dry_run.trace.fake_world import fake_tensors_without_data, uncounted_copies
from fsdp_runtime.dry_run.trace.kernels import AttentionKernels
from fsdp_runtime.dry_run.trace.recorder import Recorder
from fsdp_runtime.errors import EstimateError, OptionError
from fsdp_runtime.keywords import Options
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.optim import LowBitAdamW
from fsdp_runtime.parallelism import Parallelism
from fsdp_runtime.steps import Pipeline

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]  # of parameter groups
#: Optimizers by name, and the bytes of state per byte of a parameter (of a float32 parameter for states in few bits);
#: ``adamw_single`` is the one without ``foreach``, with temporaries of one parameter.
OPTIMIZERS: dict[str, tuple[MakeOptimizer | None, float]] = {
    "adamw": (lambda groups: torch.optim.AdamW(groups, lr=1e-5, foreach=True), 2),
    "adamw_fused": (lambda groups: torch.optim.AdamW(groups, lr=1e-5, fused=True), 2),
    "adamw_single": (lambda groups: torch.optim.AdamW(groups, lr=1e-5, foreach=False), 2),
    "adamw_8bit": (lambda groups: LowBitAdamW(groups, lr=1e-5), 0.51),
    "adamw_bf16": (lambda groups: LowBitAdamW(groups, lr=1e-5, states="bf16"), 1),
    "sgd": (lambda groups: torch.optim.SGD(groups, lr=1e-5, momentum=0.9, foreach=True), 1),
    "adamw_cpu_offload": (lambda groups: torch.optim.AdamW(groups, lr=1e-5, fused=True), 2),
    "none": (None, 0),
}
#: Optimizers with their state on the host: the step takes no memory of the device.
ON_HOST = ("adamw_cpu_offload",)

#: Keywords of earlier versions of ``estimate``, which are fields of ``fsdp=``.
_MOVED = {"master_dtype", "offload", "reshard_after_forward"}


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The keywords of ``estimate``; ``options`` are the keywords of ``parallelize``."""

    seq_len: int
    exact: bool = False
    rank: int = 0
    device_memory: int | None = None  # bytes
    micro_batch: int = 1
    micro_batches: int = 1
    dtype: torch.dtype = torch.bfloat16
    frozen_dtype: torch.dtype | None = None
    optimizer: str = "adamw"
    logprobs: str | Callable[..., Any] = "logits"
    clip: bool = True
    assume_gradients: bool = False
    routing: Routing = "balanced"
    offload_activations: bool = False
    attention_kernels: AttentionKernels = "flash2"
    allocator: AllocatorSettings | None = field(default_factory=AllocatorSettings)
    constants: Collection[str] = ("context", "nccl", "cublas")
    options: Options

    @classmethod
    def parse(cls, keywords: Mapping[str, Any], *, device_memory: int | None, **parsed: Any) -> StepConfig:
        """Return the step of keywords of ``estimate``, some of them parsed."""
        if moved := _MOVED & keywords.keys():
            raise OptionError(f"{min(moved)} is an option of FSDP2: give it in fsdp=, as to parallelize")
        names = {each.name for each in fields(cls)} & keywords.keys()
        step = {name: keywords[name] for name in names}
        options: Any = {name: value for name, value in keywords.items() if name not in names}
        for name in {"dtype", "frozen_dtype"} & names:
            step[name] = None if name == "frozen_dtype" and step[name] is None else parse_dtype(step[name])
        if step.get("allocator") is not None:
            step["allocator"] = parse_allocator(step["allocator"], device_memory=device_memory)
        return cls(device_memory=device_memory, options=options, **parsed, **step)

    def __post_init__(self) -> None:
        """Raise :class:`EstimateError` for an unknown optimizer, a batch without tokens, or untraceable options."""
        for name in ("seq_len", "micro_batch", "micro_batches"):
            if (size := getattr(self, name)) < 1:
                raise EstimateError(f"{name}={size}: give a positive integer")
        pipeline = next((step for step in self.options.get("steps", ()) if isinstance(step, Pipeline)), None)
        if pipeline is not None and self.micro_batches != 1:
            raise EstimateError(
                f"micro_batches={self.micro_batches} beside Pipeline(microbatches={pipeline.microbatches}): give the "
                "second alone"
            )
        kinds = {"optimizer": OPTIMIZERS, "routing": get_args(Routing), "attention_kernels": get_args(AttentionKernels)}
        for name, allowed in kinds.items():
            if (kind := getattr(self, name)) not in allowed:
                raise EstimateError(f"{name}={kind!r}: write one of {', '.join(allowed)}")
        if self.frozen_dtype not in (None, self.dtype) and self.options.get("fsdp") is None:
            raise EstimateError(
                f"frozen_dtype={self.frozen_dtype} without a dtype to gather in: give fsdp= with mp_policy="
                f"MixedPrecisionPolicy({self.dtype}), or --master-dtype"
            )

    @property
    def compiled(self) -> bool:
        """Whether the run compiles its blocks; the trace runs them eagerly and leaves out fused results."""
        return self.options.get("compile", False) is not False


def trace_step(
    traced: TracedModel, parallelism: Parallelism, step: StepConfig, without_grad: frozenset[str]
) -> Summary:
    """Parallelize a model on the meta device, run the step on fake tensors, and summarize it."""
    with prepared(traced, parallelism, step, without_grad) as run:
        if step.micro_batches > 1:
            accumulated = (p for name, p in run.model.named_parameters() if wildcard(name) not in without_grad)
            run.recorder.register(_with_zero_gradients(accumulated), "gradients")  # of earlier micro-batches
        forward = resolve_loss(step.logprobs, traced.structure.lm_head)
        with run.recorder.phase("forward"), run.hooks():
            loss = forward(run.model, run.inputs, lambda: run.recorder.begin("loss"))
        with run.recorder.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            untrained = run.untrained()
        run.update()
        summary = summarize(run.recorder.recording, traced.structure.decoder, run.widths)
    return replace(summary, replicated=run.replicated, untrained=untrained, on_host=run.on_host.held.peak)


@dataclass
class Prepared:
    """A parallelized model on fake tensors, ready for a recorded step."""

    model: nn.Module
    step: StepConfig
    inputs: dict[str, Tensor]
    recorder: Recorder
    optimizer: _LocalOptimizer | None
    replicated: Mapping[str, tuple[int, ...]]
    widths: set[int]  # of logits
    on_host: Any

    def hooks(self) -> Any:
        """Return the context of a forward."""
        return saved_tensors_hooks(_to_host, _from_host) if self.step.offload_activations else nullcontext()

    def untrained(self) -> dict[str, tuple[int, ...]]:
        """Return number and local bytes of trainable parameters without gradients, by name pattern."""
        # A vision tower is such a part: the step has no images. It gets gradients where the step assumes so.
        trainable = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        trained = {wildcard(name) for name, parameter in trainable.items() if parameter.grad is not None}
        untrained = _sizes({name: parameter for name, parameter in trainable.items() if wildcard(name) not in trained})
        if self.step.assume_gradients:
            _with_zero_gradients(p for p in self.model.parameters() if p.grad is None)
        return untrained

    def update(self) -> None:
        """Clip the gradients, and take the optimizer's step."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.recorder.relabel(gradients, "gradients")
        del gradients
        if self.step.clip and (clip := clip_function()) is not None:
            with self.recorder.phase("clip"):
                clip(self.model.parameters(), 1.0)
        if self.optimizer is not None and self.step.optimizer not in ON_HOST:
            with self.recorder.phase("optimizer"):
                self.optimizer.step()


@contextmanager
def prepared(
    traced: TracedModel, parallelism: Parallelism, step: StepConfig, without_grad: frozenset[str]
) -> Iterator[Prepared]:
    """Parallelize a model on the meta device, and allocate it with its optimizer on fake tensors."""
    # The structure of ``parallelism``, resolved for the full model, is replaced by the traced model's. Parameters that
    # match ``without_grad`` are known to get no gradient, and so no optimizer state.
    model, structure = traced.model, traced.structure
    mesh = cast("DeviceMesh", parallelism.setup.meshes.root)  # of a mesh with all axes
    vocabulary = vocabulary_size(model, structure.embedding)
    parallelism.on(model, structure).apply(model)
    names = set(describe_parallelism(model).replicated)
    replicated = _sizes({name: parameter for name, parameter in model.named_parameters() if name in names})
    fakes, host = fake_tensors_without_data(), uncounted_copies()
    with fakes, rl_logprobs_on_accelerator() as tile_multiplicity, host as on_host:
        _allocate(model)
        inputs = _inputs(model, mesh, step)
        make, _ = OPTIMIZERS[step.optimizer]
        optimizer = None if make is None else _LocalOptimizer(make, model, without_grad, step.optimizer in ON_HOST)
        compiled = structure.decoder if step.compiled else ()
        recorder = Recorder(model, tile_multiplicity, compiled=compiled, attention=step.attention_kernels)
        recorder.register(model.parameters(), "parameters")
        recorder.register(model.buffers(), "buffers")
        recorder.register(inputs.values(), "inputs")
        workspaces = [torch.empty(size, dtype=torch.uint8) for size in WORKSPACES if "cublas" in step.constants]
        recorder.register(workspaces, "workspaces")
        if optimizer is not None:
            recorder.register(optimizer.state_tensors(), "optimizer_state")
        widths = {vocabulary, -(-vocabulary // axis_size(mesh, "tp"))}
        yield Prepared(model, step, inputs, recorder, optimizer, replicated, widths, on_host)


def _allocate(model: nn.Module) -> None:
    """Give every tensor of the model storage, one for all names of a tied parameter."""
    # ``Module.to_empty`` gives each name of a tied parameter a separate parameter.
    aliases = [(module, *named) for module in model.modules() for named in module.named_parameters(recurse=False)]
    model.to_empty(device="cpu")
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in aliases:
        setattr(module, name, allocated.setdefault(parameter, module.get_parameter(name)))


def _with_zero_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Give trainable parameters gradients, and return these."""
    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return gradients


def _sizes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return add_up((wildcard(name), (1, local_tensor(each).nbytes)) for name, each in parameters.items())


def _inputs(model: nn.Module, mesh: DeviceMesh, step: StepConfig) -> dict[str, Tensor]:
    """Return this rank's token ids, and the token types that multimodal models require."""
    shape = (step.micro_batch, step.seq_len)
    inputs: dict[str, Any] = {"input_ids": torch.zeros(shape, dtype=torch.int64)}
    accepted = inspect.signature(model.forward).parameters
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in accepted and hasattr(getattr(model, "config", None), "vision_config"):
            inputs[name] = torch.zeros(shape, dtype=torch.int64)
    if axis_size(mesh, "cp") > 1:
        inputs = sequence_layout(mesh, length=step.seq_len).shard_batch(inputs)
        del inputs["position_ids"]  # the model fills them in; given positions would be searched for packed documents
    return inputs


class _LocalOptimizer:
    """An optimizer on this rank's shards, with its state from the second step on."""

    # It allocates the same as on DTensors: their operators work on the shards one by one. The
    # search for a sharding of every list of DTensors, a third of the time of a trace, is left out.

    def __init__(self, make: MakeOptimizer, model: nn.Module, without_grad: frozenset[str], has_masters: bool) -> None:
        self._shards: dict[nn.Parameter, nn.Parameter] = {}
        self._masters: list[Tensor] = []
        groups: dict[Any, list[nn.Parameter]] = defaultdict(list)  # a foreach call takes tensors of one mesh
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                local = local_tensor(parameter).detach()
                is_low = has_masters and local.dtype in (torch.bfloat16, torch.float16)
                shard = self._shards[parameter] = nn.Parameter(local.float() if is_low else local)
                self._masters += [shard] if is_low else []
                groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(shard)
                shard.grad = None if wildcard(name) in without_grad else torch.zeros_like(shard)
        self._optimizer = make([{"params": shards} for shards in groups.values()])
        self._optimizer.step()  # makes the state
        self._optimizer.zero_grad()

    def step(self) -> None:
        for parameter, shard in self._shards.items():
            shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        self._optimizer.step()

    def state_tensors(self) -> list[Tensor]:
        states = self._optimizer.state.values()
        return [*self._masters, *(v for state in states for v in state.values() if isinstance(v, Tensor))]


#: Smaller tensors stay on the device (torchtune's and TRL's ``OffloadActivations``).
_MIN_BYTES = 1024


def _to_host(tensor: Tensor) -> Any:
    """Let forward save no activations on the device: backward allocates them again when needed."""
    # Inside of recomputed blocks these are the blocks' inputs. Parameters and views of them stay.
    kept = isinstance(tensor, nn.Parameter) or isinstance(viewed_tensor(tensor), nn.Parameter)
    if kept or not tensor.is_floating_point() or tensor.nbytes < _MIN_BYTES:
        return tensor
    return tensor.shape, tensor.stride(), tensor.dtype


def _from_host(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    shape, stride, dtype = saved
    return torch.empty_strided(shape, stride, dtype=dtype)
