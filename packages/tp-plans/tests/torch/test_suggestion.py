"""Suggested plans against those that are known, and against one process."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from coverage.table import entries
from coverage.table import tiny_model as small
from harness.models import ARCHITECTURES, tiny_model
from harness.parity import Case, assert_parity, compare, mesh_for
from tp_plans import CapabilityError, NoParallel, PrepareModuleInput, TpPlansError, check, plan_for
from tp_plans.infer import suggest
from tp_plans.styles import GatheredParameters


def with_any_argument(plan):
    """How a sub-layer's author called its first argument does not matter to who passes it by position."""
    return {
        pattern: replace(style, argument="hidden_states") if isinstance(style, PrepareModuleInput) else style
        for pattern, style in plan.items()
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_suggest_gives_the_plan_of_a_known_architecture(architecture, tied):
    model = tiny_model(architecture, tied=tied)
    assert with_any_argument(suggest(model).plan) == with_any_argument(plan_for(model))


def parallelize(model, mesh):
    return parallelize_module(model, mesh["tp"], suggest(model).plan.to_torch())


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForConditionalGeneration"])
def test_a_suggested_plan_equals_single_process(two_ranks, architecture):
    assert_parity(two_ranks.run(compare, Case(architecture, {"tp": 2}, parallelize)))


class Mix(nn.Module):
    """Fused attention with a norm over each head's queries, and its own names for everything."""

    def __init__(self):
        super().__init__()
        self.heads, self.d_head = 4, 8
        self.packed_qkv = nn.Linear(24, 3 * 32)
        self.sharpen = nn.RMSNorm(8)
        self.back = nn.Linear(32, 24)

    def forward(self, x):
        shape = (*x.shape[:-1], self.heads, self.d_head)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.packed_qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(self.sharpen(q), k, v, is_causal=True)
        return self.back(mixed.transpose(1, 2).flatten(-2))


class Think(nn.Module):
    """A feed-forward whose features meet one another, which no shape tells."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 56), nn.Linear(56, 24)

    def forward(self, x):
        return self.narrow(torch.softmax(self.wide(x), -1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.RMSNorm(24), nn.RMSNorm(24)
        self.mix, self.think = Mix(), Think()

    def forward(self, x):
        x = x + self.mix(self.one(x))
        return x + self.think(self.two(x))


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(33, 24)
        self.tower = nn.ModuleList(Layer() for _ in range(2))
        self.finish = nn.RMSNorm(24)
        self.speak = nn.Linear(24, 33, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.tower:
            x = layer(x)
        return self.speak(self.finish(x))


class TiedByCode(Unknown):
    """Its code multiplies with the table of the embedding: no module is the head."""

    def __init__(self):
        super().__init__()
        del self.speak

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.tower:
            x = layer(x)
        return nn.functional.linear(self.finish(x), self.words.weight)


class ScaledHead(nn.Linear):
    """A head that multiplies each of its outputs by a factor, as that of Dory."""

    def __init__(self, features, words):
        super().__init__(features, words, bias=False)
        self.factors = nn.Parameter(torch.rand(words))

    def forward(self, x):
        return super().forward(x) * self.factors


class WithScaledHead(Unknown):
    def __init__(self):
        super().__init__()
        self.speak = ScaledHead(self.speak.in_features, self.speak.out_features)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors_of_an_unknown_model(kind=Unknown):
    """The largest errors of the output and of any gradient."""
    torch.manual_seed(0)
    whole = kind().double()
    split = parallelize(copy.deepcopy(whole), mesh_for({"tp": 2}))
    ids = torch.arange(14).view(2, 7)
    expected, found = whole(ids), full(split(ids))
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    wanted = dict(whole.named_parameters())
    pairs = [(full(p.grad), wanted[name].grad) for name, p in split.named_parameters()]
    share = sum(isinstance(p, DTensor) and p.placements[0].is_shard() for p in split.parameters())
    return max((one - other).abs().max().item() for one, other in [(found, expected), *pairs]), share


def test_a_model_of_unknown_names_and_code_trains_as_one_process(two_ranks):
    torch.manual_seed(0)
    suggestion = suggest(Unknown())
    assert "tower.*.mix" in suggestion.plan
    assert any("softmax" in doubt.what for doubt in suggestion.doubts)
    for error, split in two_ranks.run(errors_of_an_unknown_model):
        assert error < 1e-12
        assert split >= 2 + 2 * 6  # table, head, and in each block four matrices and the biases of three


def test_a_table_that_the_code_multiplies_with_is_gathered_for_it(two_ranks):
    assert suggest(TiedByCode()).plan[""] == GatheredParameters(names=("words.weight",))
    for error, split in two_ranks.run(errors_of_an_unknown_model, TiedByCode):
        assert error < 1e-12
        assert split >= 1 + 2 * 6


def test_a_head_with_a_factor_for_each_word_is_split_with_its_factors(two_ranks):
    (doubt,) = [each for each in suggest(WithScaledHead()).doubts if each.where == "speak"]
    assert "ScaledHead has a custom forward" in doubt.what
    for error, split in two_ranks.run(errors_of_an_unknown_model, WithScaledHead):
        assert error < 1e-12
        assert split >= 3 + 2 * 6  # the factors too


class Scale(nn.Module):
    """A norm by another name."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(24))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Trunk(nn.Module):
    """Adds learned positions to the embeddings, and takes no embeddings from outside."""

    def __init__(self, norm):
        super().__init__()
        self.words, self.places = nn.Embedding(33, 24), nn.Embedding(9, 24)
        self.tower = nn.ModuleList(Layer() for _ in range(2))
        for layer in self.tower:
            layer.one, layer.two = norm(), norm()
        self.finish = norm()

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.tower:
            x = layer(x)
        return self.finish(x)


class TwoHeads(nn.Module):
    """A head for tokens and one for values, on a trunk of its own or on parts at the top."""

    def __init__(self, norm, nested):
        super().__init__()
        trunk = Trunk(norm)
        self.trunk = trunk if nested else None
        if not nested:
            self.words, self.places, self.tower, self.finish = trunk.words, trunk.places, trunk.tower, trunk.finish
        self.speak, self.value = nn.Linear(24, 33, bias=False), nn.Linear(24, 1)

    def forward(self, ids):
        x = Trunk.forward(self, ids) if self.trunk is None else self.trunk(ids)
        return self.speak(x), self.value(x)


class OneOutput(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return [self.model(ids)]


def rms_norm():
    return nn.RMSNorm(24)


OWN_MODELS = {
    "norms by another name": lambda: TwoHeads(Scale, nested=False),
    "norms by another name, in a trunk": lambda: TwoHeads(Scale, nested=True),
    "known norms": lambda: TwoHeads(rms_norm, nested=False),
    "known norms, in a trunk": lambda: TwoHeads(rms_norm, nested=True),
}
ALL_OWN_MODELS = {**OWN_MODELS, "tied by code": lambda: OneOutput(TiedByCode())}


def sequence_parallel_errors():
    """The largest errors of outputs and gradients of each own model, or the error that its forward raised."""
    found = {}
    for name, build in ALL_OWN_MODELS.items():
        torch.manual_seed(0)
        reference = build().double()
        model = copy.deepcopy(reference)
        try:
            plan = suggest(model, sequence_parallel=True).plan
            parallelize_module(model, mesh_for({"tp": 2})["tp"], plan.to_torch())
            ids = torch.arange(14).view(2, 7)
            expected, outputs = reference(ids), [full(output) for output in model(ids)]
            weights = [torch.randn_like(output) for output in expected]
            sum((output * weight).sum() for output, weight in zip(expected, weights, strict=True)).backward()
            sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True)).backward()
            wanted = dict(reference.named_parameters())
            pairs = [(full(p.grad), wanted[name].grad) for name, p in model.named_parameters()]
            found[name] = max((a - b).abs().max().item() for a, b in [*zip(outputs, expected, strict=True), *pairs])
        except (TpPlansError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_the_suggested_sequence_parallel_plan_of_an_own_model_trains_as_one_process(two_ranks):
    for errors in two_ranks.run(sequence_parallel_errors):
        assert {name: error for name, error in errors.items() if isinstance(error, str) or error > 1e-12} == {}
        assert errors.keys() == ALL_OWN_MODELS.keys()


@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_suggested_sequence_parallel_plan_passes_the_check(name):
    model = OWN_MODELS[name]()
    assert check(suggest(model, sequence_parallel=True).plan, model, tp=2).errors == ()


@pytest.mark.parametrize("name", OWN_MODELS)
@pytest.mark.parametrize("style", [None, NoParallel()])
def test_the_check_finds_a_replicated_final_norm_under_sequence_parallelism(name, style):
    model = OWN_MODELS[name]()
    plan = suggest(model, sequence_parallel=True).plan
    norm = next(path for path in ("finish", "trunk.finish") if path in plan)
    (error,) = check(plan.override({norm: style}), model, tp=2).errors
    assert error.where == norm
    assert "sharded on the sequence" in error.message
    assert "SequenceParallel()" in error.fix


def test_a_weight_that_is_read_by_a_method_other_than_forward_stays_replicated():
    model = small(entries()["gemma3n_text"])
    model.config.altup_num_inputs = 12  # a matrix large enough to be split, read by predict(), which the block calls
    plan = suggest(type(model)(model.config)).plan
    assert not [path for path, style in plan.items() if "altup" in path and isinstance(style, GatheredParameters)]


@pytest.mark.parametrize("name", ["gemma3n_text", "hrm_text", "inkling2_text"])
def test_no_sequence_parallel_plan_is_suggested_for_what_has_no_such_form(name):
    model = small(entries()[name])
    assert suggest(model).plan
    with pytest.raises(CapabilityError, match="has no sequence-parallel form: its blocks"):
        suggest(model, sequence_parallel=True)
