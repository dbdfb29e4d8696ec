"""Every use of a torch API that is not public or that differs between torch versions, with the reason for it.

The names are private in torch 2.11 to 2.15.  Each function names the upstream issue or pull request.
``tests/test_torch_compat.py`` fails for a function that torch no longer makes necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes

from rl_logprobs.errors import OptionError


def local_shape_and_offset(
    tensor: DTensor, placements: Sequence[Placement] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard of ``tensor`` and its offset in the full tensor."""
    # ``placements`` are the tensor's own by default. The function covers every placement, strided shards included;
    # torch's distributed checkpoints use the same one (pytorch/pytorch#107996 added it).
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, placements or tensor.placements
    )
    return tuple(shape), tuple(offset)


def same_root(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether two meshes are slices of one mesh."""
    # No upstream issue found.
    return bool(mesh._get_root_mesh() == other._get_root_mesh())


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fail on the device if ``condition`` is false, without making the host wait."""
    torch._assert_async(condition, message)  # pytorch/pytorch#53284


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``, which torch leaves without types."""
    # No upstream issue found. mypy reports the ignored error once it is gone.
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the ``backward`` of an autograd function refuse to run for a gradient of a gradient."""
    # torch's ``once_differentiable`` (2.11 to 2.15; no upstream issue found) fails only where the incoming gradients
    # have a history. Otherwise it returns constants, and a penalty on a gradient trains nothing, without an error.

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise OptionError(
                "gradients of gradients (create_graph=True) are not computed here: leave create_graph out, and take "
                "differences of two backwards, or torch's log_softmax of full logits"
            )
        return backward(ctx, *gradients)

    return refusing


def foreach_norm(tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each tensor in few kernel launches, accumulated and returned in ``dtype``."""
    # pytorch/pytorch#193607 adds ``torch.foreach``; ``torch.nn.utils.get_total_norm`` returns the total only.
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Scale every tensor in place by a 0-d tensor, in few kernel launches."""
    torch._foreach_mul_(list(tensors), factor)


def unreduced_parameters() -> set[int]:
    """Return the ``id`` of each FSDP2 parameter with a gradient that its rank has accumulated and not reduced yet."""
    # torch leaves ``parameter.grad`` as it was under ``set_requires_gradient_sync(False)``; no upstream issue found.
    unreduced: set[int] = set()
    for reference in list(_module_state_mapping.values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in () if group is None else group.fsdp_params:
                shard, copy = parameter.sharded_param, getattr(parameter, "_unsharded_param", None)
                waits = parameter.unsharded_accumulated_grad is not None or getattr(copy, "grad", None) is not None
                if waits or (group._partial_reduce_output is not None and shard.requires_grad):
                    unreduced.add(id(shard))
    return unreduced


def all_gather_single(gathered: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``gathered`` with the ranks' parts."""
    # torch 2.13 renamed ``all_gather_into_tensor`` to ``all_gather_single`` and warns of the old name
    # (pytorch/pytorch#186123); torch 2.11 to 2.12 have the old name only.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, part, group=group)


_joint_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup | None]] = (
    WeakKeyDictionary()
)


def joint_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of a mesh, created at their first call; None if they cannot create it."""
    # torch's private group over several dims of a mesh (pytorch/pytorch#132632) must be created by all ranks of the
    # world together. A world bound to a device (``device_id`` of
    # ``init_process_group``) splits its communicator for a new group, which needs every rank. Otherwise the ranks
    # rendezvous under a name that contains the number of groups that each belongs to. Ranks in different numbers of
    # groups (pipeline stages with separate groups, say) would wait for each other under different names.
    world = dist.group.WORLD
    if world is None or getattr(world, "bound_device_id", None) is not None:
        return None
    ranks = tuple(sorted(ranks_of(mesh)))
    groups = _joint_groups.setdefault(world, {})
    if ranks not in groups:
        with _disable_current_modes():
            equal_names = _all_ranks_equal(len(distributed_c10d._world.pg_names), mesh)
            groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True) if equal_names else None
    return groups[ranks]


_ranks_cache: WeakKeyDictionary[DeviceMesh, frozenset[int]] = WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """Return the mesh's ranks, from a cache: torch computes them at each call, as slowly as ten small norms."""
    # Outside any mode: under fake tensors a mesh's ranks are tensors without values (pytorch/pytorch#142275).
    if mesh not in _ranks_cache:
        with _disable_current_modes():
            _ranks_cache[mesh] = frozenset(mesh.mesh.flatten().tolist())
    return _ranks_cache[mesh]


def _all_ranks_equal(number: int, mesh: DeviceMesh) -> bool:
    """Return whether all ranks of a mesh pass the same number, with one all-reduce per dim."""
    bounds = torch.tensor([number, -number], device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    most, least = bounds.tolist()
    return bool(most == -least)


def wide_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``left @ right`` in ``dtype``; half precision operands on CUDA only."""
    # torch 2.11 to 2.15 implement ``out_dtype`` for accelerators, not for a CPU (pytorch/pytorch#150812).
    # Autocast would round the operands of either product to half precision.
    device = left.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return wide_product(left, right, dtype)
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to ``total`` in place, computed in ``total``'s dtype."""
    # Releases of torch differ in the operands that ``addmm`` takes with ``out_dtype``: some want all of one dtype
    # (pytorch/pytorch#150812). There the product needs a temporary of its size.
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    if left.device.type == "cpu":  # fake tensors of a dry run: the flop counter takes no ``addmm`` with ``out_dtype``
        torch.mm(left, right, out_dtype=total.dtype, out=total)
        return
    if left.device.type == "cuda" and _sums_wide_products():
        with torch.autocast("cuda", enabled=False):
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        return
    total += wide_product(left, right, total.dtype)


@cache
def _sums_wide_products() -> bool:
    """Return whether torch adds a bfloat16 product to float32 in place on CUDA; tries a product of one element."""
    total, one = torch.ones(1, 1, device="cuda"), torch.ones(1, 1, device="cuda", dtype=torch.bfloat16)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return total.item() == 2
