"""All decisions of ``parallelize`` as one frozen value: resolved and checked once, then applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from fsdp_runtime.agreement import require_same_setup
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.mesh.experts import expert_axis_size, expert_fsdp_mesh
from fsdp_runtime.mesh.spec import axis_size, fsdp_mesh, require_axes, submesh
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Meshes, ModelFacts, Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.checkpointing import ActivationCheckpointing, CheckpointMode, recomputes
from fsdp_runtime.steps.compile import Compile
from fsdp_runtime.steps.context.methods import Method
from fsdp_runtime.steps.context.sharding import LoadBalancer
from fsdp_runtime.steps.context.step import ContextParallel, under_context_parallelism
from fsdp_runtime.steps.documents.shared_prefixes import SharedPrefixes
from fsdp_runtime.steps.documents.step import PackedSequences
from fsdp_runtime.steps.experts.step import ExpertExchange, ExpertParallel
from fsdp_runtime.steps.fsdp.options import FSDPOptions
from fsdp_runtime.steps.fsdp.step import FSDP2
from fsdp_runtime.steps.guards.check_inputs import CheckInputs
from fsdp_runtime.steps.guards.optimizer_groups import step_meshes_apart
from fsdp_runtime.steps.guards.refuse_pickle import refuse_pickle
from fsdp_runtime.steps.guards.stale_optimizers import refuse_stale_optimizers
from fsdp_runtime.steps.random_states import RandomStates
from fsdp_runtime.steps.tensor.step import Logits, PlanSource, TensorParallel, Towers
from tp_plans import Plan

#: The order of steps; one of no other class, such as a user's own, comes where ``Step`` stands.
ORDER: tuple[type[Step], ...] = (
    PackedSequences,
    TensorParallel,
    ExpertParallel,
    ContextParallel,
    SharedPrefixes,
    Step,
    ActivationCheckpointing,
    Compile,
    FSDP2,
    CheckInputs,
)


@dataclass(frozen=True, eq=False)
class Parallelism:
    """What to do with a model on a mesh; the result of :func:`resolve_parallelism`.

    Args:
        setup: the model's structure, the meshes and the checked plan.
        steps: the steps in order, each with what its check found.
    """

    setup: Setup
    steps: tuple[tuple[Step, Any], ...]

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
        found: tuple[str, ...] = self.found(TensorParallel) or ()
        return found

    def found(self, kind: type[Step]) -> Any:
        """Return what the check of a step found, ``None`` where there is no step of this class."""
        return next((found for step, found in self.steps if isinstance(step, kind)), None)

    def on(self, model: nn.Module, structure: ModelStructure) -> Parallelism:
        """Return the same steps with the same plan for a variant of the model, such as one with fewer blocks."""
        setup = replace(self.setup, facts=ModelFacts(model, structure))
        kept = (TensorParallel, ExpertParallel, FSDP2)
        return Parallelism(
            setup, tuple((step, found if isinstance(step, kept) else step.check(setup)) for step, found in self.steps)
        )

    def apply(self, model: nn.Module) -> None:
        """Apply the steps in order and in place.

        Args:
            model: the model that was resolved.
        """
        with refuse_stale_optimizers(model):
            for step, found in self.steps:
                step.prepare(model, self.setup, found)
            for step, found in self.steps:
                step.apply(model, self.setup, found)
        step_meshes_apart()
        refuse_pickle(model)

    def __str__(self) -> str:
        return "\n".join(step.describe() for step, _ in self.steps)


def resolve_parallelism(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: PlanSource = "auto",
    sequence_parallel: bool = False,
    context_parallel: Method = "allgather",
    cp_load_balancer: LoadBalancer = "headtail",
    cp_attention: bool = True,
    packed_sequences: bool = False,
    logits: Logits = "sharded",
    towers: Towers = "sharded",
    activation_checkpointing: CheckpointMode = "none",
    compile: bool | Mapping[str, Any] = False,  # noqa: A002  # torch's word
    async_tensor_parallel: bool = False,
    fsdp: FSDPOptions | None = None,
    check_inputs: bool = False,
    shared_prefixes: bool = False,
    expert_exchange: ExpertExchange = "all_to_all",
    steps: Sequence[Step] = (),
) -> Parallelism:
    """Check everything that :func:`parallelize` does to a model, and change nothing.

    Apply the result with ``parallelism.apply(model)``.

    Args:
        model: the model, on the meta device or with data, the same on every rank.
        mesh: from ``MeshSpec(...).build()`` or ``adopt_mesh(...)``, or any mesh with those axis names.
        plan: ``"auto"`` (the architecture's plan, else one that is inferred and proven by running a small copy of the
            model on the ranks of ``tp``), ``"inferred"`` (with its doubts), a plan, a dict of pattern to style or style
            name, a dotted path to one, or ``None`` to replicate every layer.  Not used where ``tp`` has size 1.
        sequence_parallel: shard activations between blocks over ``tp``, on the sequence dim.
        context_parallel: how attention spans the ranks of ``cp``: ``"allgather"``, ``"ulysses"`` or ``"ring"``.
        cp_load_balancer: the tokens that each rank of ``cp`` holds: ``"headtail"`` or ``None`` (contiguous).
        cp_attention: replace attention for ``cp``; ``False`` for a model that calls ``ContextAttention`` itself.
        packed_sequences: keep documents apart where ``position_ids`` restart within a row.
        logits: ``"sharded"`` on the vocabulary (a DTensor), or ``"full"``: a plain tensor on every rank.
        towers: under ``plan="auto"``, the layers of vision and audio towers and projectors: ``"sharded"`` over ``tp``
            as those of the language model, or ``"replicated"``.
        activation_checkpointing: ``"none"``, ``"mlp"``, ``"block"``, ``"selective"`` or a ``SelectiveCheckpoint``.
        compile: compile every block: ``True``, or keywords of ``torch.compile``.
        async_tensor_parallel: overlap products with the collectives of sequence parallelism; needs ``compile``
            and CUDA.
        fsdp: settings of FSDP2.
        check_inputs: compare the inputs of every forward over the ranks of ``tp``, and their shapes over ``cp``.
        shared_prefixes: let the model take rows of ``pack_tree``.
        expert_exchange: how tokens travel to their experts on a mesh with ``ep``: ``"all_to_all"``, or a subclass of
            ``tp_plans.runtime.TokenExchange``.
        steps: further steps, such as your own.

    Returns:
        The resolved parallelism.

    Raises:
        MeshError: the mesh has other axis names.
        ModelError: no blocks are found, the model is already parallelized or offloaded, no module would recompute, the
            model's sequences cannot be sharded over ``cp`` or packed, or its samples cannot share prefixes.
        BackendError: an option needs a device that is not available.
        OptionError: an option is not allowed, or needs an axis that the mesh lacks; or a module of experts has
            trainable parameters of several dtypes.
        tp_plans.TpPlansError: no plan is known, or it does not fit the model.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, resolve_parallelism
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]))
        >>> mesh = MeshSpec().build(device_type="cpu")
        >>> parallelism = resolve_parallelism(model, mesh, activation_checkpointing="block")
        >>> print(str(parallelism).splitlines()[-2])
        ActivationCheckpointing(mode='block')
        >>> parallelism.apply(model)
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is of type {type(model).__name__}, not a torch.nn.Module")
    require_axes(mesh)
    options = FSDPOptions() if fsdp is None else fsdp
    if not isinstance(options, FSDPOptions):
        raise OptionError(f"fsdp is of type {type(fsdp).__name__}, not FSDPOptions")
    given: list[Step] = [
        PackedSequences(apart=packed_sequences),
        TensorParallel(plan, sequence_parallel, towers, logits),
        ExpertParallel(expert_exchange),
        ContextParallel(context_parallel, cp_load_balancer, cp_attention),
        ActivationCheckpointing(activation_checkpointing),
        FSDP2(options),
        *steps,
    ]
    if compile is not False:
        given.append(Compile({} if compile is True else compile, async_tensor_parallel))
    elif async_tensor_parallel:
        raise OptionError("async_tensor_parallel is a pass of Inductor: it needs compile=True or backend='inductor'")
    if shared_prefixes:
        given.append(SharedPrefixes())
    if check_inputs:
        given.append(CheckInputs())
    return resolve_steps(model, _meshes(mesh, options), given)


