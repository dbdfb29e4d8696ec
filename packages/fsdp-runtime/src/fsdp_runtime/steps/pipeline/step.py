"""The step of pipeline parallelism: its options, its checks, and the division of a model into stages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._peft_compat import base_model, without_adapters
from fsdp_runtime.errors import FsdpRuntimeError, ModelError, OptionError
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.pipeline.balance import balanced
from fsdp_runtime.steps.pipeline.copies import SHAPES, absent_tensors, require_equal, rows, small_copy
from fsdp_runtime.steps.pipeline.parts import StagedModel, StagePart, add_parts, outer_modules
from fsdp_runtime.steps.pipeline.runs import RECORDED
from fsdp_runtime.steps.pipeline.split import ranges_of
from fsdp_runtime.steps.pipeline.state import recorded_state
from fsdp_runtime.steps.pipeline.trace import Record, crossing, places, record
from fsdp_runtime.steps.pipeline.values import Value
from fsdp_runtime.values import require_one_of

logger = logging.getLogger(__name__)

#: torch's names, in any case.
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
#: Schedules with several stages per rank; in a V, rank 0 has the first and the last stage.
INTERLEAVED = ("interleaved1f1b", "interleavedzerobubble")
V_SHAPED = ("zbvzerobubble", "dualpipev")
#: Schedules with separate backwards of inputs and weights.
SPLIT_BACKWARD = ("interleavedzerobubble", *V_SHAPED)


@dataclass(frozen=True)
class Pipeline(Step[StagedModel | None]):
    """Divide the blocks of a model over the ranks of ``pp``; the schedules are torch's.

    A rank keeps its blocks; the first stage has the embedding, and the last stage the final norm and the head.  The
    forward of the model's own class runs on every stage, and absent blocks pass on the tensors that the stage
    received.  A small copy of the model is run before anything changes: it shows which tensors cross stages, and its
    stages must give the logits and gradients of the whole copy.

    Train with ``forward_backward`` and score with ``forward_only`` of ``fsdp_runtime.steps.pipeline.schedule``.

    Args:
        schedule: ``"1F1B"``, ``"GPipe"``, ``"Interleaved1F1B"``, ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"`` or
            ``"DualPipeV"`` of ``torch.distributed.pipelining``, in any case.
        microbatches: the number of micro-batches of each call.
        layers: the number of blocks of each stage, first stage first; by default the operations of a token, the
            head's included, are divided equally; of such divisions the largest stage has the fewest bytes.
        stages_per_rank: the number of stages of each rank in an interleaved schedule; 2 in a V, else 1.

    Raises:
        OptionError: a value is not allowed.

    Source: D. Narayanan et al., arXiv:2104.04473 (1F1B, interleaved); P. Qi et al., arXiv:2401.10241 (zero bubble).

    Example:
        >>> from fsdp_runtime.steps import Pipeline
        >>> Pipeline("1F1B", microbatches=8).stage_ranks(2)  # of pp, by stage
        (0, 1)
        >>> Pipeline("Interleaved1F1B", microbatches=8).stage_ranks(2)
        (0, 1, 0, 1)
    """

    schedule: str = "1F1B"
    microbatches: int = 4
    layers: Sequence[int] | None = None
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        if str(self.schedule).lower() not in [name.lower() for name in SCHEDULES]:
            require_one_of("schedule", self.schedule, SCHEDULES)
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise OptionError(f"microbatches={self.microbatches!r}: give a positive integer")
        legal = {2} if self.kind in V_SHAPED else {1} if self.kind not in INTERLEAVED else range(1, 1000)
        if self.stages_per_rank is not None and self.stages_per_rank not in legal:
            numbers = "1 or more" if self.kind in INTERLEAVED else min(legal)
            raise OptionError(
                f"stages_per_rank={self.stages_per_rank!r}: the schedule {self.schedule!r} takes {numbers}"
            )
        if self.layers is not None and any(type(layers) is not int or layers < 1 for layers in self.layers):
            raise OptionError(f"layers={self.layers!r}: give a positive number of blocks for each stage")

    @property
    def kind(self) -> str:
        """The schedule in lower case."""
        return self.schedule.lower()

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed after the gradients of inputs."""
        return self.kind in SPLIT_BACKWARD

    @property
    def per_rank(self) -> int:
        """The number of stages of each rank."""
        return self.stages_per_rank or (2 if self.kind in (*INTERLEAVED, *V_SHAPED) else 1)

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        """Return the rank of ``pp`` of each stage."""
        if self.kind in V_SHAPED:
            return (*range(pp), *reversed(range(pp)))
        return tuple(stage % pp for stage in range(pp * self.per_rank))

    def check(self, setup: Setup) -> StagedModel | None:
        """Divide the model, and compare the stages of a small copy with the whole copy."""
        mesh = setup.meshes.pp
        if mesh is None:
            return None
        _require_decoder(setup)
        self._require_microbatches(mesh.size())
        self._require_split_backward(setup)
        staged = StagedModel(
            ranges=self._ranges(setup, mesh.size()),
            ranks=self.stage_ranks(mesh.size()),
            rank=mesh.get_local_rank(),
            mesh=mesh,
            tp=setup.meshes.tp,
            blocks=setup.structure.decoder,
            schedules=self,
        )
        try:
            with torch.inference_mode(False), torch.enable_grad():  # the caller may be under no_grad
                _find_crossing_tensors(setup.facts.model, staged)
        except FsdpRuntimeError:
            raise
        except Exception as error:
            raise ModelError(
                f"the stages of {setup.facts.name} cannot be verified: its small copy raises {type(error).__name__}: "
                f"{error}; use a mesh without pp"
            ) from error
        _find_shared_parameters(setup.facts.model, staged)
        return staged

    def schedule_of(self, microbatches: int, pp: int) -> str:
        """Return the schedule for a call, or the one that takes any number of micro-batches on the same stages."""
        if microbatches >= self._least(pp) and not (self.kind in INTERLEAVED and microbatches % pp):
            return self.schedule
        return "ZBVZeroBubble" if self.kind in V_SHAPED else "LoopedBFS" if self.kind in INTERLEAVED else "GPipe"

    def _least(self, pp: int) -> int:
        return {"dualpipev": pp * self.per_rank, "zbvzerobubble": 1, "gpipe": 1}.get(self.kind, pp)

    def _require_microbatches(self, pp: int) -> None:
        if self.microbatches < (least := self._least(pp)):
            raise OptionError(
                f"microbatches={self.microbatches}: the schedule {self.schedule!r} over pp={pp} takes at least {least}"
            )
        if self.kind in INTERLEAVED and self.microbatches % pp:
            raise OptionError(
                f"microbatches={self.microbatches}: the schedule {self.schedule!r} takes multiples of pp={pp}"
            )

    def _require_split_backward(self, setup: Setup) -> None:
        joined = [type(step).__name__ for step in setup.steps if isinstance(step, Step) and step.joins_gradients]
        joined += ["sequence parallelism"] if setup.sequence_parallel and setup.meshes.tp is not None else []
        if self.splits_backward and joined:
            raise OptionError(
                f"the schedule {self.schedule!r} computes gradients of weights after gradients of inputs, and the "
                f"backward of {' and '.join(joined)} computes both at once: use '1F1B' or 'Interleaved1F1B'"
            )

    def _ranges(self, setup: Setup, pp: int) -> tuple[tuple[int, int], ...]:
        blocks, stages = setup.structure.decoder, pp * self.per_rank
        if self.layers is not None:
            if len(self.layers) != stages or sum(self.layers) != len(blocks):
                raise OptionError(
                    f"layers={tuple(self.layers)} has {len(self.layers)} stages and {sum(self.layers)} blocks: the "
                    f"schedule over pp={pp} has {stages} stages, and the model {len(blocks)} blocks"
                )
            return ranges_of(self.layers)
        return ranges_of(balanced(setup.structure, stages))

    def apply(self, model: nn.Module, setup: Setup, checked: StagedModel | None) -> None:
        """Remove the parameters of other stages; before FSDP2, which shards the remaining ones."""
        mesh = setup.meshes.root
        if checked is None or mesh is None:
            return
        staged = checked
        slots = absent_tensors(model, staged, staged.rank)
        names = {id(p): name for name, p in model.named_parameters()}
        staged.state = recorded_state(model, staged, mesh)
        add_parts(model, _parts(model, staged))
        for slot in slots:
            slot.remove()
        staged.absent = tuple(names[id(slot.tensor)] for slot in slots if id(slot.tensor) in names)
        runtime_state(model).stages = staged
        logger.info("pipeline: stages %s of %s blocks", staged.stages, [end - start for start, end in staged.ranges])


