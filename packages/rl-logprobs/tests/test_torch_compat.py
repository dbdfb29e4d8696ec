"""A test named after a missing or wrong behaviour of torch fails once torch has it; then remove the workaround too."""

import math
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rl_logprobs._torch_compat import ranks_of

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_no_public_function_gives_the_offset_of_a_shard():
    assert not hasattr(torch.distributed.tensor, "compute_local_shape_and_global_offset")


def test_no_public_attribute_gives_the_root_of_a_mesh():
    assert not {"root_mesh", "get_root_mesh"} & set(dir(DeviceMesh))


def test_no_public_function_tells_which_gradients_are_not_reduced():
    assert not [name for name in dir(FSDPModule) if "accumulated" in name or "unreduced" in name]


def test_no_public_function_asserts_on_the_device():
    assert not hasattr(torch, "assert_async")


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number):
        ctx.save_for_backward(number)
        return number * number

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (number,) = ctx.saved_tensors
        return 2 * number * gradient


def test_once_differentiable_lets_a_gradient_of_a_gradient_vanish():
    number = torch.tensor(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(Square.apply(number), number, create_graph=True)
    assert not gradient.requires_grad


def test_foreach_functions_are_private():
    assert not hasattr(torch, "foreach")


def test_an_oldest_supported_torch_has_the_old_name_of_all_gather_single():
    (requirement,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    oldest = requirement.removeprefix("torch>=").partition(",")[0]
    assert tuple(map(int, oldest.split("."))) < (2, 13)


def test_no_public_function_makes_a_group_of_several_mesh_dims():
    assert not hasattr(DeviceMesh, "flatten")


def ranks_under_fake_tensors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with FakeTensorMode():
        return ranks_of(mesh)


def test_the_ranks_of_a_mesh_are_known_under_fake_tensors(two_ranks):
    assert two_ranks.run(ranks_under_fake_tensors) == [frozenset({0, 1})] * 2


def test_products_of_half_precision_in_float32_are_not_implemented_on_a_cpu():
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.mm(half, half, out_dtype=torch.float32)


def maximum_with_nan_on_each_rank():
    found = []
    for rank in range(2):
        value = torch.tensor(math.nan if dist.get_rank() == rank else 1.0)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        found.append(value.isnan().item())
    return found


def test_the_maximum_of_gloo_loses_nan(two_ranks):
    assert not all(all(found) for found in two_ranks.run(maximum_with_nan_on_each_rank))


def test_the_float32_norm_of_a_large_tensor_is_inaccurate_on_a_cpu():
    values = torch.randn(1 << 23, generator=torch.Generator().manual_seed(0))
    exact = values.double().norm().item()
    assert abs(torch.linalg.vector_norm(values).item() - exact) > 1e-5 * exact
