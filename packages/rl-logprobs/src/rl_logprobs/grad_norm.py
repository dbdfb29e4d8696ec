"""Gradient norm and clipping for parameters that lie on any mix of meshes, placements and devices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_logprobs._torch_compat import foreach_mul_
from rl_logprobs.errors import NonFiniteNormError, OptionError
from rl_logprobs.local_gradients import LocalGradients, local_gradients
from rl_logprobs.local_norms import norm_power
from rl_logprobs.partial_sums import complete_gradients
from rl_logprobs.reduction import Domain, domains

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
    norm, _ = _norm_and_parts(_distinct(parameters), norm_type, groups, error_if_nonfinite)
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
    norm, parts = _norm_and_parts(_distinct(parameters), norm_type, groups, error_if_nonfinite)
    _scale(parts, max_norm, norm)
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
    _scale(local_gradients(_distinct(parameters)).parts.values(), max_norm, total_norm)


def _norm_and_parts(
    parameters: Sequence[torch.Tensor],
    order: float,
    groups: Sequence[dist.ProcessGroup],
    error_if_nonfinite: bool,
) -> tuple[torch.Tensor, Collection[torch.Tensor]]:
    """The norm of the parameters' gradients, and this rank's parts of them."""
    gradients = local_gradients(parameters)
    norm = _norms({"": parameters}, parameters, gradients, order, groups)[""]
    if error_if_nonfinite and not norm.isfinite():
        raise NonFiniteNormError(
            f"the {order:g}-norm of the gradients is {norm.item()}; skip this step, or look for the loss "
            f"or activation that overflowed"
        )
    return norm, gradients.parts.values()


def _norms(
    listed: Mapping[str, Sequence[torch.Tensor]],
    everything: Sequence[torch.Tensor],
    gradients: LocalGradients,
    order: float,
    groups: Sequence[dist.ProcessGroup],
) -> dict[str, torch.Tensor]:
    if not order > 0:
        raise OptionError(f"norm_type must be positive or infinity, got {order}")
    largest = order == math.inf
    home = everything[0].device if everything else torch.device("cpu")
    complete = complete_gradients(gradients)
    powers = []
    for domain, members in domains(everything, groups).items():
        device, here = domain.device(home), {id(parameter) for parameter in members}
        chosen = [here.intersection(map(id, parameters)) for parameters in listed.values()]
        rows = torch.stack([_shared_power(complete, keys, domain, float(order), device) for keys in chosen])
        powers.append((domain.largest(rows) if largest else domain.sum(rows)).to(home))
    total = torch.stack(powers).amax(0) if largest else torch.stack(powers).sum(0).pow(1 / order)
    wide = any(part.dtype is torch.float64 for part in gradients.parts.values())
    return dict(zip(listed, total.to(torch.float64 if wide else torch.float32).unbind(), strict=True))


def _shared_power(
    gradients: LocalGradients, chosen: Set[int], domain: Domain, order: float, device: torch.device
) -> torch.Tensor:
    """This rank's part of a domain's power sum, where parts that several ranks hold are shared out."""
    by_share: dict[float, list[torch.Tensor]] = {}
    for layout, keys in gradients.alike.items():
        share = 1.0 if order == math.inf else domain.share(layout)
        by_share.setdefault(share, []).extend(gradients.parts[key] for key in keys if key in chosen)
    parts = [norm_power(tensors, order, device) * share for share, tensors in by_share.items() if tensors]
    if not parts:
        return norm_power([], order, device)
    return torch.stack(parts).amax() if order == math.inf else torch.stack(parts).sum()


def _scale(parts: Iterable[torch.Tensor], max_norm: float, total_norm: float | torch.Tensor) -> None:
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else torch.as_tensor(total_norm)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and factor == 1:  # where looking costs nothing
        return
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        alike.setdefault((part.device, part.dtype), []).append(part)
    for (device, _), gradients in alike.items():
        foreach_mul_(gradients, factor.to(device))


def _distinct(parameters: Parameters) -> list[torch.Tensor]:
    """Each parameter once, in order: tied parameters appear under several names."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return list({id(parameter): parameter for parameter in listed}.values())


def _check_max_norm(max_norm: float) -> None:
    if not max_norm >= 0:
        raise OptionError(f"max_norm must be zero or more, got {max_norm}")
