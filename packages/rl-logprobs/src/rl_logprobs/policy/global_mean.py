"""One mean over a global batch, however the batch is cut into micro-batches, ranks and packed rows.

A gradient is a sum over tokens of weights that depend on counts of the whole batch.  The counts are reduced once per
batch (``mean_weights``); each micro-batch then contributes a plain weighted sum (``global_mean``), so that the sum over
micro-batches and ranks is the mean over the batch, and no part has a separate divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_logprobs.errors import DtypeError, OptionError, ShapeError
from rl_logprobs.policy.sequences import Sequences, check_count, check_mask
from rl_logprobs.tensors import require_same_device, statistics_dtype, wide_dtype

Per = Literal["token", "sequence", "group"]

# Axes of a mesh: ranks with other sequences, and ranks with the same tokens. Ranks of ``cp`` share sequences.
_DATA_AXES, _SAME_TOKENS = ("dp", "dp_replicate", "dp_shard"), ("tp", "pp")


@dataclass(frozen=True, eq=False)
class MeanWeights:
    """The denominators of a mean over one global batch; made by ``mean_weights``."""

    per: Per  # the unit of equal weight: each token, each sequence or each group
    count: torch.Tensor  # 0-d, the number of tokens, sequences or groups of the whole batch
    # ``[num_segments]``, the tokens of each sequence or group of the whole batch; None for tokens, and where each row
    # is a sequence
    segment_tokens: torch.Tensor | None
    length: float | None  # the constant that replaces the number of tokens of a sequence, or None
    gradient_divide_factor: float  # the divisor of the gradient reduction, which the loss is multiplied by
    cp_group: dist.ProcessGroup | None  # the ranks that hold other tokens of the same sequences, or None


@torch.no_grad()
def mean_weights(
    masks: torch.Tensor | Sequence[torch.Tensor],
    *,
    per: Per = "token",
    segments: torch.Tensor | Sequence[torch.Tensor] | None = None,
    num_segments: int | None = None,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    cp_group: dist.ProcessGroup | None = None,
    gradient_divide_factor: float | None = None,
    length: float | None = None,
    count: float | None = None,
) -> MeanWeights:
    """Count the scored tokens, sequences or groups of a global batch, in one or two small collectives.

    ``per="token"`` gives each token the same weight (DAPO's token-level loss over a batch, arXiv:2503.14476, section
    3.3); ``"sequence"`` each sequence, and within it each token (GRPO, arXiv:2402.03300, equation 3); ``"group"`` each
    group of responses to one prompt, and within it each token (prompt-level averaging of ScaleRL, arXiv:2510.13786).

    Args:
        masks: for each of this rank's micro-batches, nonzero at scored tokens: ``[..., tokens]``.
        per: the unit of equal weight.
        segments: for each micro-batch the number of each token's sequence or group, in ``[0, num_segments)`` and the
            same on all ranks.  Required for groups, and for sequences that are packed.  Without it each row is one
            sequence, and ``cp_group`` holds its other tokens.
        num_segments: the number of sequences or groups of the whole batch, with ``segments``.
        mesh: the mesh that the model is parallelized on.  Ranks of ``dp``, ``dp_replicate`` and ``dp_shard`` have other
            sequences, ranks of ``cp`` other tokens of the same sequences, ranks of ``tp`` and ``pp`` the same tokens.
        group: without ``mesh``, the process group, or groups, of ranks with other sequences (data parallelism); ``()``
            if all ranks have the same sequences.
        cp_group: without ``mesh``, the process group of ranks with other tokens of the same sequences.  Leave it, or
            the axis of the mesh, out if the values are gathered over it, as by ``gather_sequence``.
        gradient_divide_factor: the number by which the gradients' reduction divides their sum over ranks.  The default
            is the number of data-parallel ranks, by which DDP, FSDP2 and ``fsdp_runtime.parallelize`` divide.  Give 1
            for a plain sum (``FSDP2(gradient_divide_factor=1)``), and all its ranks for FSDP2 over ``cp`` too.
        length: divide each sequence's sum by this constant instead of its number of tokens (Dr. GRPO,
            arXiv:2503.20783).  With ``per="sequence"`` only.
        count: divide by this number of units instead of the units with a scored token, for example all sequences of a
            batch before filtering.

    Raises:
        OptionError: an option is outside its range, options contradict each other, or one of several ranks gives no
            ``mesh``, ``group`` or ``gradient_divide_factor``.
        ShapeError: segments and masks differ in shape or number, or a segment is out of range.
        DtypeError: segments are not integers.

    Example:
        >>> import torch
        >>> from rl_logprobs import global_mean, mean_weights
        >>> micro_batches = [torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[4.0, 0.0, 0.0]])]
        >>> masks = [torch.tensor([[1, 1, 1]]), torch.tensor([[1, 0, 0]])]
        >>> weights = mean_weights(masks)
        >>> sum(global_mean(values, mask, weights) for values, mask in zip(micro_batches, masks))
        tensor(3.2500)
    """
    mask_list = [masks] if isinstance(masks, torch.Tensor) else list(masks)
    _check_options(per, segments, num_segments, gradient_divide_factor, length, count)
    if not mask_list:
        raise OptionError("mean_weights needs at least one mask; a rank without tokens passes a mask of zeros")
    segment_list = [segments] if isinstance(segments, torch.Tensor) else segments
    if segment_list is not None and len(segment_list) != len(mask_list):
        raise ShapeError(f"{len(mask_list)} masks and {len(segment_list)} segments; give one of each per micro-batch")
    if num_segments is not None:
        check_count("num_segments", num_segments)
    require_same_device(**{f"masks[{index}]": mask for index, mask in enumerate(mask_list)})
    sparse = [mask.layout for mask in mask_list if mask.layout is not torch.strided]
    if sparse:
        raise DtypeError(f"masks must be dense, got {sparse[0]}")
    device = mask_list[0].device
    groups, cp_group = _groups(mesh, group, cp_group, gradient_divide_factor)
    if gradient_divide_factor is None:
        gradient_divide_factor = float(math.prod(data.size() for data in groups))
    total = torch.zeros((), dtype=wide_dtype(device), device=device)
    segment_tokens = None
    if segment_list is not None and num_segments is not None and per != "token":
        segment_tokens = total.new_zeros(num_segments)
        for index, mask in enumerate(mask_list):
            local = Sequences(segment_list[index], num_segments).check(mask != 0)
            segment_tokens += local.totals((mask != 0)[None])[0]
        _sum_over(segment_tokens, [*groups, cp_group])
        total = (segment_tokens > 0).sum().to(total.dtype)
    elif per == "token":
        for mask in mask_list:
            total += (mask != 0).sum()
        _sum_over(total, [*groups, cp_group])
    else:
        scored = [mask != 0 for mask in mask_list]
        row_tokens = torch.cat([Sequences().check(row).totals(row[None])[0].reshape(-1) for row in scored])
        _sum_over(row_tokens, [cp_group])
        total = (row_tokens > 0).sum().to(total.dtype)
        _sum_over(total, groups)
    return MeanWeights(
        per=per,
        count=total if count is None else torch.full_like(total, float(count)),
        segment_tokens=segment_tokens,
        length=length,
        gradient_divide_factor=gradient_divide_factor,
        cp_group=cp_group,
    )


def global_mean(
    values: torch.Tensor,
    mask: torch.Tensor,
    weights: MeanWeights | None = None,
    *,
    segments: torch.Tensor | None = None,
    per: Per = "token",
    num_segments: int | None = None,
) -> torch.Tensor:
    """Return this micro-batch's part of the mean over the global batch of its weights.

    The sum of the parts over micro-batches and ranks, divided by the weights' ``gradient_divide_factor``, is the mean;
    call ``backward`` on each part.  A batch without any scored token has the mean 0.

    Args:
        values: ``[..., tokens]`` floating point, differentiable.
        mask: of the same shape, nonzero at scored tokens: the mask that the weights were made from.  To reject a token
            and count it nevertheless, set its value to 0; to count it no more, leave it out of both masks.
        weights: the weights of the batch; None if this micro-batch is the whole batch.
        segments: the sequences or groups of the tokens, as in the weights.
        per: without weights, the unit of equal weight.
        num_segments: without weights, the number of segments.

    Returns:
        0-d, in the statistics dtype of the values (float64 for float64, else float32).

    Raises:
        ShapeError: the shapes differ, or a segment is out of range.
        OptionError: segments are given and the weights have none, or the reverse; or the devices differ.
        DtypeError: the values are not floating point, or segments are not integers.

    Example:
        >>> import torch
        >>> from rl_logprobs import global_mean
        >>> global_mean(torch.tensor([[1.0, 3.0, 9.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]))
        tensor(2.6667)
    """
    scored = check_mask(mask, values=values)
    if weights is None:
        weights = mean_weights(mask, per=per, segments=segments, num_segments=num_segments, group=())
    if weights.per != "token" and (segments is None) != (weights.segment_tokens is None):
        without = "the weights were made without segments: leave them out, or give them to mean_weights too"
        raise OptionError(without if segments is not None else "the weights were made with segments: give this batch's")
    require_same_device(values=values, weights=weights.segment_tokens)
    dtype = statistics_dtype(values.dtype)
    values = values.to(dtype).where(scored, 0)
    return (values * _token_weights(scored, weights, segments).to(dtype)).sum() * weights.gradient_divide_factor


@torch.no_grad()
def _token_weights(scored: torch.Tensor, weights: MeanWeights, segments: torch.Tensor | None) -> torch.Tensor:
    """Return the weight of each token, which broadcasts to the mask's shape."""
    unit = torch.where(weights.count > 0, 1 / weights.count, 0)
    if weights.per == "token":
        return unit
    if weights.segment_tokens is not None:
        sequences = Sequences(segments, weights.segment_tokens.shape[0]).check(scored)
        tokens = sequences.spread(weights.segment_tokens, scored)
    else:
        sequences = Sequences(cp_group=weights.cp_group).check(scored)
        tokens = sequences.spread(sequences.totals(scored[None])[0], scored) if weights.length is None else unit
    return unit / (weights.length if weights.length is not None else tokens.clamp(min=1))


def _sum_over(values: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> None:
    for group in groups:
        if group is not None:
            dist.all_reduce(values, group=group)


def _groups(
    mesh: DeviceMesh | None,
    group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
    cp_group: dist.ProcessGroup | None,
    gradient_divide_factor: float | None,
) -> tuple[list[dist.ProcessGroup], dist.ProcessGroup | None]:
    """Return the groups of ranks with other sequences, and the group with other tokens of the same sequences."""
    if mesh is not None:
        if group is not None or cp_group is not None:
            raise OptionError("mesh= names the ranks of group= and cp_group=: give the mesh, or the groups")
        axes = mesh.mesh_dim_names or ()
        known = (*_DATA_AXES, "cp", *_SAME_TOKENS)
        if unknown := [axis for axis in axes if axis not in known] or ([] if axes else ["without a name"]):
            raise OptionError(
                f"mesh has an axis {unknown[0]}: give a mesh with axes of {', '.join(known)}, or group= and cp_group="
            )
        return [mesh.get_group(axis) for axis in axes if axis in _DATA_AXES], mesh.get_group(
            "cp"
        ) if "cp" in axes else None
    if group is None and gradient_divide_factor is None and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        if ranks > (1 if cp_group is None else cp_group.size()):
            raise OptionError(
                f"the data-parallel ranks among these {ranks} are unknown: give mesh=, the mesh of the model, or "
                "group=, their process group; group=() if every rank has the same batch"
            )
    return [group] if isinstance(group, dist.ProcessGroup) else list(() if group is None else group), cp_group


def _check_options(
    per: str,
    segments: torch.Tensor | Sequence[torch.Tensor] | None,
    num_segments: int | None,
    gradient_divide_factor: float | None,
    length: float | None,
    count: float | None,
) -> None:
    if per not in get_args(Per):
        raise OptionError(f"per must be one of {', '.join(get_args(Per))}, got {per!r}")
    if per == "group" and segments is None:
        raise OptionError("per='group' needs segments, the group of each token")
    if (segments is None) != (num_segments is None):
        beside = "without" if segments is None else "with"
        raise OptionError(f"num_segments is {num_segments} {beside} segments: give both, or neither")
    if length is not None and per != "sequence":
        raise OptionError(f"length replaces the tokens of a sequence: use it with per='sequence', not {per!r}")
    for name, value in (("gradient_divide_factor", gradient_divide_factor), ("length", length), ("count", count)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise OptionError(f"{name} must be positive and finite, got {value}")
