"""All decisions of ``parallelize`` as one frozen value: resolved and checked once, then applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from fsdp_runtime._torch_compat import root_mesh
from fsdp_runtime.agreement import require_same_setup
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.keywords import Options, steps_of
from fsdp_runtime.mesh.experts import expert_axis_size, expert_fsdp_mesh
from fsdp_runtime.mesh.spec import axis_size, fsdp_mesh, require_axes, submesh
from fsdp_runtime.model.materialize import refuse_until_loaded
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Meshes, ModelFacts, Setup
from fsdp_runtime.sharded.collectives import first_rank_speaks
from fsdp_runtime.sharded.initial_values import take_first_values
from fsdp_runtime.step import Checked, Step
from fsdp_runtime.steps.checkpointing import ActivationCheckpointing
from fsdp_runtime.steps.compile import Compile
from fsdp_runtime.steps.context.step import ContextParallel, under_context_parallelism
from fsdp_runtime.steps.documents.shared_prefixes import SharedPrefixes
from fsdp_runtime.steps.documents.step import PackedSequences
from fsdp_runtime.steps.experts.step import ExpertParallel
from fsdp_runtime.steps.fsdp.step import FSDP2
from fsdp_runtime.steps.guards.calls import carry_over_parameters, guard_methods, watch_optimizers
from fsdp_runtime.steps.guards.check_inputs import CheckInputs
from fsdp_runtime.steps.outputs.step import Outputs
from fsdp_runtime.steps.pipeline.state import mark_stage_parameters
from fsdp_runtime.steps.pipeline.step import Pipeline, require_pipeline_step
from fsdp_runtime.steps.quantized.step import Quantized
from fsdp_runtime.steps.random_states import RandomStates
from fsdp_runtime.steps.recomputation import recomputes
from fsdp_runtime.steps.refused_adapters import refuse_later_adapters
from fsdp_runtime.steps.tensor.step import TensorParallel
from tp_plans import Plan

#: The order of steps.  A step of no other class, such as a user's step, takes the place of ``Step``.
ORDER: tuple[type[Step[Any]], ...] = (
    PackedSequences,
    TensorParallel,
    Outputs,
    ExpertParallel,
    Quantized,
    ContextParallel,
    SharedPrefixes,
    Pipeline,
    Step,
    ActivationCheckpointing,
    Compile,
    FSDP2,
    CheckInputs,
)


@dataclass(frozen=True, eq=False)
class Parallelism:
    """What to do with a model on a mesh; the result of :func:`resolve_parallelism`."""

    setup: Setup  # the model's structure, the meshes and the checked plan
    steps: tuple[tuple[Step[Any], Any], ...]  # the steps in order, each with the result of its check
    groups: tuple[ProcessGroup, ...] = ()  # this rank's group on each axis
    has_values: bool = False  # whether any rank has a parameter off the meta device; the ranks then compare values

    @property
    def structure(self) -> ModelStructure:
        """The model's blocks, embedding and head."""
        return self.setup.structure

    @property
    def plan(self) -> Plan | Mapping[str, ParallelStyle] | None:
        """The plan, ``None`` where layers stay replicated."""
        return self.setup.plan

    @property
    def findings(self) -> tuple[str, ...]:
        """The warnings of the check of the plan."""
        return self.checked(TensorParallel) or ()

    def checked(self, kind: type[Step[Checked]]) -> Checked | None:
        """Return the result of a step's check, ``None`` without a step of this class."""
        return next((checked for step, checked in self.steps if isinstance(step, kind)), None)

    def on(self, model: nn.Module, structure: ModelStructure) -> Parallelism:
        """Return the same steps with the same plan for a variant of the model, such as one with fewer blocks."""
        setup = replace(self.setup, facts=ModelFacts(model, structure))
        reused = (TensorParallel, ExpertParallel, Pipeline)
        return Parallelism(
            setup,
            tuple((step, checked if isinstance(step, reused) else step.check(setup)) for step, checked in self.steps),
        )

    def apply(self, model: nn.Module) -> None:
        """Apply the steps in order to the resolved model, in place, with the values of the mesh's first rank."""
        if self.has_values:
            take_first_values(model, self.groups)
        with first_rank_speaks(self.groups), carry_over_parameters(model):
            for step, checked in self.steps:
                step.prepare(model, self.setup, checked)
            if self.setup.is_sharded:
                refuse_later_adapters(model)
            for step, checked in self.steps:
                step.apply(model, self.setup, checked)
        for module in (model, self.setup.facts.base_model):
            runtime_state(module).mesh = self.setup.meshes.root
        mark_stage_parameters(model)
        watch_optimizers(model)
        guard_methods(model)
        refuse_until_loaded(model, self.structure.blocks)

    def __str__(self) -> str:
        return "\n".join(step.describe() for step, _ in self.steps)


