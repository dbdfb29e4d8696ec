"""Every use of a private torch API in this package, with its reason and the versions it was seen to work on.

``tests/test_torch_compat.py`` fails where a later torch has what a function here replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented, in a private module
from torch.utils._python_dispatch import _disable_current_modes


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten several axes of a mesh into one, registered under ``name``; a repeated call returns the same mesh.

    ``DeviceMesh._flatten`` has no public equivalent in torch 2.10 to 2.15; torch's own tutorials and torchtitan
    use it (pytorch/pytorch#133838, and #159013 on a public form).
    """
    sliced = mesh[axes] if len(axes) > 1 else mesh[axes[0]]
    return sliced._flatten(name)


def join_axes(*meshes: DeviceMesh) -> DeviceMesh:
    """Concatenate meshes of one root, at least one of which is a flattened axis.

    Slicing the root by the name of a flattened axis warns from torch 2.11 on (pytorch/pytorch#164993, #169381), and
    2.10 to 2.15 have no public replacement.
    """
    return DeviceMesh._concatenate(list(meshes))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from, or itself (not public in torch 2.10 to 2.15; no issue found)."""
    return mesh._get_root_mesh()


def is_strided(placement: Placement) -> bool:
    """Return True for ``_StridedShard``, FSDP2's placement of a dim that is already sharded over ``tp``.

    The class is private in torch 2.10 to 2.15, where parameters of TP x FSDP2 carry it.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def sharded_parameters(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """FSDP2's sharded parameters by owning module and name; tied ones under every owner.

    While a unit is gathered its modules hold other tensors, in the dtype of the mixed-precision policy, and torch
    2.10 to 2.15 have no public way to the shards but to drop the gathered ones (``FSDPModule.reshard``;
    pytorch/pytorch#120879).
    """
    found: dict[tuple[nn.Module, str], nn.Parameter] = {}
    for fsdp_parameter in _fsdp_parameters(model):
        info = fsdp_parameter._module_info
        places = [
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ]
        found.update(dict.fromkeys(places, fsdp_parameter.sharded_param))
    return found


def initialize_root(root: FSDPModule) -> None:
    """Initialize FSDP2's state of a root and the modules below it, as the root's first forward does.

    Until then gradients of the root's own parameters are not reduced, since a backward does not know the root.
    ``unshard()`` initializes one module's parameters only; torch 2.10 to 2.15 have no public function for all
    (introduced so in pytorch/pytorch#117881).
    """
    state: Any = root._get_fsdp_state()
    state._lazy_init()


def unreduced_gradients(unit: FSDPModule) -> int:
    """Return the number of an FSDP module's parameters with a gradient that is not reduced.

    Under ``set_requires_gradient_sync(False)`` that is intended; torch 2.10 to 2.15 have no public way to ask.
    """
    return sum(
        getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in _parameter_groups(unit)
        for parameter in group.fsdp_params
    )


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that are not reduced yet, as FSDP2 does at the end of a backward.

    A backward through none of the FSDP modules' outputs does not end so, and torch 2.10 to 2.15 have no public call.
    """
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


@contextmanager
def check_saved_tensors(freed: Callable[[], Exception]) -> Iterator[None]:
    """Raise ``freed()`` where backward reads a tensor that was saved inside the ``with`` and has lost its storage.

    torch's own error is about the storage, and torch turns its check for changes in place off for tensors with hooks
    (2.10 to 2.15, since pytorch/pytorch#60975), so that is done here; the version of a tensor is not public.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor, tensor._version

    def unpack(saved: tuple[Tensor, int]) -> Tensor:
        tensor, version = saved
        local = local_tensor(tensor)
        if local.numel() and local.device.type != "meta" and local.untyped_storage().nbytes() == 0:
            raise freed()
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected "
                f"version {version}"
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def offloads_to_cpu(model: nn.Module) -> bool:
    """Return True if FSDP2 keeps the model's shards on the CPU (torch 2.10 to 2.15: the policy is not public again)."""
    return any(bool(parameter.offload_to_cpu) for parameter in _fsdp_parameters(model))


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module that are part of its state dict.

    Public API distinguishes them from other buffers only through ``state_dict()``, whose hooks drop FSDP2's gathered
    parameters (torch 2.10 to 2.15).
    """
    hidden = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in hidden}


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return a module's own parameters, including absent ones and plain tensors in their place.

    ``named_parameters`` hides both, and ``getattr`` runs the parametrisations of a module (torch 2.10 to 2.15).
    """
    found: dict[str, Any] = module._parameters
    return found


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own dict of its children, where one can be exchanged and the order stays (torch 2.10 to 2.15)."""
    return module._modules


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor itself; ``to_local`` gives a view, which a recorder of memory would count anew.

    Any other tensor is its own (torch 2.10 to 2.15).
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """The hooks that run before a module's forward; torch 2.10 to 2.15 have no public way to ask for them."""
    return list(module._forward_pre_hooks.values())


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples.

    ``torch.utils._pytree`` is private in torch 2.10 to 2.15 (pytorch/pytorch#65761).
    """
    from torch.utils import _pytree

    found: list[Any] = _pytree.tree_leaves(tree)
    return found


def has_flash_attention(query: Tensor, value: Tensor) -> bool:
    """Return True if :func:`flash_attention` computes attention of this dtype and width.

    No public function of torch returns the log-sum-exp of attention and takes it back in backward; torch's own ring
    attention calls these operators, which have kept their signatures from torch 2.10 to 2.15.
    """
    width = query.shape[-1]
    if value.shape[-1] != width:
        return False
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu":
        return half or query.dtype in (torch.float32, torch.float64)
    return query.device.type == "cuda" and half and width % 8 == 0 and width <= 256


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention ``[batch, heads, queries, dim]`` and its log-sum-exp ``[batch, heads, queries]``."""
    operator = _flash_operators(query)[0]
    output, lse, *_ = operator(query, key, value, 0.0, causal, scale=scale)
    return output, lse


def flash_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given output and log-sum-exp over all keys."""
    operator = _flash_operators(query)[1]
    lse = lse.contiguous()
    varlen: tuple[Any, ...] = ()
    random: tuple[Any, ...] = ()
    if query.device.type == "cuda":  # no packed lengths, and no state of dropout
        varlen = (None, None, query.shape[2], key.shape[2])
        random = (torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_zeros(0, dtype=torch.uint64))
    grads: tuple[Tensor, Tensor, Tensor] = operator(
        grad_output, query, key, value, output, lse, *varlen, 0.0, causal, *random, scale=scale
    )
    return grads


def _flash_operators(query: Tensor) -> tuple[Any, Any]:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        )
    return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward


def all_gather_flat(output: Tensor, own: Tensor, group: ProcessGroup) -> dist.Work:
    """Start an all-gather of flat tensors; torch 2.13 renamed the function, and the old name warns."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(output, own, group=group, async_op=True)
    return work


def reduce_scatter_flat(output: Tensor, full: Tensor, group: ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of flat tensors; torch 2.13 renamed the function."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = scatter(output, full, group=group, async_op=True)
    return work


def clone_default_store() -> Store:
    """A connection of one's own to the store of ``init_process_group``, which torch 2.10 to 2.15 hand out nowhere."""
    store: Any = distributed_c10d._get_default_store()
    copy: Store = store.clone()
    return copy


def separate_group(
    store: Store, rank: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> ProcessGroup:
    """Form a process group apart from the world, which may be absent.

    torch 2.10 to 2.15 form groups of the world's ranks alone (pytorch/pytorch#151960); SGLang and OpenRLHF call the
    same function.  Point-to-point operations look up the ranks that are registered here.

    Raises:
        ValueError: this process has a group of that name.
        RuntimeError: not all ranks came in time.
    """
    helper: Any = distributed_c10d._new_process_group_helper
    world: Any = distributed_c10d._world
    own_part = PrefixStore(name, store)
    own_part.set_timeout(timeout)
    group: ProcessGroup
    group, _ = helper(world_size, rank, [], backend, own_part, group_name=f"separate/{name}", timeout=timeout)
    world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def causal_bias(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last ``queries`` of ``keys`` tokens, in a form that kernels do not materialize.

    torch 2.10 to 2.15 cannot make a ``CausalBias`` inside a dispatch mode, such as selective checkpointing, and
    compiles it only with a graph break (no upstream issue found); there the mask is an ordinary one.
    """
    if torch.compiler.is_compiling():
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    with _disable_current_modes():
        return causal_lower_right(queries, keys)


#: Inductor's switch for async tensor parallelism, private in torch 2.10 to 2.15; torchtitan sets the same.
MICRO_PIPELINE = "_micro_pipeline_tp"


def enable_symmetric_memory(group: ProcessGroup) -> None:
    """Let ranks of a group read each other's memory; the module is private in torch 2.10 to 2.15."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group.group_name)


def gathered_bytes(unit: FSDPModule) -> int:
    """Return the bytes of an FSDP module's own parameters while they are gathered, without padding.

    In torch 2.10 to 2.15 neither the parameters of one FSDP module nor its mixed-precision policy are public.
    """
    state: Any = unit._get_fsdp_state()
    dtype = state._mp_policy.param_dtype
    return sum(
        parameter._orig_size.numel() * (dtype or parameter.sharded_param.dtype).itemsize
        for group in _parameter_groups(unit)
        for parameter in group.fsdp_params
    )


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module):
                yield from group.fsdp_params


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several a unit in newer versions
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def is_compiled(module: nn.Module) -> bool:
    """Return True if ``module.compile()`` was called (torch 2.10 to 2.15: there is no public way to ask)."""
    return module._compiled_call_impl is not None


def wrapper_tensor(cls: type[Any], shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of a subclass with a shape and no storage (torch 2.10 to 2.15: documented, and not public)."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)


def fake_store() -> Any:
    """The store of torch's process group without peers; both are under ``torch.testing._internal`` in 2.10 to 2.15.

    Importing the module registers the backend ``"fake"``; importing another, what collectives of tensors without data
    return, which torch 2.11 and later have built in.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with suppress(ImportError):
        import torch.distributed._tools.fake_collectives  # noqa: F401

    return FakeStore()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """torch's mode of tensors without memory (private in 2.10 to 2.15), usable together with DTensor.

    DTensor computes shard offsets with small tensors whose values it needs; those stay real.  Operators that it runs on
    full shapes, to infer the shape of a result, are not part of the program and are hidden from other modes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import _utils
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    outside = [
        (_utils, "_compute_local_shape_and_global_offset"),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in outside]
    for owner, name, function in originals:
        setattr(owner, name, _outside_modes(function))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def _outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def outside_modes(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside_modes


def clear_dtensor_caches() -> None:
    """Empty DTensor's caches of what it decided for a mesh, from which a later one that is equal would be served.

    Meshes are equal by shape and names; the groups of one that is gone cannot be used, nor can another rank's offsets.
    Private in torch 2.10 to 2.15, and not all there in 2.10.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_python_sharding_prop_cache()  # type: ignore[no-untyped-call]
    debug._clear_fast_path_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def group_of(value: object) -> ProcessGroup | None:
    """The process group that an operator's argument is, as an object or by its name; ``None`` for other arguments.

    Names are resolved by a private function in torch 2.10 to 2.15.
    """
    from torch.distributed import distributed_c10d

    if isinstance(value, ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return ProcessGroup.unbox(value)
    if isinstance(value, str):
        try:
            return cast("ProcessGroup", getattr(distributed_c10d, "_resolve_process_group")(value))  # noqa: B009
        except (RuntimeError, ValueError, LookupError):
            return None
    return None


def autograd_position() -> int:
    """The number that the next operator's backward node will get in this thread (private in torch 2.10 to 2.15)."""
    return int(torch._C._autograd._get_sequence_nr())


def running_backward_of() -> int | None:
    """The number of the backward node that runs now; ``None`` outside backward (private in torch 2.10 to 2.15)."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def storage_key(held: Tensor | UntypedStorage) -> int:
    """What is the same for a storage and all tensors on it while it lives.

    ``data_ptr`` is public and 0 for every storage without data (torch 2.10 to 2.15).
    """
    return int((held.untyped_storage() if isinstance(held, Tensor) else held)._cdata)


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise where a result depends on data, or an operator has no rule for shapes.

    Private in torch 2.10 to 2.15.
    """
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an ATen operator writes into; their schema is private in torch 2.10 to 2.15."""
    schema = func._schema
    if not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@contextmanager
def observe_storage_resizes(observe: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call ``observe`` after every ``UntypedStorage.resize_``.

    FSDP2 allocates and frees gathered parameters by resizing their storages.  Under ``FakeTensorMode`` no operator is
    dispatched for that, and torch 2.10 to 2.15 have no hook (pytorch/pytorch#122434), so the method is replaced.
    """
    original = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        observe(storage)
        return result

    UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = original  # type: ignore[method-assign]
