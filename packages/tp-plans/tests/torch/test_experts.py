"""Mixtures whose experts are dealt over the ranks, in the forms in which transformers writes them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.layers import mismatches, parallelized
from harness.ranks import RanksFailed
from tp_plans import CapabilityError, ExpertsParallel, ParameterStyle, Replicate, Shard, with_expert_parallelism
from tp_plans._transformers_compat import skips_sentinel_index
from tp_plans.styles import AllReduceOutput, DispatchExperts, ScaleInput

HIDDEN, INNER, TOP = 6, 5, 2


def activation(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Experts(nn.Module):
    """Runs the experts that have tokens, one after another, and passes over the index behind the last."""

    def __init__(self, number):
        super().__init__()
        self.num_experts = number
        self.gate_up_proj = nn.Parameter(torch.randn(number, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(number, HIDDEN, INNER))

    def one(self, expert, tokens):
        gate, up = nn.functional.linear(tokens, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                mixed = self.one(expert, hidden_states[token]) * top_k_weights[token, place, None]
                final = final.index_add(0, token, mixed)
        return final


class Gathering(Experts):
    """Takes every token's experts by index, absent ones too."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        for place in range(top_k_index.shape[1]):
            index = top_k_index[:, place]
            gate, up = torch.einsum("th,tih->ti", hidden_states, self.gate_up_proj[index]).chunk(2, dim=-1)
            mixed = torch.einsum("ti,thi->th", nn.functional.silu(gate) * up, self.down_proj[index])
            final = final + mixed * top_k_weights[:, place, None]
        return final


class WithIdentity(Experts):
    """Adds what a module without parameters makes of the tokens."""

    def __init__(self, number):
        super().__init__(number)
        self.identity = nn.Identity()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights) + 3 * self.identity(hidden_states)


class Mixture(nn.Module):
    """A router and its experts; ``only`` sends every token to the first experts."""

    def __init__(self, experts, *, only=None, keywords=False):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, experts.num_experts), experts
        self.keywords = keywords
        if only is not None:
            with torch.no_grad():
                self.router.bias[:only] += 1000.0

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(TOP, dim=-1)
        if self.keywords:
            mixed = self.experts(hidden_states=tokens, top_k_weights=weights, top_k_index=index)
        else:
            mixed = self.experts(tokens, index, weights)
        return mixed.view_as(hidden_states)


class Dense(nn.Module):
    """Llama 4's: every expert gets every token, in turn."""

    def __init__(self, number):
        super().__init__()
        self.num_experts = number
        self.gate_up_proj = nn.Parameter(torch.randn(number, HIDDEN, 2 * INNER))
        self.down_proj = nn.Parameter(torch.randn(number, INNER, HIDDEN))

    def forward(self, hidden_states):
        each = hidden_states.view(self.gate_up_proj.shape[0], -1, HIDDEN)
        gate, up = torch.bmm(each, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(nn.functional.silu(gate) * up, self.down_proj).view(-1, HIDDEN)


class DenseMixture(nn.Module):
    """Adds to a shared layer's output in place, as Llama 4 does."""

    def __init__(self, number):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, number), Dense(number)

    def forward(self, hidden_states):
        tokens = hidden_states.reshape(-1, HIDDEN)
        scores = self.router(tokens).sigmoid()
        routed = self.experts((tokens * scores.t().unsqueeze(-1)).reshape(-1, HIDDEN))
        out = tokens.sin()
        out.add_(routed.view(scores.shape[1], -1, HIDDEN).sum(0))
        return out.view_as(hidden_states)


def mixture_faults(kind, number, style, only=None, keywords=False, rules=None):
    return mismatches(
        lambda: Mixture(kind(number), only=only, keywords=keywords),
        {"experts": style, **(rules or {})},
        activation(2, 5, HIDDEN),
    )


@pytest.mark.parametrize("keywords", [False, True], ids=["by position", "by keyword"])
@pytest.mark.parametrize(
    ("kind", "skips"), [(Experts, True), (Gathering, False)], ids=["skipping the absent", "running every route"]
)
@pytest.mark.parametrize("number", [4, 5])
def test_a_mixture_equals_the_whole_one(two_ranks, kind, skips, number, keywords):
    style = ExpertsParallel(skips_sentinel_index=skips)
    assert two_ranks.run(mixture_faults, kind, number, style, None, keywords) == [[], []]


@pytest.mark.parametrize("number", [4, 6, 7])
def test_ranks_hold_any_number_of_experts_even_none(four_ranks, number):
    assert four_ranks.run(mixture_faults, Experts, number, ExpertsParallel()) == [[]] * 4


@pytest.mark.parametrize(("kind", "skips"), [(Experts, True), (Gathering, False)])
def test_a_rank_to_which_no_token_comes_has_zero_gradients_and_stays_in_backward(four_ranks, kind, skips):
    style = ExpertsParallel(skips_sentinel_index=skips)
    assert four_ranks.run(mixture_faults, kind, 8, style, TOP) == [[]] * 4


def run_every_route():
    torch.manual_seed(0)
    mixture = parallelized(Mixture(Gathering(6)).double(), {"experts": ExpertsParallel(skips_sentinel_index=False)})
    mixture(activation(2, 5, HIDDEN))


def test_experts_that_run_every_route_need_one_on_every_rank(four_ranks):
    with pytest.raises(RanksFailed, match=r"LayoutError: Gathering .*6 experts over tp=4") as caught:
        four_ranks.run(run_every_route)
    assert {error.type_name for error in caught.value.errors.values()} == {"LayoutError"}
    assert len(caught.value.errors) == 4


def test_scale_input_counts_a_replicated_expert_once(two_ranks):
    rules = {"experts.identity": ScaleInput()}
    assert two_ranks.run(mixture_faults, WithIdentity, 4, ExpertsParallel(), None, False, rules) == [[], []]


