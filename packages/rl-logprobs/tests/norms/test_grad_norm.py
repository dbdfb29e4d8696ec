"""Norm and clipping: one number, whatever the mesh, the placements and the dtypes."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rl_logprobs
from harness.ranks import RanksFailed
from rl_logprobs import clip_grad_norm_, grad_norm, grad_norms
from rl_logprobs.norms.grad_norm import clip_grads_with_norm_

ORDERS = [2.0, 1.0, 3.0, 0.5, math.inf]
SHAPES = {"matrix": (10, 6), "uneven": (7, 3), "short": (1, 5), "vector": (9,), "scalar": ()}


def full_gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def exact_norm(gradients, order):
    return torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in gradients]), order)


def with_gradient(gradient):
    parameter = torch.zeros_like(gradient).requires_grad_()
    parameter.grad = gradient.clone()
    return parameter


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(dtype):
    """Parameters over a 2-D mesh, one of its axes and no mesh at all, and the gradients that they stand for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    layouts = [
        ("matrix", mesh, [Shard(0), Shard(1)]),
        ("matrix", mesh, [Shard(0), Replicate()]),
        ("matrix", mesh, [Replicate(), Shard(0)]),
        ("matrix", mesh, [Replicate(), Replicate()]),
        ("uneven", mesh, [Shard(0), Shard(0)]),
        ("short", mesh, [Shard(0), Shard(0)]),
        ("short", mesh["dp_shard"], [Shard(0)]),
        ("vector", mesh["dp_shard"], [Shard(0)]),
        ("scalar", mesh["dp_shard"], [Replicate()]),
        ("uneven", mesh["tp"], [Shard(0)]),
        ("vector", None, None),
    ]
    by_name = full_gradients(dtype)
    gradients = [by_name[name] for name, _, _ in layouts]
    parameters = [
        with_gradient(by_name[name] if where is None else distribute_tensor(by_name[name], where, placements))
        for name, where, placements in layouts
    ]
    return parameters, gradients


def norms_of_spread(dtype):
    parameters, gradients = spread(dtype)
    return [(grad_norm(parameters, order), exact_norm(gradients, order)) for order in ORDERS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_of_mixed_meshes_is_that_of_the_full_gradient_on_every_rank(four_ranks, dtype):
    for found in four_ranks.run(norms_of_spread, dtype):
        for actual, exact in found:
            assert type(actual) is torch.Tensor
            assert actual.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
            torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


def collectives_of_spread(order):
    parameters, _ = spread(torch.float32)
    with CommDebugMode() as norm_only:
        grad_norm(parameters, order)
    with CommDebugMode() as clip:
        clip_grad_norm_(parameters, 0.1, order)
    return norm_only.get_total_counts(), clip.get_total_counts()


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_meshes_that_share_ranks_share_one_collective(four_ranks, order):
    assert four_ranks.run(collectives_of_spread, order) == [(1, 1)] * 4


def clip_spread(dtype, order):
    parameters, gradients = spread(dtype)
    before = clip_grad_norm_(parameters, 0.25, order)
    return before, exact_norm(gradients, order), [full(p.grad) for p in parameters], gradients


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_scales_every_gradient_to_the_bound(four_ranks, dtype, order):
    for before, exact, clipped, gradients in four_ranks.run(clip_spread, dtype, order):
        torch.testing.assert_close(before.double(), exact, rtol=1e-6, atol=0)
        rounding = 2**-9 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(exact_norm(clipped, order), torch.tensor(0.25).double(), rtol=rounding, atol=0)
        for actual, gradient in zip(clipped, gradients, strict=True):
            scaled = gradient.double() * (0.25 / exact)
            torch.testing.assert_close(actual.double(), scaled, rtol=2 * rounding, atol=1e-12)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


def trained_by_fsdp_and_tp(order):
    torch.manual_seed(0)
    model, single = Model(), Model()
    single.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    batch = torch.randn(8, 6)
    local_batch = batch.chunk(2)[mesh.get_local_rank("dp_shard")]
    model(local_batch).square().mean().backward()
    single(batch).square().mean().backward()
    placements = {str(p.grad.placements[0]) for p in model.parameters()}
    return grad_norm(model.parameters(), order), exact_norm([p.grad for p in single.parameters()], order), placements


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_norm_of_an_fsdp_and_tp_model_is_that_of_the_single_process_model(four_ranks, order):
    for actual, exact, placements in four_ranks.run(trained_by_fsdp_and_tp, order):
        assert any(placement.startswith("_S") for placement in placements)  # strided shards are among them
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=0)


