"""Modules that every rank holds whole: norms on the stream, norms over heads, whatever is not split."""

import pytest
import torch
from torch import nn

from harness.layers import arriving, mismatches, parallelized
from harness.ranks import RanksFailed
from tp_plans import NoParallel, Partial, Replicate, SequenceParallel, Shard

WIDTH = 6


def activation(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def norm():
    return nn.LayerNorm(WIDTH)


def stream_faults(style, length, **how):
    return mismatches(norm, {"": style}, activation(3, length, WIDTH), **how)


@pytest.mark.parametrize("keyword", [None, "input"])
def test_a_replicated_norm_on_a_whole_activation_is_right(two_ranks, keyword):
    for plain in (True, False):
        how = {"plain": plain, "leaves_plain": plain, "keyword": keyword}
        assert two_ranks.run(stream_faults, NoParallel(), 5, **how) == [[], []]


def head_faults(**how):
    """A norm over each head's features, on this rank's heads: what q and k norms are."""
    return mismatches(norm, {"": NoParallel(gradient="partial")}, activation(3, 5, 7, WIDTH), **how)


def test_a_norm_over_heads_sums_its_gradient(two_ranks):
    how = {"arrives": Shard(2), "leaves": Shard(2)}
    assert two_ranks.run(head_faults, **how) == [[], []]
    assert two_ranks.run(head_faults, plain=False, leaves_plain=False, **how) == [[], []]


def projection_faults(gradient, **how):
    """A layer whose output has another size than its input."""
    return mismatches(
        lambda: nn.Linear(WIDTH, 11), {"": NoParallel(gradient=gradient)}, activation(3, 5, WIDTH), plain=False, **how
    )


def test_a_replicated_layer_may_change_the_size_of_the_features(two_ranks):
    assert two_ranks.run(projection_faults, "full", leaves_plain=False) == [[], []]
    how = {"arrives": Shard(1), "leaves": Shard(1), "leaves_plain": False}
    assert two_ranks.run(projection_faults, "partial", **how) == [[], []]


class Added(nn.Module):
    """Two parameters that are added elementwise: they get one gradient."""

    def __init__(self, *shape):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(shape)) for _ in range(2))

    def forward(self, values):
        return values * (self.first + self.second)


def scaled_gradients(*shape):
    """Return gradients after halving; of matrices also where the module above takes the parts of its children."""
    found = []
    for rule in ("", "0"):
        module = parallelized(nn.Sequential(Added(*shape)).double(), {rule: NoParallel(), "0": NoParallel()})
        module(torch.ones(3, WIDTH, dtype=torch.float64)).sum().backward()
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)
            found.append(parameter.grad.to_local().unique().tolist())
    return found


@pytest.mark.parametrize(("shape", "gradient"), [((WIDTH,), 1.5), ((3, WIDTH), 0.5)])
def test_gradients_of_parameters_that_are_added_share_no_memory(two_ranks, shape, gradient):
    assert two_ranks.run(scaled_gradients, *shape) == [[[gradient]] * 4] * 2


def gradient_of_gradient(style):
    module = parallelized(norm().double(), {"": style})
    loss = module(activation(3, 4, WIDTH).requires_grad_()).full_tensor().square().sum()
    torch.autograd.grad(loss, list(module.parameters()), create_graph=True)


def test_a_gradient_of_a_gradient_is_refused(two_ranks):
    with pytest.raises(RanksFailed, match="CapabilityError: gradients of gradients"):
        two_ranks.run(gradient_of_gradient, SequenceParallel())


def apply(build, style, layout):
    parallelized(build().double(), {"": style})(arriving(activation(3, 5, WIDTH), layout, plain=False))


@pytest.mark.parametrize(
    ("gradient", "layout", "fix"),
    [
        ("full", Shard(1), "use NoParallel(gradient='partial')"),
        ("partial", Replicate(), "use NoParallel(gradient='full')"),
        ("full", Partial(), "give it the summed activation"),
        ("partial", Partial(), "give it the summed activation"),
    ],
)
def test_an_activation_under_which_the_gradient_would_be_wrong_is_refused(two_ranks, gradient, layout, fix):
    with pytest.raises(RanksFailed) as caught:
        two_ranks.run(apply, norm, NoParallel(gradient=gradient), layout)
    assert {error.type_name for error in caught.value.errors.values()} == {"LayoutError"}
    assert len(caught.value.errors) == 2
    assert fix in caught.value.errors[0].message
    assert "LayerNorm" in caught.value.errors[0].message


def summing():
    return SumTokens()


class SumTokens(nn.Module):
    """Removes the dim that is cut."""

    def forward(self, activation):
        return activation.sum(dim=1)


def test_an_output_without_the_cut_dim_is_refused(two_ranks):
    with pytest.raises(RanksFailed) as caught:
        two_ranks.run(apply, summing, NoParallel(gradient="partial"), Shard(1))
    assert {error.type_name for error in caught.value.errors.values()} == {"LayoutError"}


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize(
    ("arrives", "plain"),
    [(Replicate(), True), (Replicate(), False), (Shard(1), False), (Shard(-1), False), (Partial(), False)],
)
def test_a_sequence_parallel_norm_takes_any_layout_and_length(two_ranks, arrives, plain, length):
    how = {"arrives": arrives, "plain": plain, "leaves": Shard(1), "leaves_plain": False}
    assert two_ranks.run(stream_faults, SequenceParallel(), length, **how) == [[], []]


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_sequence_dim_may_be_any_dim(two_ranks, dim):
    how = {"leaves": Shard(dim), "leaves_plain": False}
    assert two_ranks.run(stream_faults, SequenceParallel(sequence_dim=dim), 5, **how) == [[], []]


def test_a_sequence_parallel_norm_takes_its_input_by_keyword(two_ranks):
    how = {"leaves": Shard(1), "leaves_plain": False, "keyword": "input"}
    assert two_ranks.run(stream_faults, SequenceParallel(), 5, **how) == [[], []]
