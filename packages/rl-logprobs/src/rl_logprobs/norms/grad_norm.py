"""Gradient norm, clipping and skipped steps for parameters on any mix of meshes, placements and devices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_logprobs._torch_compat import foreach_mul_
from rl_logprobs.errors import DtypeError, NonFiniteNormError, OptionError, ShapeError
from rl_logprobs.norms.chunk_table import fits_table, table_scale_
from rl_logprobs.norms.local_gradients import LocalGradients, complete_partial_sums, local_gradients
from rl_logprobs.norms.local_norms import norm_power
from rl_logprobs.norms.reduce_groups import ReduceGroup, counts, reduce_groups, stages_of
from rl_logprobs.softmax.backends import runs_triton
from rl_logprobs.tensors import has_cpu_costs

Parameters = torch.Tensor | Iterable[torch.Tensor]


@torch.no_grad()
def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Return the norm of all gradients as one vector, the same number on every rank.

    Each parameter counts once: shards are summed over their mesh axes, replicated gradients count once, partial sums
    are completed first (in copies), and plain tensors are assumed to be equal on all ranks.  One collective for each
    mesh that is not part of another parameter's mesh, and one more for each kind of partial sum.  (A mesh of several
    axes that is not the world gets a new process group at the first call; if ``init_process_group`` was given a
    ``device_id``, it needs one collective per axis instead.)

    Args:
        parameters: a tensor or an iterable of tensors, DTensors and plain tensors mixed; parameters without a
            gradient count as zero.  Every rank must pass the same parameters, also those without a gradient.
        norm_type: order of the norm, positive, ``math.inf`` included.
        groups: process groups of ranks with different parameters, such as pipeline stages of another library; it then
            covers the parameters of all their ranks.  Stages of ``fsdp_runtime.parallelize`` need none: the norm always
            covers all stages, a parameter of several stages counts once, and the list of a stage may be empty.
        error_if_nonfinite: wait for the norm and raise if it is not finite.

    Returns:
        A plain 0-d tensor, float32 (float64 if a gradient is float64), on the device of the first parameter.  The
        host does not wait for it.

    Raises:
        OptionError: ``norm_type`` is not positive.
        DtypeError: a gradient is sparse or not floating point.
        PlacementError: a gradient is a partial reduction other than a sum or an average, or FSDP2 has not reduced it
            yet.
        NonFiniteNormError: the norm is not finite and ``error_if_nonfinite`` is set.

    Example:
        >>> import torch
        >>> from rl_logprobs import grad_norm
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> grad_norm([weight])
        tensor(5.)
    """
    norm, _ = _norm_and_parts(_distinct(parameters), norm_type, groups, error_if_nonfinite)
    return norm


