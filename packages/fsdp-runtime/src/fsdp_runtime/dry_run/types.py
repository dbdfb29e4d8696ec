"""Results of a dry run: data for programs, in bytes and counts of one rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

Phase = Literal["forward", "loss", "backward", "clip", "optimizer"]

#: The phases of a training step in order; a step without clipping or optimizer lacks their phases.
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "clip", "optimizer")

#: Version of the dicts that ``to_dict`` returns.
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes of live tensors by category; every byte is counted once."""

    parameters: int = 0  # this rank's shards (with ``offload`` on the host, and then not counted here)
    gathered: int = 0  # parameters that FSDP2 gathered for the modules in use
    gradients: int = 0  # gradients in ``.grad`` after backward: this rank's shards
    optimizer_state: int = 0  # tensors that the optimizer keeps between steps
    activations: int = 0  # tensors that forward keeps for backward, without logits
    # tensors outside the blocks with the vocabulary as last dim: the model's output, copies and gradients
    logits: int = 0
    buffers: int = 0  # the model's buffers
    inputs: int = 0  # token ids and other inputs of the step
    # all others: intermediate results, gradients before they are reduced, recomputed activations, flat communication
    # buffers
    temporaries: int = 0
    workspaces: int = 0  # cuBLAS's memory for its handles in forward and in backward, from the first step on

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Return category name to bytes, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def plus(one: MemoryBreakdown, other: MemoryBreakdown, times: int = 1) -> MemoryBreakdown:
    """Add a number of times the bytes of another breakdown; differences have negative bytes."""
    return MemoryBreakdown(**{name: n + times * getattr(other, name) for name, n in one.by_category().items()})


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The point of a phase with the most live bytes."""

    phase: Phase  # the phase of the step
    # path of the innermost running module (in backward: the module of the operators that get gradients); in a scaled
    # estimate with the block's index in the full model; ``""`` outside the model
    module: str
    operator: str  # the operator that allocated last, such as ``"aten.mm.default"``
    nbytes: MemoryBreakdown  # live bytes by category

    @property
    def total(self) -> int:
        """Live bytes of all categories."""
        return self.nbytes.total


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one rank over a step, in bytes of tensors.

    The numbers are sizes of storages; the CUDA caching allocator holds ``reserved`` for them, and ``constants``
    come on top of that.
    """

    resident: MemoryBreakdown  # live between steps: parameters, optimizer state, buffers
    after_forward: MemoryBreakdown  # live after the model has run: tensors needed by backward included
    after_backward: MemoryBreakdown  # live before the optimizer: gradients included
    phases: tuple[Peak, ...]  # the peak of each phase, in the order of the step
    # bytes on the host instead of the device: parameters, gradients, optimizer state (``CPUOffloadPolicy``,
    # ``CPUOffloadAdamW``), activations (``ActivationCheckpointing(offload=True)``)
    host: MemoryBreakdown = MemoryBreakdown()
    # bytes of the allocator's segments in the third step, with its fragmentation; ``None`` if it was not modelled
    reserved: int | None = None
    # bytes that a process on a GPU takes outside of the allocator, by name; rough
    constants: Mapping[str, int] = field(default_factory=dict)

    @property
    def fragmentation(self) -> int | None:
        """Reserved bytes beyond the peak of live tensors; ``None`` without a model of the allocator."""
        return None if self.reserved is None else self.reserved - self.peak.total

    @property
    def device(self) -> int:
        """Bytes of the device that the process takes: reserved bytes (or live bytes) and constants."""
        return (self.peak.total if self.reserved is None else self.reserved) + sum(self.constants.values())

    @property
    def peak(self) -> Peak:
        """The peak of the step."""
        return max(self.phases, key=lambda peak: peak.total)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind, over one axis, in one phase of one step."""

    # the mesh axis: an axis of the mesh, a flattened axis (``"dp_shard_cp"``), ``"efsdp"``, ``"ep"``, or
    # ``"ranks 0,1,…"``; the first axis if several have the same ranks
    axis: str
    ranks: int  # number of ranks that take part
    phase: Phase  # the phase of the step
    kind: str  # ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``, ``"broadcast"``, …
    count: int  # number of calls
    nbytes: int  # bytes of this rank's inputs, over all calls
    # bytes that this rank sends at least, by the ring algorithm: all-gather ``(n-1) x nbytes``, reduce-scatter and
    # all-to-all ``(n-1)/n x nbytes``, all-reduce twice that, others ``nbytes``; an all-to-all of uneven parts counts
    # all bytes for other ranks
    bytes_sent: int
    # ``bytes_sent`` at the bandwidth given for the axis; ``None`` without one.  A bandwidth-only lower bound per
    # collective: no latency or link contention; overlap is not modelled
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicatedParameters:
    """Parameters that are replicated over all axes, grouped over blocks."""

    pattern: str  # their names with block indices as ``*``, such as ``"model.layers.*.input_layernorm.weight"``
    count: int  # number of parameters
    nbytes: int  # bytes of all of them on this rank


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """Information that a dry run lacks, and its assumption instead."""

    # an operator with a data-dependent result, such as ``"aten.nonzero.default"``; ``""`` for other assumptions
    operator: str
    module: str  # path of the module that called the operator, or of the assumption; block indices as ``*``
    assumption: str  # the assumed result and its effect in words, or that the module was left out of the estimate
    counted: bool = True  # whether the module's work is in the numbers; ``False`` if it had to be left out


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change that would lower the peak."""

    change: str  # the change in words, with the option's name
    saves: int | None = None  # upper bound of the bytes saved at the peak, ``None`` if it is unknown


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, mesh and step that were estimated."""

    model: str  # the model's class
    parameters: int  # elements of all its parameters, tied parameters once
    # axis to size, in the mesh's order, axes of size 1 included; last ``ep``, which divides the same ranks again
    mesh: Mapping[str, int]
    world_size: int  # number of ranks
    rank: int  # the rank that the numbers belong to
    seq_len: int  # tokens per sequence, before sharding over ``cp`` or ``tp``
    micro_batch: int  # sequences per data-parallel rank and step
    plan: str  # the requested plan: ``"auto"``, ``"none"``, ``"custom"`` or a dotted path
    sequence_parallel: bool  # whether activations between blocks are sharded over ``tp``
    activation_checkpointing: str  # the requested mode
    dtype: str  # dtype of computation, such as ``"bf16"``
    master_dtype: str | None  # dtype of parameters, gradients and optimizer state, if it differs
    optimizer: str  # the optimizer
    logprobs: str  # the loss
    offload: bool  # whether shards and optimizer state stay on the host
    blocks: int  # number of repeated blocks of the model
    traced: tuple[int, ...]  # numbers of blocks that each trace ran: one for an exact trace, two if the rest was scaled
    scaling: str  # the traced blocks and the scaling of the other blocks, in words
    routing: str = "balanced"  # the assumed routes on a mesh with ``ep``
    context_parallel: str = "allgather"  # how attention spans the ranks of ``cp``
    micro_batches: int = 1  # forward and backward passes of a step
    compiled: bool = False  # whether blocks are compiled
    offload_activations: bool = False  # whether activations that forward keeps move to the host
    attention_kernels: str = "flash2"  # the kernels with counted workspaces
    frozen: int = 0  # bytes per rank of the frozen matrices in blocks, beside adapters that train
    quantized: bool = False  # whether ``Quantized`` packs the frozen base

    @property
    def exact(self) -> bool:
        """Whether every block was traced."""
        return self.traced == (self.blocks,)


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """One rank of ``pp`` over a step of its schedule."""

    rank: int  # its place on ``pp``
    blocks: tuple[tuple[int, int], ...]  # the first and the last block of each of its stages
    resident: MemoryBreakdown  # bytes between steps: parameters, optimizer state, buffers
    peak: MemoryBreakdown  # live bytes at its peak
    in_flight: int  # the most micro-batches, over its stages, that wait for their backward at one time
    flops: int  # its floating-point operations in a step
    # the part of the time of the step in which it waits for other stages, with times in proportion to operations and
    # sends without time
    idle: float
    bytes_sent: Mapping[int, int]  # bytes sent in a step to other ranks of ``pp``


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory, traffic and work of a training step on one rank of a mesh."""

    settings: Settings  # the model, mesh and step that were estimated
    memory: Memory  # live bytes
    traffic: tuple[Traffic, ...]  # collectives of a step, by axis, phase and kind
    flops: int  # floating-point operations of this rank in a step, recomputation included (a multiply-add is two)
    replicated: tuple[ReplicatedParameters, ...] = ()  # parameters that are replicated over all axes, largest first
    findings: tuple[str, ...] = ()  # findings of the plan check
    assumptions: tuple[Assumption, ...] = ()  # operators with data-dependent results
    device_memory: int | None = None  # bytes of a device, if given
    advice: tuple[Advice, ...] = ()  # changes that lower the peak, largest savings first
    seconds: float = 0.0  # duration of the dry run
    # the operations of matrix products, grouped and float8 ones, and attention with its masked half
    flops_by_kind: Mapping[str, int] = field(default_factory=dict)
    bytes_moved: int = 0  # bytes that the other operators of forward and backward read and write, none of them fused
    # the ranks of ``pp``; the numbers above belong to the one with the highest peak
    pipeline: tuple[PipelineRank, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the memory of the process is within ``device_memory``; ``None`` without it."""
        return None if self.device_memory is None else self.memory.device <= self.device_memory

    @property
    def bubble(self) -> float:
        """The part of the time of a step in which a rank of ``pp`` waits, on average."""
        return sum(rank.idle for rank in self.pipeline) / max(len(self.pipeline), 1)

    @property
    def communication_seconds(self) -> float | None:
        """Lower bound of the time of all traffic with a known bandwidth; ``None`` without any."""
        return _seconds(self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings, with the computed totals."""
        result, memory = asdict(self), self.memory
        result["memory"]["peak"] = asdict(memory.peak)
        for peak in (*result["memory"]["phases"], result["memory"]["peak"]):
            peak["total"] = sum(peak["nbytes"].values())
        result["memory"] |= {"fragmentation": memory.fragmentation, "device": memory.device}
        result["settings"]["exact"] = self.settings.exact
        totals = {"fits": self.fits, "communication_seconds": self.communication_seconds}
        return {"format": FORMAT, **result, **totals}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


def totals_by_axis(traffic: Iterable[Traffic]) -> list[Traffic]:
    """Return the traffic of all phases by axis and kind, in the order and under the phase of its first occurrence."""
    grouped: dict[str, dict[str, list[Traffic]]] = {}
    for item in traffic:
        grouped.setdefault(item.axis, {}).setdefault(item.kind, []).append(item)
    return [
        replace(
            items[0],
            count=sum(item.count for item in items),
            nbytes=sum(item.nbytes for item in items),
            bytes_sent=total_bytes_sent(items),
            seconds=_seconds(items),
        )
        for kinds in grouped.values()
        for items in kinds.values()
    ]


def total_bytes_sent(traffic: Iterable[Traffic]) -> int:
    """Return the bytes that a rank sends in a step, over all axes."""
    return sum(item.bytes_sent for item in traffic)


def bytes_sent_by_axis(traffic: Iterable[Traffic]) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by axis."""
    sent: dict[str, int] = {}
    for item in traffic:
        sent[item.axis] = sent.get(item.axis, 0) + item.bytes_sent
    return sent


def axes_without_bandwidth(traffic: Iterable[Traffic]) -> tuple[str, ...]:
    """Return the axes without a bandwidth that carry more than 0.1 % of the bytes (norms carry a few bytes)."""
    items = list(traffic)
    unknown = bytes_sent_by_axis(item for item in items if item.seconds is None)
    return tuple(axis for axis, sent in unknown.items() if sent > total_bytes_sent(items) / 1000)


def _seconds(traffic: Iterable[Traffic]) -> float | None:
    known = [item.seconds for item in traffic if item.seconds is not None]
    return sum(known) if known else None