def require_pipeline_step(steps: Iterable[object], mesh: DeviceMesh | None) -> None:
    """Check that a mesh with ``pp`` comes with the step, and the step with such a mesh."""
    count = sum(isinstance(step, Pipeline) for step in steps)
    if mesh is None and count:
        raise OptionError(
            "steps has a Pipeline, and the mesh has no axis pp of 2 or more: build it with MeshSpec(pp=2)"
        )
    if mesh is not None and count != 1:
        raise OptionError(
            f"the mesh has pp={mesh.size()}, and steps has {count} times Pipeline: give one, as in "
            "steps=(Pipeline('1f1b', microbatches=8),)"
        )


def _require_decoder(setup: Setup) -> None:
    facts = setup.facts
    facts.require_not_compiled()
    config = getattr(facts.base_model, "config", None)
    for name in RECORDED:
        if getattr(config, name, False):
            raise ModelError(f"{facts.name} has {name}=True, and each rank records only its blocks: set it to False")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{facts.name} is an encoder-decoder: the stages are parts of one stack; use a mesh without pp"
        )
    if (heads := runtime_state(facts.base_model).multi_token) > 0:
        raise ModelError(
            f"{facts.name} has {heads} multi-token heads, which need the embedding of the first stage and the states "
            "of the last one: use a mesh without pp, or leave MultiTokenHeads out"
        )


