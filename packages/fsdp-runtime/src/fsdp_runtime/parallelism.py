"""All decisions of ``parallelize`` as one frozen value: resolved and checked once, then applied."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.mesh.experts import expert_axis_size, expert_fsdp_mesh
from fsdp_runtime.mesh.spec import axis_size, require_axes, submesh
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import ModelFacts
from fsdp_runtime.steps.async_tp import async_compile_options
from fsdp_runtime.steps.checkpointing import (
    ActivationCheckpointing,
    apply_ac,
    modules_to_recompute,
    recomputes,
)
from fsdp_runtime.steps.compile import apply_compile, check_compile_options
from fsdp_runtime.steps.context.methods import ContextParallel, require_context_parallel
from fsdp_runtime.steps.context.sharding import LoadBalancer, require_load_balancer
from fsdp_runtime.steps.context.step import (
    apply_cp,
    check_context_parallel,
    check_heads_over_cp,
    under_context_parallelism,
)
from fsdp_runtime.steps.context.verify import verify_context_parallelism
from fsdp_runtime.steps.documents.shared_prefixes import apply_shared_prefixes, check_shared_prefixes
from fsdp_runtime.steps.documents.step import apply_packing, check_packing
from fsdp_runtime.steps.experts.step import ExpertExchange, apply_ep, check_adapted_experts, expert_modules
from fsdp_runtime.steps.fsdp.dtypes import FSDPDtypes
from fsdp_runtime.steps.fsdp.options import FSDPOptions, check_fsdp_options
from fsdp_runtime.steps.fsdp.step import apply_fsdp, fsdp_dtypes, fsdp_mesh
from fsdp_runtime.steps.guards.check_inputs import apply_input_check
from fsdp_runtime.steps.guards.optimizer_groups import step_meshes_apart
from fsdp_runtime.steps.guards.refuse_pickle import refuse_pickle
from fsdp_runtime.steps.guards.stale_optimizers import refuse_stale_optimizers
from fsdp_runtime.steps.tensor.lora import resolve_adapted_plan
from fsdp_runtime.steps.tensor.step import (
    Logits,
    Towers,
    apply_tp,
    check_plan,
    require_logits,
    require_towers,
    with_logits,
)
from tp_plans import Plan, Style, UnknownArchitectureError, with_expert_parallelism
from tp_plans.torch_styles import exchange_class

logger = logging.getLogger(__name__)

PlanSource = Plan | Mapping[str, Style | str] | str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Parallelism:
    """What to do with a model on a mesh; the result of :func:`resolve_parallelism`.

    Args:
        facts: what was asked of the model.
        plan: the checked plan, or ``None`` where layers stay replicated; a dict of torch's styles, which nothing can
            check, only through ``fsdp_runtime.nemo``.
        findings: warnings of the plan check.
        tp_mesh: the axis that layers are sharded over, ``None`` without a plan.
        expert_plan: the rules of the axis ``ep``, ``None`` where experts are not dispatched.
        ep_mesh: the axis that experts are divided over.
        shared_mesh: the axis whose ranks have the same tokens and divide them before they send them, ``None`` where
            every rank has its own.
        expert_exchange: how tokens travel to their experts.
        expert_fsdp_mesh: the axis, or the two axes (replicas, shards), of FSDP2 for experts.
        cp_mesh: the axis that sequences are sharded over, ``None`` where attention is left alone.
        cp_load_balancer: the tokens that each rank of ``cp`` holds.
        context_parallel: how queries meet the keys of the other ranks of ``cp``.
        packed_sequences: rows hold several documents, which are kept apart.
        activation_checkpointing: the mode.
        recompute: paths of the modules that recompute their activations.
        compile_options: keywords of ``torch.compile``, ``None`` where nothing is compiled.
        async_tensor_parallel: the compiler overlaps products with collectives of sequence parallelism.
        fsdp_mesh: the axis, or the two axes (replicas, shards), of FSDP2; ``None`` where it is not needed.
        fsdp: the settings of FSDP2, with ``gradient_divide_factor`` resolved.
        fsdp_dtypes: how FSDP2 keeps the dtypes that the model computes in.
        check_inputs: compare the inputs of every forward over ``tp`` and ``cp``.
        shared_prefixes: the model takes rows of ``pack_tree``.
    """

    facts: ModelFacts
    plan: Plan | Mapping[str, ParallelStyle] | None = None
    findings: tuple[str, ...] = ()
    tp_mesh: DeviceMesh | None = None
    expert_plan: Plan | None = None
    ep_mesh: DeviceMesh | None = None
    shared_mesh: DeviceMesh | None = None
    expert_exchange: ExpertExchange = "all_to_all"
    expert_fsdp_mesh: DeviceMesh | None = None
    cp_mesh: DeviceMesh | None = None
    cp_load_balancer: LoadBalancer = "headtail"
    context_parallel: ContextParallel = "allgather"
    packed_sequences: bool = False
    activation_checkpointing: ActivationCheckpointing = "none"
    recompute: tuple[str, ...] = ()
    compile_options: Mapping[str, Any] | None = None
    async_tensor_parallel: bool = False
    fsdp_mesh: DeviceMesh | None = None
    fsdp: FSDPOptions = field(default_factory=FSDPOptions)
    fsdp_dtypes: FSDPDtypes = field(default_factory=FSDPDtypes)
    check_inputs: bool = False
    shared_prefixes: bool = False

    @property
    def structure(self) -> ModelStructure:
        """The model's blocks, embedding and head."""
        return self.facts.structure

    def apply(self, model: nn.Module) -> None:
        """Apply packing, TP, EP, CP, activation checkpointing, compile and FSDP2, in that order and in place.

        Args:
            model: the model that was resolved.
        """
        with refuse_stale_optimizers(model):
            apply_packing(model, self)
            apply_tp(model, self)
            apply_ep(model, self)
            apply_cp(model, self)
            apply_shared_prefixes(model, self)
            apply_ac(model, self)
            apply_compile(model, self)
            apply_fsdp(model, self)
        step_meshes_apart()
        refuse_pickle(model)
        if self.check_inputs:
            apply_input_check(model, tp_mesh=self.tp_mesh, cp_mesh=self.cp_mesh)


