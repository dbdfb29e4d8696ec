"""Gradient norm and clipping for parameters that lie on any mix of meshes, placements and devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_logprobs._torch_compat import foreach_mul_
from rl_logprobs.errors import DtypeError, NonFiniteNormError, OptionError
from rl_logprobs.local_norms import norm_power
from rl_logprobs.partial_sums import complete_gradients, local_gradient
from rl_logprobs.reduction import Domain, domains, layout

Parameters = torch.Tensor | Iterable[torch.Tensor]


@torch.no_grad()
def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Norm of all gradients as one vector, the same number on every rank and whatever the mesh.

    Each parameter counts once: shards are summed over their mesh axes, replicas are not, partial sums are
    completed first (their gradients stay as they are), and plain tensors are taken to be equal on all ranks.
    One collective for each mesh that is not part of another parameter's mesh, and one more for each kind of partial
    sum.  (A mesh of several axes that is not the whole world gets a process group of its own at the first call; if
    ``init_process_group`` was given a ``device_id``, it takes one collective an axis instead.)

    Args:
        parameters: a tensor or an iterable of tensors, DTensors and plain ones mixed; those without a
            gradient count as zero.  Every rank must pass the same parameters, gradient or not.
        norm_type: order of the norm, positive, ``math.inf`` included.
        groups: process groups whose ranks hold different parameters, such as the stages of a pipeline; the
            norm then covers all of them.
        error_if_nonfinite: wait for the norm and raise if it is not finite.

    Returns:
        A plain 0-d tensor, float32 (float64 if a gradient is), on the device of the first parameter.  The
        host does not wait for it.

    Raises:
        OptionError: ``norm_type`` is not positive.
        DtypeError: a gradient is sparse or not floating point.
        NonFiniteNormError: if asked for.
    """
    norm = grad_norms({"": parameters}, norm_type, groups=groups)[""]
    if error_if_nonfinite and not norm.isfinite():
        raise NonFiniteNormError(
            f"the {norm_type:g}-norm of the gradients is {norm.item()}; skip this step, or look for the loss "
            f"or activation that overflowed"
        )
    return norm


@torch.no_grad()
def grad_norms(
    parameter_groups: Mapping[str, Parameters],
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> dict[str, torch.Tensor]:
    """The norm of each named group of parameters, from the same collectives as one norm.

    Args:
        parameter_groups: name to parameters.  A parameter may be in several groups.
        norm_type: as for ``grad_norm``.
        groups: as for ``grad_norm``.

    Returns:
        A 0-d norm for each name, as ``grad_norm`` returns it.

    Raises:
        OptionError, DtypeError: as ``grad_norm``.
    """
    if not norm_type > 0:
        raise OptionError(f"norm_type must be positive or infinity, got {norm_type}")
    order, largest = float(norm_type), norm_type == math.inf
    listed = {name: _distinct(parameters) for name, parameters in parameter_groups.items()}
    everything = _distinct(parameter for parameters in listed.values() for parameter in parameters)
    _check_gradients(everything)
    home = everything[0].device if everything else torch.device("cpu")
    local = complete_gradients(everything)
    powers = []
    for domain, members in domains(everything, groups).items():
        device, here = domain.device(home), {id(p) for p in members}
        rows = []
        for parameters in listed.values():
            mine = [p for p in parameters if id(p) in local and id(p) in here]
            rows.append(_shared_power(mine, local, domain, order, device))
        power = domain.largest(torch.stack(rows)) if largest else domain.sum(torch.stack(rows))
        powers.append(power.to(home))
    total = torch.stack(powers).amax(0) if largest else torch.stack(powers).sum(0).pow(1 / order)
    wide = any(p.grad is not None and p.grad.dtype is torch.float64 for p in everything)
    return dict(zip(listed, total.to(torch.float64 if wide else torch.float32).unbind(), strict=True))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; return the norm before.

    Args:
        parameters: as for ``grad_norm``.
        max_norm: not negative.
        norm_type: as for ``grad_norm``.
        groups: as for ``grad_norm``.
        error_if_nonfinite: as for ``grad_norm``.

    Returns:
        The norm before clipping, as ``grad_norm`` returns it.

    Raises:
        OptionError: ``max_norm`` is negative or NaN.
        OptionError, DtypeError, NonFiniteNormError: as ``grad_norm``; the gradients are then untouched.
    """
    _check_max_norm(max_norm)
    listed = _distinct(parameters)
    norm = grad_norm(listed, norm_type, groups=groups, error_if_nonfinite=error_if_nonfinite)
    _scale(listed, max_norm, norm)
    return norm


@torch.no_grad()
def clip_grads_with_norm_(parameters: Parameters, max_norm: float, total_norm: float | torch.Tensor) -> None:
    """Scale all gradients in place by ``max_norm / (total_norm + 1e-6)``, if that is less than one.

    The same formula as torch's, without a collective and without waiting for the norm.

    Args:
        parameters: a tensor or an iterable of tensors, DTensors and plain ones mixed.
        max_norm: not negative.
        total_norm: the norm of all gradients, usually from ``grad_norm``.

    Raises:
        OptionError: ``max_norm`` is negative or NaN.
        DtypeError: a gradient is sparse or not floating point.
    """
    _check_max_norm(max_norm)
    listed = _distinct(parameters)
    _check_gradients(listed)
    _scale(listed, max_norm, total_norm)


def _scale(parameters: Sequence[torch.Tensor], max_norm: float, total_norm: float | torch.Tensor) -> None:
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_gradient(parameter.grad)
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else torch.as_tensor(total_norm)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and factor == 1:  # where looking costs nothing
        return
    for (device, _), gradients in alike.items():
        foreach_mul_(gradients, factor.to(device))


def _shared_power(
    parameters: Sequence[torch.Tensor],
    local: Mapping[int, torch.Tensor],
    domain: Domain,
    order: float,
    device: torch.device,
) -> torch.Tensor:
    """This rank's part of a domain's power sum, where parts that several ranks hold are shared out."""
    alike: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        alike.setdefault(layout(parameter.grad), []).append(parameter)
    by_share: dict[float, list[torch.Tensor]] = {}
    for members in alike.values():
        gradient = members[0].grad
        share = 1.0 if order == math.inf or gradient is None else domain.share(gradient)
        by_share.setdefault(share, []).extend(local[id(parameter)] for parameter in members)
    parts = [norm_power(tensors, order, device) * share for share, tensors in by_share.items()]
    if not parts:
        return norm_power([], order, device)
    return torch.stack(parts).amax() if order == math.inf else torch.stack(parts).sum()


def _distinct(parameters: Parameters) -> list[torch.Tensor]:
    """Each parameter once, in order: tied parameters appear under several names."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return list({id(parameter): parameter for parameter in listed}.values())


def _check_gradients(parameters: Sequence[torch.Tensor]) -> None:
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None or (gradient.layout is torch.strided and gradient.is_floating_point()):
            continue
        raise DtypeError(
            f"gradient {index} of shape {tuple(gradient.shape)} is {gradient.layout} {gradient.dtype}; norms "
            f"need dense floating-point gradients"
        )


def _check_max_norm(max_norm: float) -> None:
    if not max_norm >= 0:
        raise OptionError(f"max_norm must be zero or more, got {max_norm}")