@torch.no_grad()
def grad_norms(
    parameter_groups: Mapping[str, Parameters],
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> dict[str, torch.Tensor]:
    """Return the norm of each named group of parameters, with the same collectives as one norm.

    Args:
        parameter_groups: name to parameters: a tensor or an iterable of tensors, DTensors and plain tensors mixed.
            A parameter may be in several groups.  Every rank must pass the same parameters.
        norm_type: order of the norm, positive, ``math.inf`` included.
        groups: as for ``grad_norm``.

    Returns:
        The norms by name, each as ``grad_norm`` returns and refuses it.

    Example:
        >>> import torch
        >>> from rl_logprobs import grad_norms
        >>> weight, bias = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> weight.grad, bias.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        >>> grad_norms({"weight": weight, "all": [weight, bias]})
        {'weight': tensor(5.), 'all': tensor(13.)}
    """
    listed = {name: _distinct(members) for name, members in parameter_groups.items()}
    everything = _distinct(parameter for members in listed.values() for parameter in members)
    return _norms(listed, everything, local_gradients(everything), norm_type, groups)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; return the norm before clipping.

    The norm is ``grad_norm``'s: the same number on every rank, each parameter counted once.

    Args:
        parameters: as for ``grad_norm``.
        max_norm: the largest norm after clipping, not negative.
        norm_type: order of the norm, positive, ``math.inf`` included.
        groups: as for ``grad_norm``.
        error_if_nonfinite: wait for the norm and raise if it is not finite.

    Raises:
        OptionError: ``max_norm`` is negative or NaN.
        LogprobsError: as ``grad_norm``.  After any error the gradients are unchanged.

    Example:
        >>> import torch
        >>> from rl_logprobs import clip_grad_norm_
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    _check_max_norm(max_norm)
    norm, parts = _norm_and_parts(_distinct(parameters), norm_type, groups, error_if_nonfinite)
    _scale(parts, max_norm, norm)
    return norm


@torch.no_grad()
def clip_grads_with_norm_(parameters: Parameters, max_norm: float, total_norm: float | torch.Tensor) -> None:
    """Scale all gradients in place by ``max_norm / (total_norm + 1e-6)``, if that is less than one.

    The formula of ``torch.nn.utils.clip_grads_with_norm_``.  Needs no collective and does not wait for the norm.

    Args:
        parameters: a tensor or an iterable of tensors, DTensors and plain tensors mixed.
        max_norm: the largest norm after clipping, not negative.
        total_norm: the norm of all gradients, usually from ``grad_norm``; a number or a 0-d tensor.

    Raises:
        OptionError: ``max_norm`` is negative or NaN, or ``total_norm`` is on the meta device.
        ShapeError: ``total_norm`` is not one real number.
        DtypeError: a gradient is sparse or not floating point.

    Example:
        >>> import torch
        >>> from rl_logprobs.norms.grad_norm import clip_grads_with_norm_
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grads_with_norm_([weight], max_norm=1.0, total_norm=5.0)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    _check_max_norm(max_norm)
    _scale(local_gradients(_distinct(parameters)).parts.values(), max_norm, total_norm)


def should_skip_step(total_norm: torch.Tensor, *, max_norm: float = math.inf) -> torch.Tensor:
    """Return whether to skip an optimizer step with gradients of this norm, as a tensor: the host does not wait.

    ``if should_skip_step(norm): optimizer.zero_grad()`` waits for the norm, and every rank decides the same, because
    all have the same norm.  A fused optimizer can skip on the device, as with torch's gradient scaler:
    ``optimizer.found_inf = should_skip_step(norm).float()``.  Clipping by a norm that is not finite leaves NaN in the
    gradients, so clear them before the next backward pass.

    Args:
        total_norm: norm from ``grad_norm`` or ``clip_grad_norm_``; any shape, such as the stacked norms of groups.
        max_norm: also skip steps with a larger norm than this, which may come from a bad batch.

    Returns:
        0-d bool on the norm's device: true if any norm is infinite, NaN or above ``max_norm``.

    Raises:
        OptionError: ``max_norm`` is not positive.
        DtypeError: the norm is complex or sparse.

    Example:
        >>> import torch
        >>> from rl_logprobs import should_skip_step
        >>> should_skip_step(torch.tensor(3.0)), should_skip_step(torch.tensor(3.0), max_norm=2.0)
        (tensor(False), tensor(True))
    """
    if not max_norm > 0:
        raise OptionError(f"max_norm must be positive, got {max_norm}; leave it out to skip only non-finite norms")
    if total_norm.is_complex() or total_norm.layout is not torch.strided:
        raise DtypeError(f"total_norm must be real and dense, got {total_norm.dtype} {total_norm.layout}")
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    return ~(norm.isfinite() & (norm <= float(max_norm))).all()


def _norm_and_parts(
    parameters: Sequence[torch.Tensor],
    norm_type: float,
    groups: Sequence[dist.ProcessGroup],
    error_if_nonfinite: bool,
) -> tuple[torch.Tensor, Collection[torch.Tensor]]:
    gradients = local_gradients(parameters)
    norm = _norms({"": parameters}, parameters, gradients, norm_type, groups)[""]
    if error_if_nonfinite and not norm.isfinite():
        raise NonFiniteNormError(
            f"the {norm_type:g}-norm of the gradients is {norm.item()}; skip this step, or find the loss "
            f"or activation that overflowed"
        )
    return norm, gradients.parts.values()


def _norms(
    listed: Mapping[str, Sequence[torch.Tensor]],
    everything: Sequence[torch.Tensor],
    gradients: LocalGradients,
    norm_type: float,
    groups: Sequence[dist.ProcessGroup],
) -> dict[str, torch.Tensor]:
    """Return the norm of each list of parameters; ``everything`` holds each parameter of the lists once."""
    if not norm_type > 0:
        raise OptionError(f"norm_type must be positive or infinity, got {norm_type}")
    is_max = norm_type == math.inf
    stages = stages_of(everything)
    result_device = everything[0].device if everything else torch.device("cpu") if stages is None else stages.device
    complete = complete_partial_sums(gradients)
    if not listed:
        return {}
    groups = [
        group for group in groups if stages is None or group is not stages.group
    ]  # the norm covers all stages anyway
    powers = []
    for group, members in reduce_groups(everything, groups).items():
        device, weights = group.device(result_device), _weights(complete, members, group, is_max=is_max)
        weighted = [[id(p) for p in parameters if id(p) in weights and counts(p)] for parameters in listed.values()]
        local_powers = [
            norm_power([complete.parts[key] for key in keys], [weights[key] for key in keys], float(norm_type), device)
            for keys in weighted
        ]
        local = torch.stack(local_powers)
        powers.append((group.max(local) if is_max else group.sum(local)).to(result_device))
    total = powers[0]
    if len(powers) > 1:
        total = torch.stack(powers).amax(0) if is_max else torch.stack(powers).sum(0)
    if stages is not None:
        over_stages = ReduceGroup(None, (stages.group,))
        total = total.to(stages.device)
        total = (over_stages.max(total) if is_max else over_stages.sum(total)).to(result_device)
    total = total if is_max else total.pow(1 / norm_type)
    dtypes = [part.dtype for part in gradients.parts.values()] if stages is None else [stages.dtype]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return dict(zip(listed, total.to(dtype).unbind(), strict=True))


def _weights(
    gradients: LocalGradients, members: Sequence[torch.Tensor], group: ReduceGroup, *, is_max: bool
) -> dict[int, float]:
    """Return the factor of each gradient of a group's parameters, by the parameter's ``id``."""
    # Replicated parts are down-weighted so that each element counts once.
    member_ids = {id(parameter) for parameter in members}
    weights: dict[int, float] = {}
    for placement, keys in gradients.by_placement.items():
        weight = 1.0 if is_max else group.replica_weight(placement)
        weights.update((key, weight) for key in keys if key in member_ids)
    return weights


def _scale(parts: Collection[torch.Tensor], max_norm: float, total_norm: float | torch.Tensor) -> None:
    given = total_norm if isinstance(total_norm, torch.Tensor) else torch.tensor(float(total_norm))
    norm = given.full_tensor() if isinstance(given, DTensor) else given
    if norm.dim() or norm.is_complex():
        raise ShapeError(f"total_norm must be one real number, got shape {tuple(norm.shape)} of {norm.dtype}")
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    if has_cpu_costs(factor.device) and factor == 1:  # reading the value costs nothing on a CPU
        return
    together: dict[tuple[torch.device, torch.dtype, bool], list[torch.Tensor]] = {}
    on_triton = {device: runs_triton(device) for device in {part.device for part in parts}}
    for part in parts:
        in_table = on_triton[part.device] and part.numel() > 0 and fits_table(part)
        together.setdefault((part.device, part.dtype, in_table), []).append(part)
    for (device, _, in_table), gradients in together.items():
        if factor.is_meta and device.type != "meta":
            raise OptionError(f"total_norm is on the meta device, where it has no value, and gradients are on {device}")
        (table_scale_ if in_table else foreach_mul_)(gradients, factor.to(device))


def _distinct(parameters: Parameters) -> list[torch.Tensor]:
    """Return each parameter once, in order: tied parameters appear under several names."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    other = next((member for member in listed if not isinstance(member, torch.Tensor)), None)
    if other is not None:
        raise DtypeError(f"parameters must be tensors, got one of type {type(other).__qualname__}")
    return list({id(parameter): parameter for parameter in listed}.values())


def _check_max_norm(max_norm: float) -> None:
    if not max_norm >= 0:
        raise OptionError(f"max_norm must be zero or more, got {max_norm}")