def partial_gradients(operation):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    parameters = []
    for shape in ((4, 3), (5,)):
        parameter = DTensor.from_local(torch.zeros(shape), mesh, [Replicate(), Replicate()]).requires_grad_()
        local = torch.randn(shape, generator=generator).to(torch.bfloat16)
        parameter = DTensor.from_local(torch.zeros_like(local), mesh, [Shard(0), Replicate()]).requires_grad_()
        parameter.grad = DTensor.from_local(local, mesh, [Shard(0), Partial(operation)])
        parameters.append(parameter)
    full_grads = [
        DTensor.from_local(p.grad.to_local().double(), mesh, p.grad.placements).full_tensor() for p in parameters
    ]
    with CommDebugMode() as counter:
        norm = clip_grad_norm_(parameters, 0.5)
    clipped = [p.grad.full_tensor() for p in parameters]
    return norm, exact_norm(full_grads, 2), exact_norm(clipped, 2), counter.get_total_counts()


@pytest.mark.parametrize("operation", ["sum", "avg"])
def test_partial_sums_are_completed_before_they_are_squared(four_ranks, operation):
    for norm, exact, clipped, collectives in four_ranks.run(partial_gradients, operation):
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
        assert clipped.item() == pytest.approx(0.5, rel=2**-8)
        assert collectives == 2  # one for all partial sums, one for the norm


def replicated_gradient_of_a_sharded_parameter():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    gradient = full_gradients()["uneven"]
    parameter = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)]).requires_grad_()
    parameter.grad = distribute_tensor(gradient, mesh, [Replicate()])
    return grad_norm([parameter]), exact_norm([gradient], 2)


def test_the_gradients_own_placement_decides_not_the_parameters(two_ranks):
    for actual, exact in two_ranks.run(replicated_gradient_of_a_sharded_parameter):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


def hsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    gradients = list(full_gradients().values())[:4]
    parameters = [with_gradient(distribute_tensor(g, mesh, [Replicate(), Shard(0)])) for g in gradients]
    return grad_norm(parameters), exact_norm(gradients, 2)


def test_hybrid_sharding_counts_replicas_once(four_ranks):
    for actual, exact in four_ranks.run(hsdp):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