def resolve_parallelism(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: PlanSource = "auto",
    sequence_parallel: bool = False,
    context_parallel: ContextParallel = "allgather",
    cp_load_balancer: LoadBalancer = "headtail",
    cp_attention: bool = True,
    packed_sequences: bool = False,
    logits: Logits = "sharded",
    towers: Towers = "sharded",
    activation_checkpointing: ActivationCheckpointing = "none",
    compile: bool | Mapping[str, Any] = False,  # noqa: A002  # torch's word
    async_tensor_parallel: bool = False,
    fsdp: FSDPOptions | None = None,
    check_inputs: bool = False,
    shared_prefixes: bool = False,
    expert_exchange: ExpertExchange = "all_to_all",
) -> Parallelism:
    """Check everything that :func:`parallelize` does to a model, and change nothing.

    Apply the result with ``parallelism.apply(model)``, or step by step with ``apply_packing``, ``apply_tp``,
    ``apply_cp``, ``apply_ac``, ``apply_compile`` and ``apply_fsdp``, each called with ``(model, parallelism)``, in this
    order.

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
            ``tp_plans.torch_styles.TokenExchange``.

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
        >>> parallelism.recompute
        ('0.0', '0.1')
        >>> parallelism.apply(model)
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is of type {type(model).__name__}, not a torch.nn.Module")
    require_axes(mesh)
    options = FSDPOptions() if fsdp is None else fsdp
    if not isinstance(options, FSDPOptions):
        raise OptionError(f"fsdp is of type {type(fsdp).__name__}, not FSDPOptions")
    shards = _fsdp_mesh(mesh, options)
    tp, cp = axis_size(mesh, "tp"), axis_size(mesh, "cp")
    require_logits(logits)
    require_towers(towers)
    if plan is None and sequence_parallel:
        raise OptionError("sequence_parallel=True needs a plan, and plan=None was given")
    if plan is None and tp > 1:
        logger.warning("plan=None on a mesh with tp=%d: every rank of tp computes the same", tp)
    ep = expert_axis_size(mesh)
    if (cp > 1 or ep > 1) and options.gradient_divide_factor is None:
        options = replace(options, gradient_divide_factor=float(_ranks_with_different_batches(mesh)))
    if async_tensor_parallel:
        compile = async_compile_options(mesh, compile, sequence_parallel=sequence_parallel)  # noqa: A001

    def resolve_plan() -> Plan | None:
        if ep > 1 and tp == 1 and plan == "auto":
            return None
        try:
            resolved = resolve_adapted_plan(
                plan,
                model,
                sequence_parallel=sequence_parallel,
                mesh=submesh(mesh, "tp") if tp > 1 else None,
                towers_tp=tp if plan == "auto" and towers == "sharded" else None,
            )
            return with_logits(resolved, logits)
        except UnknownArchitectureError as error:
            if ep == 1 or plan != "auto" or sequence_parallel:
                raise
            logger.warning("only experts are sharded, and every rank of tp computes all other layers: %s", error)
            return None

    parallelism = resolve_on(
        model,
        resolve_plan=resolve_plan if plan is not None else None,
        tp_mesh=submesh(mesh, "tp") if tp > 1 else None,
        cp_mesh=mesh["cp"] if cp > 1 and cp_attention else None,
        context_parallel=context_parallel,
        cp_load_balancer=cp_load_balancer,
        packed_sequences=packed_sequences,
        activation_checkpointing=activation_checkpointing,
        compile_options=None if compile is False else {} if compile is True else compile,
        async_tensor_parallel=async_tensor_parallel,
        fsdp_mesh=shards,
        fsdp=options,
        ep_mesh=submesh(mesh, "ep") if ep > 1 else None,
        shared_mesh=submesh(mesh, "tp") if ep > 1 and tp > 1 else None,
        expert_exchange=expert_exchange,
        expert_fsdp_mesh=expert_fsdp_mesh(mesh) if ep > 1 and shards is not None else None,
    )
    if shared_prefixes:
        check_shared_prefixes(parallelism)
    return replace(parallelism, check_inputs=check_inputs, shared_prefixes=shared_prefixes)


def resolve_on(
    model: nn.Module,
    *,
    resolve_plan: Any = None,
    tp_mesh: DeviceMesh | None = None,
    cp_mesh: DeviceMesh | None = None,
    context_parallel: ContextParallel = "allgather",
    cp_load_balancer: LoadBalancer = "headtail",
    packed_sequences: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
    compile_options: Mapping[str, Any] | None = None,
    async_tensor_parallel: bool = False,
    fsdp_mesh: DeviceMesh | None = None,
    fsdp: FSDPOptions | None = None,
    allow_dtensors: bool = False,
    ep_mesh: DeviceMesh | None = None,
    shared_mesh: DeviceMesh | None = None,
    expert_exchange: ExpertExchange = "all_to_all",
    expert_fsdp_mesh: DeviceMesh | None = None,
) -> Parallelism:
    """Check a model against one mesh per axis, whatever the axes are called; the model is not changed.

    Args:
        model: the model.
        resolve_plan: returns the plan, or a dict of torch's styles; called only where ``tp`` has more than one rank.
        tp_mesh: the axis of tensor parallelism.
        cp_mesh: the axis of context parallelism whose attention is to be replaced.
        context_parallel: see :func:`resolve_parallelism`.
        cp_load_balancer: the tokens that each rank of ``cp`` holds.
        packed_sequences: see :func:`resolve_parallelism`.
        activation_checkpointing: the mode.
        compile_options: keywords of ``torch.compile``.
        async_tensor_parallel: see :func:`resolve_parallelism`.
        fsdp_mesh: the axis or axes of FSDP2.
        fsdp: settings of FSDP2.
        allow_dtensors: accept parameters that are DTensors already, unless a plan is to be applied.
        ep_mesh: the axis of expert parallelism.
        shared_mesh: the axis whose ranks have the same tokens.
        expert_exchange: how tokens travel to their experts.
        expert_fsdp_mesh: the axis or axes of FSDP2 for experts.

    Returns:
        The resolved parallelism.

    Raises:
        ModelError: see :func:`resolve_parallelism`.
        OptionError: see :func:`resolve_parallelism`.
        tp_plans.TpPlansError: no plan is known, or it does not fit the model.
    """
    require_load_balancer(cp_load_balancer)
    require_context_parallel(context_parallel)
    if runtime_state(model).offloaded is not None:
        raise ModelError("tensors of the model are offloaded to host memory: call onload(model) before parallelize")
    _require_not_wrapped(model)
    has_plan = resolve_plan is not None and tp_mesh is not None and tp_mesh.size() > 1
    if has_plan or not allow_dtensors:
        _require_plain_parameters(model)
    options = fsdp or FSDPOptions()
    facts = ModelFacts.of(model)
    structure = facts.structure
    recompute = modules_to_recompute(structure, activation_checkpointing)
    check_fsdp_options(model, options)
    if cp_mesh is not None:
        check_context_parallel(facts, context_parallel)
    if packed_sequences:
        check_packing(facts)
    if compile_options is not None:
        check_compile_options(compile_options)
    plan = resolve_plan() if has_plan or (ep_mesh is not None and resolve_plan is not None) else None
    expert_plan = None
    if ep_mesh is not None:
        exchange_class(expert_exchange)
        plan_of_tp, plan = plan, with_expert_parallelism(plan, model)
        expert_plan = plan.on_axis("ep")
        check_adapted_experts(model, expert_plan, plan_of_tp, tp=1 if shared_mesh is None else shared_mesh.size())
    tp = tp_mesh.size() if tp_mesh is not None and has_plan else 1
    if cp_mesh is not None and context_parallel == "ulysses":
        check_heads_over_cp(facts, plan, cp=cp_mesh.size(), tp=tp)
    findings: tuple[str, ...] = ()
    if isinstance(plan, Plan) and (tp > 1 or expert_plan is not None):
        checked = plan if tp > 1 or expert_plan is None else expert_plan
        findings = check_plan(model, checked, tp=tp, ep=1 if ep_mesh is None else ep_mesh.size())
        plan = plan.on_axis("tp") if tp > 1 else None
    dtypes = FSDPDtypes()
    if fsdp_mesh is not None:
        dtypes = fsdp_dtypes(model, structure, options, expert_modules(model, expert_plan))
    resolved = Parallelism(
        facts=facts,
        plan=plan,
        findings=findings,
        tp_mesh=tp_mesh if plan is not None else None,
        expert_plan=expert_plan,
        ep_mesh=ep_mesh,
        shared_mesh=shared_mesh,
        expert_exchange=expert_exchange,
        expert_fsdp_mesh=expert_fsdp_mesh,
        cp_mesh=cp_mesh,
        cp_load_balancer=cp_load_balancer,
        context_parallel=context_parallel,
        packed_sequences=packed_sequences,
        activation_checkpointing=activation_checkpointing,
        recompute=recompute,
        compile_options=compile_options,
        async_tensor_parallel=async_tensor_parallel,
        fsdp_mesh=fsdp_mesh,
        fsdp=options,
        fsdp_dtypes=dtypes,
    )
    verify_context_parallelism(resolved)
    return resolved


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
                f"{path} is a DTensor over {axes} already: parallelize a fresh model; to add steps of your own, call "
                "resolve_parallelism on the fresh model and then the steps one by one, such as apply_fsdp"
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
