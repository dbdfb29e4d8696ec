"""A test named after a missing or wrong behaviour of torch fails once torch has it; then remove the workaround too."""

from __future__ import annotations

import importlib.util
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

#: A public name that would replace a function of ``_torch_compat``: the function, who would have it, its likely names.
ABSENT: dict[str, tuple[Any, set[str]]] = {
    "flatten_axes": (DeviceMesh, {"flatten"}),
    "join_axes": (DeviceMesh, {"concatenate"}),
    "root_mesh": (DeviceMesh, {"root_mesh", "get_root_mesh"}),
    "is_strided": (torch.distributed.tensor, {"StridedShard"}),
    "forward_pre_hooks": (nn.Module, {"forward_pre_hooks", "get_forward_pre_hooks"}),
    "is_compiled_by_torch": (nn.Module, {"is_compiled"}),
    "clone_default_store": (dist, {"get_default_store", "get_store"}),
    "group_of": (dist, {"resolve_process_group", "get_process_group"}),
    "flash_attention": (torch.nn.functional, {"flash_attention", "flash_attention_backward"}),
    "autograd_position": (torch.autograd.graph, {"get_sequence_nr", "sequence_nr"}),
    "running_backward_of": (torch.autograd.graph, {"current_node", "current_autograd_node"}),
    "written_arguments": (torch._ops.OpOverload, {"schema"}),
}


@pytest.mark.parametrize("function", ABSENT)
def test_no_public_name_replaces_it(function: str) -> None:
    owner, names = ABSENT[function]
    assert not names & set(dir(owner))


@pytest.mark.parametrize("module", ["torch.utils.pytree", "torch.distributed.symmetric_memory"])
def test_the_module_is_private(module: str) -> None:
    assert importlib.util.find_spec(module) is None


def test_a_module_of_fsdp2_has_no_public_method_that_returns_its_state() -> None:
    commands = ("set_", "unshard", "reshard", "reset_", "register_")
    assert [name for name in dir(FSDPModule) if not name.startswith(("_", *commands))] == []


def test_the_buffers_of_a_module_cannot_be_listed_by_persistence() -> None:
    assert "persistent" not in inspect.signature(nn.Module.named_buffers).parameters


def test_an_absent_parameter_is_not_listed() -> None:
    assert [name for name, _ in nn.Linear(2, 2, bias=False).named_parameters()] == ["weight"]


def test_an_oldest_supported_torch_has_the_old_name_of_all_gather_single() -> None:
    (requirement,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    oldest = requirement.removeprefix("torch>=").partition(",")[0]
    assert tuple(map(int, oldest.split("."))) < (2, 13)


def test_a_change_in_place_is_not_detected_for_saved_tensors_with_hooks() -> None:
    weight = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        product = (weight * saved).sum()
    saved.add_(1)
    product.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3  # and the gradient is wrong


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_causal_bias_cannot_be_used_inside_a_dispatch_mode() -> None:
    with pytest.raises(RuntimeError, match="CausalBias"), _Nothing():
        causal_lower_right(2, 3)


def test_a_resized_storage_of_a_fake_tensor_dispatches_no_operator() -> None:
    seen: list[Any] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Recorder():
        tensor = torch.empty(4)
        seen.clear()
        tensor.untyped_storage().resize_(0)
    assert seen == []


def test_storages_without_data_share_one_address() -> None:
    storages = [torch.empty(2, device="meta").untyped_storage() for _ in range(2)]
    assert [storage.data_ptr() for storage in storages] == [0, 0]


def test_to_local_returns_another_tensor_than_the_one_that_is_held() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    assert sharded.to_local() is not sharded.to_local()
    dist.destroy_process_group()


def test_a_group_cannot_be_formed_without_a_world() -> None:
    if dist.is_initialized():  # an earlier test left one
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.new_group([0])
