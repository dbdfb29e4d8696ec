"""``PrepareModuleInput``: one argument brought into a layout, wherever it stands; all else passed as it came."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.layers import arriving, parallelized
from tp_plans import Partial, PrepareModuleInput, Replicate, Shard


class Echo(nn.Module):
    """Gives back what it was given."""

    def forward(self, *args, **kwargs):
        return args, kwargs


def described(value):
    return (str(value.placements[0]), list(value.shape)) if isinstance(value, DTensor) else value


def echo(style, args, kwargs):
    """What arrives inside, DTensors described."""
    given_args, given_kwargs = parallelized(Echo(), {"": style})(*args, **kwargs)
    return [described(value) for value in given_args], {name: described(v) for name, v in given_kwargs.items()}


X = torch.arange(15.0).view(1, 5, 3)
WHOLE, CUT = (str(torch.distributed.tensor.Replicate()), [1, 5, 3]), (str(torch.distributed.tensor.Shard(1)), [1, 5, 3])


@pytest.mark.parametrize(
    ("style", "args", "kwargs", "expected"),
    [
        (PrepareModuleInput(), (X,), {}, ([WHOLE], {})),
        (PrepareModuleInput(), (), {"hidden_states": X}, ([], {"hidden_states": WHOLE})),
        (PrepareModuleInput(), (X, 1), {"x": None}, ([WHOLE, 1], {"x": None})),
        (PrepareModuleInput(layout=Shard(1)), (X,), {}, ([CUT], {})),
        (PrepareModuleInput(layout=Shard(-2)), (X,), {}, ([CUT], {})),
        (PrepareModuleInput(position=2), ("a", 2, X), {}, (["a", 2, WHOLE], {})),
        (PrepareModuleInput(position=2), ("a", 2), {}, (["a", 2], {})),
        (PrepareModuleInput(argument="x", position=None), (), {"x": X, "y": 1}, ([], {"x": WHOLE, "y": 1})),
        (PrepareModuleInput(argument="x", position=None), ("a",), {"x": None}, (["a"], {"x": None})),
        (PrepareModuleInput(argument="x", position=None), ("a",), {}, (["a"], {})),
        (PrepareModuleInput(argument="x", position=None), (), {}, ([], {})),
    ],
)
def test_one_argument_is_prepared_and_the_others_pass(two_ranks, style, args, kwargs, expected):
    assert two_ranks.run(echo, style, args, kwargs) == [expected, expected]


def untouched(layout):
    given = arriving(X, layout, plain=False)
    (args, _) = parallelized(Echo(), {"": PrepareModuleInput(layout=layout)})(given)
    return args[0] is given


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)])
def test_a_tensor_that_lies_right_already_is_the_same_object_inside(two_ranks, layout):
    assert two_ranks.run(untouched, layout) == [True, True]


def values(layout):
    given = arriving(X, layout, plain=False)
    (args, _) = parallelized(Echo(), {"": PrepareModuleInput()})(given)
    return torch.equal(args[0].to_local(), X)


@pytest.mark.parametrize("layout", [Shard(1), Shard(2), Partial()])
def test_prepared_input_holds_full_values(two_ranks, layout):
    assert two_ranks.run(values, layout) == [True, True]