#: The attribute with the width of an absent module's output.
_WIDTHS = {"table": "embedding_dim", "linear": "out_features"}


def _parts(model: nn.Module, staged: StagedModel) -> list[StagePart]:
    parts = [StagePart(staged, path, block=index) for index, path in enumerate(staged.blocks)]
    for path, where in staged.outer.items():
        module: Any = model.get_submodule(path)
        absent = staged.replaced[path]
        width = getattr(module, _WIDTHS.get(absent, ""), None)
        parts.append(StagePart(staged, path, where=where, absent=absent, width=width if isinstance(width, int) else 0))
    return parts


def _find_crossing_tensors(model: nn.Module, staged: StagedModel) -> None:
    """Fill in the record of the stages from runs of a small copy."""
    base = base_model(model)
    prefix = next(f"{path}." if path else "" for path, module in model.named_modules() if module is base)
    small = small_copy(without_adapters(base), len(staged.blocks))
    staged.blocks = tuple(path.removeprefix(prefix) for path in staged.blocks)
    paths = [path for path, _ in outer_modules(small, inspect_model(small))]
    staged.outer = dict.fromkeys(paths, "every")
    staged.replaced = dict.fromkeys(paths, "like")
    add_parts(small, _parts(small, staged))
    inputs = [rows(small, shape) for shape in SHAPES]
    whole, longer = (record(small, staged, each) for each in inputs)
    staged.outer = places(whole, len(staged.blocks), paths)
    staged.replaced = {path: whole.absent.get(path) or "like" for path in paths}
    staged.skeletons = tuple(call.skeleton for call in whole.calls)
    staged.entries = tuple(call.entries for call in whole.calls)
    add_parts(small, _parts(small, staged))
    starts = [start for start, _ in staged.ranges[1:]]
    staged.sent = tuple(tuple(crossing(small, staged, whole, inputs[0], start)) for start in starts)
    values = {value for sent in staged.sent for value in sent}
    staged.varying = {value: _varying(value, whole, longer) for value in values}
    staged.unused = require_equal(small, staged, inputs[0])
    staged.blocks = tuple(prefix + path for path in staged.blocks)
    staged.outer = {prefix + path: where for path, where in staged.outer.items()}
    staged.replaced = {prefix + path: absent for path, absent in staged.replaced.items()}


def _varying(value: Value, whole: Record, longer: Record) -> tuple[str | None, ...]:
    """Return for each dim of a sent tensor whether it is rows or tokens."""
    dims = {(rows, more): name for rows, more, name in zip(*SHAPES, ("rows", "tokens"), strict=True)}
    shapes = zip(whole.tensor(value).shape, longer.tensor(value).shape, strict=True)
    return tuple(None if one == other else dims.get((one, other), "unknown") for one, other in shapes)


def _find_shared_parameters(model: nn.Module, staged: StagedModel) -> None:
    """Record the ranks of each trained parameter that several ranks hold."""
    holders: dict[str, list[int]] = {name: [] for name, p in model.named_parameters() if p.requires_grad}
    for rank in sorted(set(staged.ranks)):
        absent = {id(slot.tensor) for slot in absent_tensors(model, staged, rank)}
        for name, parameter in model.named_parameters():
            if name in holders and id(parameter) not in absent:
                holders[name].append(rank)
    staged.shared = {name: tuple(ranks) for name, ranks in holders.items() if len(ranks) > 1}