def unrelated_meshes():
    """A mesh of half the ranks that nothing ties to the other: its ranks add up on their own."""
    rank = dist.get_rank()
    pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    cross = [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])]
    first, second = full_gradients()["matrix"], full_gradients()["uneven"]
    parameters = [
        with_gradient(distribute_tensor(first, pairs[rank // 2], [Shard(0)])),
        with_gradient(distribute_tensor(second, cross[rank % 2], [Shard(0)])),
    ]
    with CommDebugMode() as counter:
        norm = grad_norm(parameters)
    return norm, exact_norm([first, second], 2), counter.get_total_counts()


def test_meshes_without_a_common_root_take_one_collective_each(four_ranks):
    for actual, exact, collectives in four_ranks.run(unrelated_meshes):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)
        assert collectives == 2


def pipeline(order):
    """Two stages of two ranks: different parameters, sharded within the stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    gradients = list(full_gradients().values())
    stage = mesh.get_local_rank("pp")
    stage_gradients = [gradients[:2], gradients[2:4]][stage]
    parameters = [with_gradient(distribute_tensor(g, mesh["dp_shard"], [Shard(0)])) for g in stage_gradients]
    parameters += [with_gradient(gradients[4])] if stage == 1 else []
    with CommDebugMode() as counter:
        norm = grad_norm(parameters, order, groups=[mesh.get_group("pp")])
    return norm, exact_norm(gradients, order), counter.get_total_counts()


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_stages_of_a_pipeline_add_up_in_the_same_collective(four_ranks, order):
    for actual, exact, collectives in four_ranks.run(pipeline, order):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)
        assert collectives == 1


def some_ranks_without_gradient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    gradient = full_gradients()["matrix"]
    parameter = with_gradient(distribute_tensor(gradient, mesh, [Shard(0)]))
    if dist.get_rank() == 1:
        parameter.grad = None
    lone = distribute_tensor(torch.zeros(3), mesh, [Shard(0)]).requires_grad_()
    return [(grad_norm([parameter, lone], order), exact_norm([gradient[:5]], order)) for order in (2, math.inf)]


def test_a_rank_without_gradients_takes_part_with_zero(two_ranks):
    for found in two_ranks.run(some_ranks_without_gradient):
        for actual, exact in found:
            torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


def torch_and_ours(order):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    results = []
    for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_):
        parameters = [
            with_gradient(distribute_tensor(full_gradients()[name], mesh, [Shard(0)])) for name in ("matrix", "uneven")
        ]
        norm = full(clip(parameters, 1.0, order))
        results.append([norm, *(p.grad.full_tensor() for p in parameters)])
    return results


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_agrees_with_torch_where_torch_works(two_ranks, order):
    for desired, actual in two_ranks.run(torch_and_ours, order):
        torch.testing.assert_close(actual, desired)


def torch_refuses(case):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    matrix = full_gradients()["matrix"]
    parameters = [with_gradient(distribute_tensor(matrix, mesh, [Shard(0), Replicate()]))]
    if case == "two meshes":
        parameters.append(with_gradient(distribute_tensor(matrix, mesh["tp"], [Shard(0)])))
    elif case == "plain tensor":
        parameters.append(with_gradient(matrix))
    try:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    except RuntimeError:
        return grad_norm(parameters).double(), exact_norm([matrix, matrix], 2)
    return None


@pytest.mark.parametrize("case", ["two meshes", "plain tensor"])
def test_serves_the_mixtures_that_torch_refuses(four_ranks, case):
    for result in four_ranks.run(torch_refuses, case):
        assert result is not None, "torch accepts this now: say so in the documentation"
        torch.testing.assert_close(*result, rtol=1e-6, atol=0)


def refused(case):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = distribute_tensor(torch.zeros(4), mesh, [Replicate()]).requires_grad_()
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial("max")])
    with CommDebugMode() as counter:
        try:
            grad_norm([parameter])
        finally:
            assert counter.get_total_counts() == 0


def test_a_partial_maximum_is_refused_on_every_rank(two_ranks):
    with pytest.raises(RanksFailed) as caught:
        two_ranks.run(refused, "partial maximum")
    assert [failure.type_name for failure in caught.value.errors.values()] == ["PlacementError"] * 2


def not_reduced(axes):
    """Gradients that FSDP2 has accumulated on each rank: none in ``parameter.grad``, or one of the step before."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = fully_shard(Model(), mesh=mesh)
    for reduced in (True, False):
        model.set_requires_gradient_sync(reduced)
        model(torch.ones(2, 6)).square().mean().backward()
    before = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    grad_norm(other)
    with pytest.raises(rl_logprobs.errors.PlacementError, match="6 gradients are accumulated on each rank"):
        clip_grad_norm_([other, *model.parameters()], 0.1)
    assert all(torch.equal(p.grad.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 6)).square().mean().backward()
    return grad_norm(model.parameters()).item() > 0


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}])
def test_gradients_that_are_not_reduced_yet_have_no_norm(two_ranks, axes):
    assert two_ranks.run(not_reduced, axes) == [True, True]


def test_tied_parameters_count_once():
    gradient = full_gradients()["matrix"]
    tied = with_gradient(gradient)
    torch.testing.assert_close(grad_norm([tied, tied]), exact_norm([gradient], 2).float())
    clip_grad_norm_([tied, tied], 0.5)
    assert exact_norm([tied.grad], 2).item() == pytest.approx(0.5, rel=1e-5)


def test_bf16_gradients_are_clipped_and_their_norm_is_float32():
    parameter = with_gradient(torch.full((1000,), 10.0, dtype=torch.bfloat16))
    norm = clip_grad_norm_(parameter, 1.0)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(10 * math.sqrt(1000), rel=1e-6)
    assert exact_norm([parameter.grad], 2).item() == pytest.approx(1.0, rel=2**-8)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("size", [1e25, 1e-25, 0.0])
