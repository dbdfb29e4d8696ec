"""Selective checkpointing keeps no result that is changed in place later."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.steps import SelectiveCheckpoint

Change = Callable[[Tensor, Tensor], Tensor]


def _matmul_then_add(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.matmul(x, weight.expand(len(x), 4, 4))
    y += 1.0
    return torch.tanh(y) * y


def _written_through_a_view(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.bmm(x, weight.expand(len(x), 4, 4))
    y.view(-1)[:5].mul_(2.0)
    return torch.tanh(y) * y


def _random_between(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.matmul(torch.nn.functional.dropout(x, 0.5), weight.expand(len(x), 4, 4))
    y += 1.0
    return torch.tanh(y) * y


def _unchanged(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.bmm(x, weight.expand(len(x), 4, 4))
    return torch.tanh(y) * y


def _two_products(x: Tensor, weight: Tensor) -> Tensor:
    full = weight.expand(len(x), 4, 4)
    return torch.bmm(torch.tanh(torch.bmm(x, full)), full)


class _Block(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 4, 4))
        self.child = nn.Identity()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, self.weight)


class _Model(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(change), _Block(change)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("change", [_matmul_then_add, _written_through_a_view, _random_between, _unchanged])
@pytest.mark.parametrize("mode", ["selective", SelectiveCheckpoint(save=("aten.bmm", "aten.tanh"))])
def test_gradients_equal_those_without_checkpointing(change: Change, mode: SelectiveCheckpoint) -> None:
    torch.manual_seed(0)
    plain = _Model(change)
    model = parallelize(copy.deepcopy(plain), MeshSpec().build(device_type="cpu"), activation_checkpointing=mode)
    for step in range(2):
        x = torch.randn(2, 3, 4)
        torch.manual_seed(step)
        expected = plain(x)
        torch.manual_seed(step)
        found = model(x)
        assert torch.equal(found, expected)
        expected.sum().backward()
        found.sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_operators_that_are_not_changed_stay_saved() -> None:
    model = parallelize(
        _Model(_matmul_then_add), MeshSpec().build(device_type="cpu"), activation_checkpointing="selective"
    )
    model(torch.randn(2, 3, 4)).sum().backward()
    for layer in model.layers:
        packets = {str(operator.overloadpacket) for operator in layer._fsdp_runtime_state.checkpoint_contexts.saved}
        assert "aten.bmm" not in packets
        assert "aten.mm" in packets


def test_a_second_backward_reads_no_result_that_the_first_left_over() -> None:
    """All products of a block have one shape, and the first recomputation ends before the last of them."""
    torch.manual_seed(0)
    plain = _Model(_two_products)
    model = parallelize(copy.deepcopy(plain), MeshSpec().build(device_type="cpu"), activation_checkpointing="selective")
    x = torch.randn(2, 4, 4)
    for each in (plain, model):
        out = each(x)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