def resolve_parallelism(model: nn.Module, mesh: DeviceMesh, **options: Unpack[Options]) -> Parallelism:
    """Check everything that :func:`parallelize` does to a model, and change nothing.

    Apply the result with ``parallelism.apply(model)``.  The arguments and the errors are :func:`parallelize`'s.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, resolve_parallelism
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]))
        >>> mesh = MeshSpec().build(device_type="cpu")
        >>> parallelism = resolve_parallelism(model, mesh, activation_checkpointing="block")
        >>> print(str(parallelism).splitlines()[-2])
        ActivationCheckpointing(mode='block', offload=False)
        >>> parallelism.apply(model)
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is of type {type(model).__name__}, not a torch.nn.Module")
    require_axes(mesh)
    steps = steps_of(**options)
    fsdp = next(step for step in steps if isinstance(step, FSDP2))
    return resolve_steps(model, _meshes(mesh, fsdp), steps)


def resolve_steps(
    model: nn.Module, meshes: Meshes, steps: Iterable[Step[Any]], *, allow_dtensors: bool = False
) -> Parallelism:
    """Resolve and check steps, in any order, against a model on one mesh per axis; change nothing."""
    # ``allow_dtensors`` accepts parameters that are DTensors already, unless a plan is to be applied.
    all_steps = list(steps)
    require_pipeline_step(all_steps, meshes.pp)
    groups, has_values = require_same_setup(model, meshes, all_steps)
    if runtime_state(model).offloaded is not None:
        raise ModelError("tensors of the model are offloaded to host memory: call onload(model) before parallelize")
    _require_fresh(model, plain=not allow_dtensors or meshes.tp is not None)
    if any(mesh is not None for mesh in (meshes.tp, meshes.ep, meshes.pp, meshes.fsdp)):
        _require_no_gradients(model)
    if not any(isinstance(step, PackedSequences) for step in all_steps):
        all_steps.append(PackedSequences(isolate=False))  # warns about packed rows
    if not any(isinstance(step, ExpertParallel) for step in all_steps):
        all_steps.append(ExpertParallel())  # adapters of experts on any mesh
    all_steps += [RandomStates(meshes.tp), Outputs()]
    shares_batches = meshes.tp is not None or meshes.cp is not None
    if shares_batches and not any(isinstance(step, CheckInputs) for step in all_steps):
        all_steps.append(CheckInputs("first"))
    in_order = tuple(sorted(all_steps, key=_place))
    setup = Setup(facts=ModelFacts.of(model), meshes=meshes, steps=in_order, given_tp=meshes.tp)
    with first_rank_speaks(groups):
        for step in in_order:
            setup = step.resolve(setup)
        return Parallelism(setup, tuple((step, step.check(setup)) for step in in_order), groups, has_values)


def _place(step: Step[Any]) -> int:
    return next(ORDER.index(cls) for cls in type(step).__mro__ if cls in ORDER)


def _meshes(mesh: DeviceMesh, fsdp: FSDP2) -> Meshes:
    tp, cp, ep = axis_size(mesh, "tp"), axis_size(mesh, "cp"), expert_axis_size(mesh)
    shards = _fsdp_mesh(mesh, fsdp)
    return Meshes(
        tp=submesh(mesh, "tp") if tp > 1 else None,
        cp=mesh["cp"] if cp > 1 else None,
        pp=mesh["pp"] if axis_size(mesh, "pp") > 1 else None,
        ep=submesh(mesh, "ep") if ep > 1 else None,
        shared=submesh(mesh, "tp") if ep > 1 and tp > 1 else None,
        fsdp=shards,
        expert_fsdp=expert_fsdp_mesh(mesh) if ep > 1 and shards is not None else None,
        # Gradients are summed over ``cp``: its ranks have parts of one batch.
        batches=axis_size(mesh, "dp_replicate") * axis_size(mesh, "dp_shard") if cp > 1 or ep > 1 else None,
        root=root_mesh(mesh),
        device_type=mesh.device_type,
    )


def _require_fresh(model: nn.Module, *, plain: bool) -> None:
    """Refuse a model that this package or another has already wrapped or sharded."""
    for path, reason in _already(model, plain=plain):
        raise ModelError(
            f"{path or 'the model'} {reason} already: parallelize a fresh model, without wrappers; to add steps of "
            "your own, pass parallelize(..., steps=(MyStep(),))"
        )


def _already(model: nn.Module, *, plain: bool) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        names = {cls.__name__ for cls in type(module).__mro__}
        for wrapper in names & {"DistributedDataParallel", "FullyShardedDataParallel", "MegatronFSDP"}:
            yield path, f"is wrapped by {wrapper}"
        if isinstance(module, FSDPModule):
            yield path, "is wrapped by FSDP2"
        if recomputes(module):
            yield path, "recomputes its activations"
    if under_context_parallelism(model):
        yield "", "is under context parallelism"
    for path, parameter in model.named_parameters() if plain else ():
        if isinstance(parameter, DTensor):
            axes = " and ".join(parameter.device_mesh.mesh_dim_names or ()) or "a mesh"
            yield path, f"is a DTensor over {axes}"


def _require_no_gradients(model: nn.Module) -> None:
    """Refuse gradients: the new parameters would not have them."""
    paths = [path for path, parameter in model.named_parameters() if parameter.grad is not None]
    if paths:
        raise ModelError(
            f"{len(paths)} parameters have gradients, first {paths[0]}, which their shards would not have: call "
            "model.zero_grad() before parallelize, or take the optimizer's step first"
        )


def _fsdp_mesh(mesh: DeviceMesh, fsdp: FSDP2) -> DeviceMesh | None:
    """Return the mesh to shard over, or ``None`` where one rank holds everything and no setting needs FSDP2."""
    shards, experts = fsdp_mesh(mesh), expert_fsdp_mesh(mesh)
    divides_experts = experts is not None and experts.size() > 1
    if shards is not None and (shards.size() > 1 or fsdp.requires_fsdp or divides_experts):
        return shards
    if divides_experts or fsdp.requires_fsdp:
        settings = "experts over efsdp need" if divides_experts else "mp_policy and offload_policy need"
        raise OptionError(
            f"{settings} FSDP2, and the mesh has no dp_shard axis: add one (size 1 is enough), or pass adopt_mesh(mesh)"
        )
    return None