def test_gradients_whose_squares_leave_float32_keep_their_norm(size, order):
    parameters = [with_gradient(torch.full((7000,), size)), with_gradient(torch.full((3,), -size))]
    exact = exact_norm([p.grad for p in parameters], order)
    torch.testing.assert_close(grad_norm(parameters, order).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_gradients_do_not_lose_accuracy(dtype):
    gradient = torch.rand(3_000_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(
        grad_norm(with_gradient(gradient)).double(), exact_norm([gradient], 2), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_several_dtypes_add_up_to_the_widest(order):
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    gradients = [gradient for dtype in dtypes for gradient in full_gradients(dtype).values()]
    parameters = [with_gradient(gradient) for gradient in gradients]
    norm = clip_grad_norm_(parameters, 0.5, order)
    assert norm.dtype is torch.float64
    torch.testing.assert_close(norm, exact_norm(gradients, order), rtol=1e-6, atol=0)
    assert [p.grad.dtype for p in parameters] == [g.dtype for g in gradients]
    assert exact_norm([p.grad for p in parameters], order).item() == pytest.approx(0.5, rel=2**-8)


def test_strided_gradients_are_measured_in_full():
    gradient = torch.randn(50, 60)[::3, ::2].t()
    parameter = torch.zeros(gradient.shape, requires_grad=True)
    parameter.grad = gradient
    for order in ORDERS:
        torch.testing.assert_close(grad_norm(parameter, order).double(), exact_norm([gradient], order))


@settings(max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 90), min_size=0, max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    scale=st.sampled_from([1e-4, 1.0, 100.0]),
    order=st.sampled_from(ORDERS),
)
def test_any_shapes_dtype_and_order_give_the_float64_norm(shapes, dtype, scale, order):
    gradients = [(torch.randn(shape) * scale).to(dtype) for shape in shapes]
    norm = grad_norm([with_gradient(g) for g in gradients], order)
    exact = exact_norm(gradients, order) if sum(g.numel() for g in gradients) else torch.zeros(()).double()
    torch.testing.assert_close(norm.double(), exact.to(norm.dtype).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(value, order):
    parameters = [with_gradient(torch.tensor([1.0, value, 3.0])), with_gradient(torch.ones(2))]
    norm = grad_norm(parameters, order)
    assert norm.isnan() if math.isnan(value) else norm.isinf()
    with pytest.raises(rl_logprobs.errors.NonFiniteNormError, match=f"norm of the gradients is {value}"):
        clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=True)
    assert parameters[1].grad.tolist() == [1.0, 1.0]  # nothing was scaled


def test_groups_get_their_own_norms_from_one_call():
    gradients = full_gradients()
    named = {name: [with_gradient(gradient)] for name, gradient in gradients.items()}
    for name, norm in grad_norms({**named, "empty": []}).items():
        exact = exact_norm([gradients[name]], 2).float() if name != "empty" else torch.zeros(())
        torch.testing.assert_close(norm, exact)


def test_no_parameters_and_no_gradients_have_norm_zero():
    assert grad_norm([]).item() == 0
    assert grad_norm(torch.zeros(3, requires_grad=True), math.inf).item() == 0
    assert clip_grad_norm_(iter([torch.zeros(3, requires_grad=True)]), 1.0).item() == 0


def test_gradients_under_the_bound_stay_as_they_are():
    gradient = full_gradients(torch.bfloat16)["matrix"]
    parameter = with_gradient(gradient)
    clip_grad_norm_(parameter, 1e4)
    assert torch.equal(parameter.grad, gradient)


def test_a_given_norm_is_used_as_it_is():
    for norm in (4.0, torch.tensor(4.0)):
        parameter = with_gradient(torch.full((3,), 2.0))
        clip_grads_with_norm_(parameter, 1.0, norm)
        torch.testing.assert_close(parameter.grad, torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: grad_norm(p, 0), rl_logprobs.errors.OptionError, "norm_type.*0"),
        (lambda p: grad_norm(p, -1.0), rl_logprobs.errors.OptionError, "norm_type.*-1"),
        (lambda p: grad_norm(p, math.nan), rl_logprobs.errors.OptionError, "norm_type.*nan"),
        (lambda p: clip_grad_norm_(p, -1.0), rl_logprobs.errors.OptionError, "max_norm.*-1"),
        (lambda p: clip_grads_with_norm_(p, math.nan, 1.0), rl_logprobs.errors.OptionError, "max_norm.*nan"),
    ],
)
def test_bad_options_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(with_gradient(torch.ones(2)))


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(rl_logprobs.errors.DtypeError, match=r"\(5, 2\).*sparse"):
        grad_norm(embedding.parameters())
