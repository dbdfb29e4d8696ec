"""Apply TP, EP, CP, activation checkpointing, compile and FSDP2 to a model, in that order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.parallelism import resolve_parallelism
from fsdp_runtime.step import Step
from fsdp_runtime.steps.checkpointing import ActivationCheckpointing, CheckpointMode
from fsdp_runtime.steps.compile import Compile
from fsdp_runtime.steps.context.methods import Method
from fsdp_runtime.steps.context.step import ContextParallel
from fsdp_runtime.steps.documents.step import PackedSequences
from fsdp_runtime.steps.fsdp.step import FSDP2
from fsdp_runtime.steps.tensor.step import Logits, PlanSource, TensorParallel


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: PlanSource | TensorParallel = "auto",
    sequence_parallel: bool = False,
    context_parallel: Method | ContextParallel | None = None,
    packed_sequences: bool | PackedSequences = False,
    logits: Logits = "sharded",
    activation_checkpointing: CheckpointMode | ActivationCheckpointing = "none",
    compile: bool | Compile = False,  # noqa: A002  # torch's word
    fsdp: FSDP2 | None = None,
    steps: Sequence[Step[Any]] = (),
) -> nn.Module:
    """Parallelize a model over a mesh, in place.

    Every rank checks everything before the first module changes: the call is :func:`resolve_parallelism`, followed by
    ``parallelism.apply(model)``.  ``describe_parallelism(model)`` shows the result.  A keyword takes the short form
    below, or the step of ``fsdp_runtime.steps`` with all its options:
    ``context_parallel=ContextParallel("ring", load_balancer=None)``.

    If ranks hold different values, such as a new head that each rank drew from its own seed, all ranks take the first
    rank's values, as ``DistributedDataParallel`` does, and one warning names these tensors.

    Args:
        model: the model, on the meta device (call ``load_weights`` afterwards) or with data, the same on every rank.
        mesh: from ``MeshSpec(...).build()`` or ``adopt_mesh(...)``, or any mesh with those axis names.
        plan: ``"auto"`` (the architecture's plan, else one that is inferred and verified by running a small
            copy of the model on the ranks of ``tp``), ``"own"``, ``"transformers"`` or ``"inferred"`` (with its
            doubts) as in ``tp_plans.plan_for``, a plan, a dict of pattern to style or style name, a dotted path to one,
            or ``None`` to replicate every layer.  Not used where ``tp`` has size 1.
        sequence_parallel: shard activations between blocks over ``tp``, on the sequence dim.
        context_parallel: the method of attention over ``cp``: ``"allgather"`` (keys and values are gathered),
            ``"ulysses"`` (heads are exchanged for sequence by all-to-all) or ``"ring"`` (keys and values circulate).
            ``None`` is ``"allgather"`` on a mesh with ``cp``.
        packed_sequences: ``True`` for rows of several documents, which then do not see one another.  A document
            begins where ``position_ids`` restart, or where ``seq_idx`` or ``cu_seq_lens_q`` says.
        logits: ``"sharded"`` on the vocabulary (a DTensor, which ``rl_logprobs`` takes), or ``"full"``: a
            plain tensor on every rank.  A forward that gets ``labels`` gathers them for the model's own loss.
            ``F.cross_entropy`` of sharded logits raises "got mixed torch.Tensor and DTensor": use
            ``rl_logprobs.token_logprobs``.
        activation_checkpointing: ``"none"``; ``"mlp"``, ``"block"`` or ``"selective"`` to recompute those
            parts in backward; or a ``SelectiveCheckpoint``, which names the operators to keep.
        compile: ``True`` compiles every block in place; ``Compile({"mode": ...})`` sets keywords of ``torch.compile``.
        fsdp: settings of FSDP2: dtypes, CPU offload, resharding, prefetching, frozen parameters.
        steps: steps that have no keyword (``ExpertParallel``, ``SharedPrefixes``, ``CheckInputs``), or your own.

    Returns:
        The same model.

    Raises:
        MeshError: the mesh has other axis names.
        ModelError: no blocks are found, the model is already parallelized or offloaded, no module would recompute, the
            model's sequences cannot be sharded over ``cp`` or packed, or its samples cannot share prefixes.
        BackendError: an option needs a device that is not available.
        OptionError: an option is not allowed, or needs an axis that the mesh lacks; or a module of experts has
            trainable parameters of several dtypes.
        tp_plans.TpPlansError: no plan is known, or it does not fit the model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy
        >>> from fsdp_runtime import FSDP2, MeshSpec, parallelize
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]))
        >>> mesh = MeshSpec(dp_shard=-1).build(device_type="cpu")
        >>> fsdp = FSDP2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        >>> model = parallelize(model, mesh, activation_checkpointing="block", fsdp=fsdp)
        >>> type(next(model.parameters())).__name__
        'DTensor'
    """
    resolve_parallelism(
        model,
        mesh,
        plan=plan,
        sequence_parallel=sequence_parallel,
        context_parallel=context_parallel,
        packed_sequences=packed_sequences,
        logits=logits,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        fsdp=fsdp,
        steps=steps,
    ).apply(model)
    return model