def dense_faults(number):
    return mismatches(lambda: DenseMixture(number), {"experts": ExpertsParallel()}, activation(2, 5, HIDDEN))


@pytest.mark.parametrize("number", [4, 8])
def test_every_experts_tokens_in_turn_are_right(four_ranks, number):
    assert four_ranks.run(dense_faults, number) == [[]] * 4


@pytest.mark.parametrize("number", [3, 5])
def test_every_experts_tokens_in_turn_need_equal_shares(two_ranks, number):
    with pytest.raises(RanksFailed, match=rf"LayoutError: Dense takes .* for {number} experts over tp=2"):
        two_ranks.run(dense_faults, number)


def stream_faults(kind, style):
    """Experts alone, whose tokens are the input, reduce-scattered."""
    index = torch.randint(0, 4, (5, TOP), generator=torch.Generator().manual_seed(3))
    weights = activation(5, TOP)

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = kind(4)

        def forward(self, tokens):
            return self.experts(tokens) if kind is Dense else self.experts(tokens, index, weights)

    tokens = activation(20 if kind is Dense else 5, HIDDEN)
    return mismatches(
        Fixed, {"experts": style}, tokens, leaves=style.output_layouts, leaves_plain=style.output_layouts == Replicate()
    )


@pytest.mark.parametrize("kind", [Experts, Dense])
@pytest.mark.parametrize("output", [Replicate(), Shard(0), Shard(-1)])
def test_output_has_the_layout_of_the_rule(two_ranks, kind, output):
    assert two_ranks.run(stream_faults, kind, ExpertsParallel(output_layouts=output)) == [[], []]


def counts_after():
    mixture = parallelized(Mixture(Experts(5)).double(), {"experts": ExpertsParallel()})
    mixture(activation(2, 5, HIDDEN))
    return mixture.experts.num_experts, list(mixture.experts.down_proj.to_local().shape)


def test_a_module_keeps_its_number_of_experts_outside_its_forward(two_ranks):
    assert two_ranks.run(counts_after) == [(5, [3, HIDDEN, INNER]), (5, [2, HIDDEN, INNER])]


def without_parameters():
    parallelized(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), {"0": ExpertsParallel()})


def test_experts_parallel_refuses_a_module_without_parameters(two_ranks):
    with pytest.raises(RanksFailed, match=r"PlanError: ModuleList has no own parameters,.*ExpertsParallel"):
        two_ranks.run(without_parameters)


class Addend(nn.Module):
    """Two bare matrices; with nothing to do where ``silent`` is the rank."""

    def __init__(self, silent=None):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(7, HIDDEN)), nn.Parameter(torch.randn(HIDDEN, 7))
        self.silent = silent

    def forward(self, hidden_states):
        if self.silent == torch.distributed.get_rank():
            return torch.zeros_like(hidden_states)
        return (hidden_states @ self.up.t()).tanh() @ self.down.t()


SPLIT = {"up": ParameterStyle(), "down": ParameterStyle(layout=Shard(1))}


def sum_faults(output, arrives):
    plain = arrives == Replicate()
    how = {"arrives": arrives, "plain": plain, "leaves": output, "leaves_plain": output == Replicate()}
    return mismatches(Addend, {"": AllReduceOutput(output_layouts=output), **SPLIT}, activation(2, 5, HIDDEN), **how)


@pytest.mark.parametrize("arrives", [Replicate(), Shard(1)])
@pytest.mark.parametrize("output", [Replicate(), Shard(1)])
def test_addends_are_summed_and_so_are_the_gradients_of_the_input(two_ranks, output, arrives):
    assert two_ranks.run(sum_faults, output, arrives) == [[], []]


def silent_step():
    module = parallelized(Addend(silent=1).double(), {"": AllReduceOutput(), **SPLIT})
    value = activation(2, 5, HIDDEN).requires_grad_()
    module(value).sum().backward()
    return value.grad is not None


def test_a_rank_that_adds_nothing_stays_in_backward(two_ranks):
    assert two_ranks.run(silent_step, timeout=30) == [True, True]


@pytest.mark.parametrize(
    ("release", "implementation", "skips"),
    [("5.17.0", "eager", False), ("5.17.0", "grouped_mm", True), ("5.18.0", "eager", True), ("6.0.0.dev0", None, True)],
)
def test_eager_experts_of_older_transformers_get_no_index_beyond_their_own(monkeypatch, release, implementation, skips):
    import transformers

    monkeypatch.setattr(transformers, "__version__", release)
    shipped = type("Experts", (nn.Module,), {"__module__": "transformers.models.some.modeling_some"})()
    shipped.config = SimpleNamespace(_experts_implementation=implementation)
    assert skips_sentinel_index(shipped) == skips
    assert skips_sentinel_index(nn.Module())  # experts of one's own keep what their style says


@pytest.mark.parametrize("word", ["moe_tp_experts", "ep_dispatch_experts", "a word of tomorrow"])
def test_stacked_experts_of_a_shipped_plan_are_dispatched_under_any_word(word):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 16, 8))
            self.down_proj = nn.Parameter(torch.zeros(4, 8, 8))

        def forward(self, rows, index, weights): ...

    model = nn.ModuleDict({"router": nn.Linear(8, 4), "experts": Own()})
    with pytest.raises(CapabilityError, match="no module with stacked experts"):
        with_expert_parallelism(None, model)
    object.__setattr__(model, "base_model", model)
    model.config = SimpleNamespace(base_model_ep_plan={"experts": word, "router": "ep_router"})
    assert dict(with_expert_parallelism(None, model)) == {"experts": DispatchExperts()}
