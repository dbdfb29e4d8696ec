"""Tokens sent to the ranks of their experts: outputs and every gradient equal one process's, whatever the routes."""

import copy
from functools import wraps
from math import comb

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from harness.layers import gradient_mismatches
from harness.models import jitter
from harness.ranks import RanksFailed
from tp_plans import DispatchExperts, Plan, PlanError
from tp_plans.runtime import dispatch_styles
from tp_plans.torch_styles import AllToAllExchange, exchange_class

HIDDEN, INNER, EXPERTS = 6, 5, 8
BOUND = 1e-12


class Experts(nn.Module):
    """Runs the experts that have tokens, one after another, with a bias and a norm of its own."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        assert self.gate_up_proj.shape[0] == self.num_experts
        final = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
                out = nn.functional.linear(
                    nn.functional.silu(gate) * up, self.down_proj[expert], self.down_bias[expert]
                )
                final = final.index_add(0, token, self.norm(out) * top_k_weights[token, place, None])
        return final


class WithIdentities(nn.Module):
    """LongCat's: rows of one stack that belong to no expert, and indices that stand for the identity."""

    def __init__(self):
        super().__init__()
        self.num_routed_experts, self.total_experts = EXPERTS - 2, EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS - 2, HIDDEN, INNER))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        for expert in range(self.total_experts):
            token, place = torch.where(top_k_index == expert)
            out = hidden_states[token]
            if expert < self.num_routed_experts:
                gate, up = nn.functional.linear(out, self.gate_up_proj[expert]).chunk(2, dim=-1)
                out = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])
            final = final.index_add(0, token, out * top_k_weights[token, place, None])
        return final


class Replaced(Experts):
    """gpt-oss's: the forward has its own names, and a function with transformers' names runs in its place."""

    def declared(self, hidden_states, router_indices=None, routing_weights=None):
        raise AssertionError("another function runs")

    @wraps(declared)
    def forward(self, *args, **kwargs):
        return Experts.forward(self, *args, **kwargs)


class EveryExpert(nn.Module):
    """Llama 4's: every expert gets every token, in turn."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))

    def forward(self, hidden_states):
        each = hidden_states.view(self.num_experts, -1, HIDDEN)
        gate, up = torch.bmm(each, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(nn.functional.silu(gate) * up, self.down_proj).view(-1, HIDDEN)


class Mixture(nn.Module):
    """A router and its experts; ``bias`` is added to the router's scores before the choice."""

    def __init__(self, experts, top_k, bias):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), experts
        self.top_k, self.bias = top_k, bias

    def forward(self, tokens):
        scores = self.router(tokens).sigmoid()
        if isinstance(self.experts, EveryExpert):
            spread = tokens * scores.t().unsqueeze(-1)
            return self.experts(spread.reshape(-1, HIDDEN)).view(EXPERTS, -1, HIDDEN).sum(0)
        index = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, index)
        if isinstance(self.experts, Replaced):
            return self.experts(tokens, index, weights)
        return self.experts(tokens, top_k_index=index, top_k_weights=weights)


def favoured(*experts):
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    bias[list(experts)] = 100.0
    return bias


#: Name to kind of experts, top k, and what the router adds to its scores.
ROUTES = {
    "spread": (Experts, 3, favoured()),
    "one expert takes everything": (Experts, 1, favoured(5)),
    "every expert": (Experts, EXPERTS, favoured()),
    "all tokens leave the first rank, and two ranks get none": (Experts, 2, favoured(6, 7)),
    "another function runs in the forward's place": (Replaced, 3, favoured()),
    "identities": (WithIdentities, 3, favoured()),
    "identities only": (WithIdentities, 2, favoured(6, 7)),
    "every expert gets every token": (EveryExpert, 1, favoured()),
}
#: Tokens of each rank of the data-parallel axis; the fewest are fewer than the ranks that share them.
TOKENS = (5, 1, 3, 0)