def resolve_steps(
    model: nn.Module, meshes: Meshes, steps: Iterable[Step], *, allow_dtensors: bool = False
) -> Parallelism:
    """Resolve and check steps against a model on one mesh per axis, whatever the axes are called; change nothing.

    Args:
        model: the model.
        meshes: the axes.
        steps: the steps, in any order.
        allow_dtensors: accept parameters that are DTensors already, unless a plan is to be applied.

    Raises:
        ModelError: see :func:`resolve_parallelism`.
        OptionError: see :func:`resolve_parallelism`.
        tp_plans.TpPlansError: no plan is known, or it does not fit the model.
    """
    given = list(steps)
    require_same_setup(model, meshes, given)
    if runtime_state(model).offloaded is not None:
        raise ModelError("tensors of the model are offloaded to host memory: call onload(model) before parallelize")
    _require_not_wrapped(model)
    if not allow_dtensors or meshes.tp is not None:
        _require_plain_parameters(model)
    if not any(isinstance(step, PackedSequences) for step in given):
        given.append(PackedSequences(apart=False))  # warns
    given.append(RandomStates(meshes.tp))
    in_order = tuple(sorted(given, key=_place))
    setup = Setup(facts=ModelFacts.of(model), meshes=meshes, steps=in_order)
    for step in in_order:
        setup = step.resolve(setup)
    return Parallelism(setup, tuple((step, step.check(setup)) for step in in_order))


