"""Tensors without memory, ranks without peers, and DTensor's caches of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_runtime.swaps import swapped


def fake_store() -> Any:
    """The store of torch's process group without peers."""
    # Importing the module registers the backend ``"fake"``.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """torch's mode of tensors without memory, usable together with DTensor."""
    # DTensor computes shard offsets from the values of small tensors; these tensors stay real. DTensor infers the shape
    # of a result by operators on full shapes, which are no part of the program and are hidden from other modes.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import _utils
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    outside = [
        (_utils, "_compute_local_shape_and_global_offset"),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    ]
    with ExitStack() as contexts:
        for owner, name in outside:
            contexts.enter_context(swapped(owner, **{name: _outside_modes(getattr(owner, name))}))
        contexts.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is neither on meta nor a fake tensor of torch."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def outside_modes(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside_modes


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Errors of fake tensors if a result depends on data, or an operator has no rule for shapes."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )


def clear_dtensor_caches() -> None:
    """Empty DTensor's caches per mesh: a later, equal mesh would get their entries."""
    # Meshes of equal shape and names are equal, but the groups of a deleted mesh and another rank's offsets cannot be
    # used.
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_python_sharding_prop_cache()  # type: ignore[no-untyped-call]
    debug._clear_fast_path_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
