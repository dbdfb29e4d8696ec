"""The step of pipeline parallelism: its options, its checks, and the division of a model into stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import FsdpRuntimeError, ModelError, OptionError
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.pipeline.parts import RECORDED, StagedModel, add_parts
from fsdp_runtime.steps.pipeline.state import absent_tensors, holders_of, recorded_state
from fsdp_runtime.steps.pipeline.trace import find_crossing_tensors
from fsdp_runtime.steps.routing.routers import routers_of
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
                find_crossing_tensors(setup.facts.model, staged)
        except FsdpRuntimeError:
            raise
        except Exception as error:
            raise ModelError(
                f"the stages of {setup.facts.name} cannot be verified: its small copy raises {type(error).__name__}: "
                f"{error}; use a mesh without pp"
            ) from error
        trained = {name: p for name, p in setup.facts.model.named_parameters() if p.requires_grad}
        holders = holders_of(setup.facts.model, staged, trained)
        staged.shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
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
        slots = absent_tensors(model, checked, checked.rank)
        names = {id(p): name for name, p in model.named_parameters()}
        checked.state = recorded_state(model, checked, mesh)
        add_parts(model, checked)
        for slot in slots:
            slot.put(None)
        checked.absent = tuple(names[id(slot.tensor)] for slot in slots if id(slot.tensor) in names)
        runtime_state(model).stages = checked
        logger.info("pipeline: stages %s of %s blocks", checked.stages, [end - start for start, end in checked.ranges])


def require_pipeline_step(steps: Iterable[object], mesh: DeviceMesh | None) -> None:
    """Check that a mesh with ``pp`` comes with the step, and the step with such a mesh."""
    count = sum(isinstance(step, Pipeline) for step in steps)
    if mesh is None and count:
        raise OptionError(
            "steps has a Pipeline, and the mesh has no axis pp of 2 or more: build it with MeshSpec(pp=2)"
        )
    if mesh is not None and count != 1:
        raise OptionError(
            f"the mesh has pp={mesh.size()}, and steps has {count or 'no'} Pipeline: give one, as in "
            "steps=(Pipeline('1F1B', microbatches=8),)"
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


#: The cost of a stage from one block to another.
Cost = Callable[[int, int, int], float]
_SLACK = 1.02


def balanced(structure: ModelStructure, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage."""
    modules, shares = structure.tree.modules, dict[str, float]()
    with suppress(ModelError):  # a mixture of unknown form, such as JetMoE's attention: all of its experts are counted
        routers = routers_of(structure).by_path.values()
        shares = {f"{router.experts_path}.": router.share for router in routers if router.share}
    blocks, first, last = structure.decoder, structure.embedding, structure.lm_head
    inside = tuple(f"{path}." for path in blocks)
    outside = [path for path in (first, last) if path is not None and not path.startswith(inside)]
    flops = {path: _flops(modules[path], path, shares) for path in (*blocks, *outside)}
    sizes = {path: float(sum(p.nbytes for p in modules[path].parameters())) for path in (*blocks, *outside)}
    return split_blocks(
        [flops[path] for path in blocks],
        stages,
        after=flops.get(last or "", 0),
        sizes=[sizes[path] for path in blocks],
        size_before=sizes.get(first or "", 0),
        size_after=sizes.get(last or "", 0),
    )


def _flops(module: nn.Module, path: str, shares: dict[str, float]) -> float:
    """Return the products with weights for one token, in forwards: a trained weight takes three, a frozen one two."""
    # ``shares`` has the part of the experts that a token uses, by the prefix of their parameters.
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            place = f"{path}.{name}"
            share = next((share for prefix, share in shares.items() if place.startswith(prefix)), 1.0)
            total += (3 if parameter.requires_grad else 2) * parameter.numel() * share
    return total


def split_blocks(
    costs: Sequence[float],
    stages: int,
    *,
    before: float = 0,
    after: float = 0,
    sizes: Sequence[float] = (),
    size_before: float = 0,
    size_after: float = 0,
) -> tuple[int, ...]:
    """Return the number of blocks of each stage, with the least cost of the most expensive stage."""
    # ``before`` and ``after`` are costs of the first and the last stage beside their blocks, such as the LM head. Of
    # divisions within 2 % of the least cost, the largest stage has the fewest bytes.
    if stages > len(costs):
        raise OptionError(f"{stages} stages for {len(costs)} blocks: each stage needs a block; use fewer stages")
    cost = _of_stage(costs, stages, before, after)
    counts = _least(cost, len(costs), stages)
    if not sizes:
        return counts
    limit = _SLACK * max(cost(stage, *span) for stage, span in enumerate(ranges_of(counts)))
    size = _of_stage(sizes, stages, size_before, size_after)
    return _least(lambda *stage: size(*stage) if cost(*stage) <= limit else float("inf"), len(costs), stages)


def _of_stage(costs: Sequence[float], stages: int, before: float, after: float) -> Cost:
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        ends = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sums[end] - sums[start] + ends

    return cost


def _least(cost: Cost, blocks: int, stages: int) -> tuple[int, ...]:
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        latest = blocks - (stages - stage - 1)
        ends = range(stage + 1, latest + 1) if stage < stages - 1 else (blocks,)
        best = {
            end: min(
                (max(most, cost(stage, start, end)), (*counts, end - start))
                for start, (most, counts) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[blocks][1]


def ranges_of(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the first block of each stage, and the first block after it."""
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends], ends, strict=False))