def axes(shared):
    """The axis ``ep`` over all ranks or pairs of them, with pairs that share their tokens or without."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world // shared, shared), mesh_dim_names=("dp", "tp"))


def faults(name, shared, ep):
    """The differences of this rank's outputs and gradients from one process's."""
    kind, top_k, bias = ROUTES[name]
    torch.manual_seed(0)
    reference = Mixture(kind(), top_k, bias).double()
    jitter(reference)
    mesh = axes(shared)
    groups = dist.get_world_size() // shared
    view = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("efsdp", "ep"))
    candidate = copy.deepcopy(reference)
    plan = Plan({"experts": DispatchExperts(identity_indices=kind is WithIdentities)})
    styles = dispatch_styles(plan.by_path(candidate), shared_mesh=mesh["tp"] if shared > 1 else None)
    parallelize_module(candidate, view["ep"], styles)

    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(TOKENS[i], HIDDEN, dtype=torch.float64, generator=generator) for i in range(groups)]
    weights = torch.randn(HIDDEN, dtype=torch.float64, generator=generator)
    rows = [batch.clone().requires_grad_() for batch in batches]
    expected = reference(torch.cat(rows))
    (expected.sin() * weights).sum().backward()
    mine = mesh["dp"].get_local_rank()
    tokens = batches[mine].clone().requires_grad_()
    output = candidate(tokens)
    (output.sin() * weights).sum().backward()

    for parameter in candidate.parameters():  # the sum over ranks with other tokens, as FSDP2 would compute it
        assert parameter.grad is not None
        if isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad.to_local(), group=view["efsdp"].get_group())
        else:
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
    start = sum(TOKENS[:mine])
    found = [*gradient_mismatches(reference, candidate)]
    if (output - expected[start : start + TOKENS[mine]]).abs().sum() > BOUND:
        found.append("the output")
    if (tokens.grad - rows[mine].grad).abs().sum() > BOUND:
        found.append("the gradient of the tokens")
    return found


def all_faults(cases):
    return {case: found for case in cases if (found := faults(*case))}


@pytest.mark.parametrize(
    ("shared", "ep"),
    [
        pytest.param(shared, ep, marks=[] if (shared, ep) in ((1, 4), (2, 2)) else [pytest.mark.slow])
        for shared in (1, 2, 4)
        for ep in (4, 2)
    ],
)
def test_dispatched_experts_equal_one_process(four_ranks, shared, ep):
    cases = [(name, shared, ep) for name in ROUTES if not (ep == 4 and "identities" in name)]
    assert four_ranks.run(all_faults, cases) == [{}] * 4


def sent_bytes():
    """The bytes of hidden states that a rank sends in one forward, and the formula's."""
    sizes = []

    def counting(output, values, received=None, sent=None, group=None):
        if values.is_floating_point() and values.ndim == 2:
            sizes.append(values.nbytes)
        return original(output, values, received, sent, group=group)

    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))["ep"]
    original, dist.all_to_all_single = dist.all_to_all_single, counting
    try:
        hidden = torch.randn(50, HIDDEN, dtype=torch.float64)
        index = torch.rand(50, EXPERTS).topk(3).indices
        weights = torch.rand(50, 3, dtype=torch.float64)
        exchange = AllToAllExchange(mesh)
        arrived = exchange.dispatch(hidden, index, weights, experts=EXPERTS)
        exchange.combine(arrived.rows, arrived)
    finally:
        dist.all_to_all_single = original
    ranks_of_tokens = sum(len(set(row.tolist())) for row in index // (EXPERTS // mesh.size()))
    return sizes[0], ranks_of_tokens * HIDDEN * 8, sorted(arrived.pair_row.tolist()) == arrived.pair_row.tolist()


def test_a_token_is_sent_once_to_a_rank_however_many_of_its_experts_are_there(four_ranks):
    for sent, formula, in_order in four_ranks.run(sent_bytes):
        assert sent == formula
        assert in_order


def test_top_8_of_64_experts_on_8_ranks_send_less_than_three_quarters_of_all_pairs():
    index = torch.rand(4096, 64, generator=torch.Generator().manual_seed(0)).topk(8).indices
    sent = sum(len(set(row)) for row in (index // 8).tolist()) / len(index)
    closed_form = 8 * (1 - comb(56, 8) / comb(64, 8))  # ranks that have at least one of a token's experts
    assert sent == pytest.approx(closed_form, rel=0.01)
    assert closed_form / 8 < 0.75


def odd_experts():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model = nn.ModuleDict({"experts": WithIdentities()})
    parallelize_module(model, mesh, dispatch_styles({"experts": DispatchExperts()}))


def test_experts_that_do_not_divide_are_refused_with_the_sizes_that_do(four_ranks):
    with pytest.raises(
        RanksFailed, match=r"6 stacked experts, which cannot be divided over ep=4: .* out of 1, 2, 3, 6"
    ):
        four_ranks.run(odd_experts)


@pytest.mark.parametrize("name", ["alltoall", "deepep"])
def test_exchange_class_refuses_an_unknown_name(name):
    with pytest.raises(PlanError, match=f"exchange='{name}' is unknown: write 'all_to_all'.* that calls the kernels"):
        exchange_class(name)


def test_a_class_of_ones_own_is_an_exchange():
    class Own(AllToAllExchange):
        pass

    assert exchange_class(Own) is Own


def test_rules_of_the_two_axes_are_told_apart():
    plan = Plan({"experts": DispatchExperts()})
    assert list(plan.on_axis("ep")) == ["experts"]
    assert not plan.on_axis("tp")
    with pytest.raises(PlanError, match="DispatchExperts is a style of the axis ep"):
        plan.to_torch()