def _place(step: Step) -> int:
    return next(ORDER.index(cls) for cls in type(step).__mro__ if cls in ORDER)


def _meshes(mesh: DeviceMesh, options: FSDPOptions) -> Meshes:
    """Return the axes of a mesh that a call uses.

    Raises:
        OptionError: a setting needs FSDP2, and the mesh has no data-parallel axis.
    """
    tp, cp, ep = axis_size(mesh, "tp"), axis_size(mesh, "cp"), expert_axis_size(mesh)
    shards = _fsdp_mesh(mesh, options)
    return Meshes(
        tp=submesh(mesh, "tp") if tp > 1 else None,
        cp=mesh["cp"] if cp > 1 else None,
        ep=submesh(mesh, "ep") if ep > 1 else None,
        shared=submesh(mesh, "tp") if ep > 1 and tp > 1 else None,
        fsdp=shards,
        expert_fsdp=expert_fsdp_mesh(mesh) if ep > 1 and shards is not None else None,
        batches=_ranks_with_different_batches(mesh) if cp > 1 or ep > 1 else None,
    )


def _require_not_wrapped(model: nn.Module) -> None:
    """Refuse a model that this package or another has already wrapped."""
    for path, module in model.named_modules():
        names = {cls.__name__ for cls in type(module).__mro__}
        wrapper = next(iter(names & {"DistributedDataParallel", "FullyShardedDataParallel", "MegatronFSDP"}), None)
        if isinstance(module, FSDPModule):
            raise ModelError(f"{path or 'the model'} is wrapped by FSDP2 already: parallelize a fresh model")
        if wrapper is not None:
            raise ModelError(f"{path or 'the model'} is wrapped by {wrapper}: parallelize the model inside it, fresh")
        if recomputes(module):
            raise ModelError(f"{path} recomputes its activations already: parallelize a fresh model")
    if under_context_parallelism(model):
        raise ModelError("the model is under context parallelism already: parallelize a fresh model")


def _require_plain_parameters(model: nn.Module) -> None:
    """Refuse a model with DTensor parameters."""
    for path, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            axes = " and ".join(parameter.device_mesh.mesh_dim_names or ()) or "a mesh"
            raise ModelError(
                f"{path} is a DTensor over {axes} already: parallelize a fresh model; to add steps of your own, pass "
                "parallelize(..., steps=(MyStep(),))"
            )


def _ranks_with_different_batches(mesh: DeviceMesh) -> int:
    """Return the size of ``dp``: gradients are summed over ``cp``, whose ranks have parts of one batch."""
    return axis_size(mesh, "dp_replicate") * axis_size(mesh, "dp_shard")


def _fsdp_mesh(mesh: DeviceMesh, options: FSDPOptions) -> DeviceMesh | None:
    """Return the mesh to shard over, or ``None`` where one rank holds everything and no setting needs FSDP2.

    Raises:
        OptionError: a setting needs FSDP2, and the mesh has no data-parallel axis.
    """
    shards, experts = fsdp_mesh(mesh), expert_fsdp_mesh(mesh)
    divides_experts = experts is not None and experts.size() > 1
    if shards is not None and (shards.size() > 1 or options.requires_fsdp or divides_experts):
        return shards
    if divides_experts:
        raise OptionError(
            "experts are sharded over efsdp with FSDP2, and the mesh has no dp_shard axis: add one (size 1 is enough), "
            "or pass adopt_mesh(mesh)"
        )
    if options.requires_fsdp:
        raise OptionError(
            "mp_policy and offload_policy need FSDP2, and the mesh has no dp_shard axis: add one (size 1 is enough), "
            "or pass adopt_mesh(mesh)"
        )
    return None
