"""What a dry run tells: data for programs, in bytes and counts of one rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Phase = Literal["forward", "loss", "backward", "clip", "optimizer"]

#: The parts of a training step in their order; a step that does not clip, or has no optimizer, lacks those.
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "clip", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of live tensors by what they are for; every byte is counted once.

    Args:
        parameters: this rank's shards (with ``offload`` on the host, and then not counted here).
        gathered: parameters that FSDP2 gathered for the units in use.
        gradients: what stays in ``.grad`` after backward: this rank's shards.
        optimizer_state: moments, steps; what the optimizer keeps between steps.
        activations: what forward keeps for backward, apart from logits.
        logits: tensors outside the blocks whose last dim is the vocabulary: the model's output, copies and gradients.
        buffers: the model's buffers.
        inputs: token ids, and what the step is given beside them.
        temporaries: everything else: intermediate results, gradients before they are reduced, recomputed
            activations, flat buffers of communication.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    inputs: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Category name to bytes, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a phase at which most bytes were alive.

    Args:
        phase: the part of the step.
        module: the path of the innermost module that ran (in backward: whose operators' gradients did); of a scaled
            estimate, with the index that the block has in the whole model; ``""`` outside the model.
        operator: the operator that made the peak, as ``"aten.mm.default"``.
        nbytes: bytes alive, by category.
    """

    phase: Phase
    module: str
    operator: str
    nbytes: Bytes

    @property
    def total(self) -> int:
        """Bytes alive at that moment."""
        return self.nbytes.total


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one rank over a step, in bytes of tensors.

    These are sizes of storages: what an allocator rounds up or leaves in fragments, workspaces of libraries, buffers of
    NCCL and the CUDA context come on top (some GiB on a GPU).

    Args:
        held: what is alive between steps: parameters, optimizer state, buffers.
        after_forward: alive once the model has run: what backward needs.
        after_backward: alive before the optimizer: the gradients.
        phases: the highest moment of each phase, in the order of the step.
        host: bytes on the host instead of the device (``offload=True``): parameters, gradients, optimizer state.
    """

    held: Bytes
    after_forward: Bytes
    after_backward: Bytes
    phases: tuple[Peak, ...]
    host: Bytes = Bytes()

    @property
    def peak(self) -> Peak:
        """The highest moment of the step."""
        return max(self.phases, key=lambda peak: peak.total)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind, over one axis, in one phase of one step.

    Args:
        axis: the mesh axis: one of its own, a flattened one (``"dp_shard_cp"``), or ``"ranks 0,1,…"`` for others.
        ranks: how many ranks take part.
        phase: the part of the step.
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``, ``"broadcast"``, …
        count: calls.
        nbytes: bytes that this rank puts in, over all calls.
        moved: bytes that must leave this rank at least, by the ring algorithm: all-gather ``(n-1) x nbytes``,
            reduce-scatter and all-to-all ``(n-1)/n x nbytes``, all-reduce twice that, others ``nbytes``.
        seconds: ``moved`` at the bandwidth given for the axis; ``None`` without one.  A floor: no latency, nothing
            overlapped, nothing that others send over the same links.
    """

    axis: str
    ranks: int
    phase: Phase
    kind: str
    count: int
    nbytes: int
    moved: int
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Parameters that every rank holds whole, blocks as ``*``.

    Args:
        pattern: their names, as ``"model.layers.*.input_layernorm.weight"``.
        count: how many parameters.
        nbytes: bytes of all of them on this rank.
    """

    pattern: str
    count: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """An operator whose result depends on data, which a dry run does not have, and what was taken instead.

    Args:
        operator: as ``"aten.nonzero.default"``.
        module: the path of the module that called it; blocks as ``*``.
        assumption: in words, what was taken for its result; or that the module was left out of the estimate.
        counted: whether the module's work is in the numbers; ``False`` where it had to be left out.
    """

    operator: str
    module: str
    assumption: str
    counted: bool = True


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change that would lower the peak.

    Args:
        change: what to do, in words, with the option's name.
        saves: bytes that it takes off the peak at most, where that can be told; else ``None``.
    """

    change: str
    saves: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was estimated.

    Args:
        model: the model's class.
        parameters: elements of all its parameters, tied ones once.
        mesh: axis to size, in the mesh's order, axes of size 1 too.
        world_size: ranks.
        rank: whose numbers these are.
        seq_len: tokens of a sequence, before it is cut over ``cp`` or ``tp``.
        micro_batch: sequences a data-parallel rank takes in a step.
        plan: the plan asked for: ``"auto"``, ``"none"``, ``"custom"`` or a dotted path.
        sequence_parallel: whether the residual stream is cut over ``tp``.
        activation_checkpointing: the mode asked for.
        dtype: of computation, as ``"bf16"``.
        master_dtype: of parameters, gradients and optimizer state where it is another.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"none"``.
        logprobs: the loss.
        offload: whether shards and optimizer state stay on the host.
        blocks: how many repeated blocks the model has.
        traced: how many of them each trace ran: one number for an exact trace, two where the rest was scaled.
        scaling: in words, what was traced and how the rest follows.
    """

    model: str
    parameters: int
    mesh: Mapping[str, int]
    world_size: int
    rank: int
    seq_len: int
    micro_batch: int
    plan: str
    sequence_parallel: bool
    activation_checkpointing: str
    dtype: str
    master_dtype: str | None
    optimizer: str
    logprobs: str
    offload: bool
    blocks: int
    traced: tuple[int, ...]
    scaling: str

    @property
    def exact(self) -> bool:
        """Whether every block was traced."""
        return self.traced == (self.blocks,)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a training step does on one rank of a mesh, without a device.

    Args:
        settings: what was estimated, and how.
        memory: bytes alive.
        traffic: collectives of a step, by axis, phase and kind.
        flops: floating-point operations of this rank in a step, recomputation included (a multiply-add is two).
        whole: parameters that every rank holds whole, largest first.
        findings: what the plan checker said of the plan that was applied.
        assumed: operators whose results depend on data.
        device_memory: bytes of a device, if they were given.
        advice: what lowers the peak, what saves most first.
        seconds: how long the dry run took.
    """

    settings: Settings
    memory: Memory
    traffic: tuple[Traffic, ...]
    flops: int
    whole: tuple[Whole, ...] = ()
    findings: tuple[str, ...] = ()
    assumed: tuple[Assumed, ...] = ()
    device_memory: int | None = None
    advice: tuple[Advice, ...] = ()
    seconds: float = 0.0

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within ``device_memory``; ``None`` where that was not given."""
        return None if self.device_memory is None else self.memory.peak.total <= self.device_memory

    @property
    def communication_seconds(self) -> float | None:
        """The time floor of all traffic that bandwidths were given for; ``None`` without any."""
        known = [item.seconds for item in self.traffic if item.seconds is not None]
        return sum(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, with the totals that are computed."""
        found = asdict(self)
        found["memory"]["peak"] = asdict(self.memory.peak)
        for peak in (*found["memory"]["phases"], found["memory"]["peak"]):
            peak["total"] = sum(peak["nbytes"].values())
        found["settings"]["exact"] = self.settings.exact
        return {"format": 1, **found, "fits": self.fits, "communication_seconds": self.communication_seconds}

    def to_json(self, *, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)
