"""Which modules are found to select experts, and which mixtures are refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import ModelError, record_routes, replay_routes
from fsdp_runtime.steps.routing.routers import find_routers

HIDDEN, EXPERTS = 4, 6


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        hidden = torch.einsum("th,tkho,tkop->tkp", tokens, self.up[ids], self.down[ids])
        return (hidden * weights[..., None]).sum(1)


class _Inline(nn.Module):
    """A mixture whose own code selects; its gate is a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = _Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        weights, ids = self.gate(tokens).softmax(-1).topk(2, dim=-1)
        return tokens + self.experts(tokens, ids, weights)


class _Router(nn.Linear):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(tokens)
        return torch.topk(input=logits, k=2)


class _Listed(nn.Module):
    """A mixture with a list of experts and a router of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = _Router(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        weights, ids = self.router(tokens)
        each = torch.stack([expert(tokens) for expert in self.experts], 1)
        return tokens + (each.gather(1, ids[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)


class _Argmax(_Inline):
    def forward(self, tokens: Tensor) -> Tensor:
        ids = self.gate(tokens).argmax(-1, keepdim=True)
        return self.experts(tokens, ids, torch.ones_like(ids, dtype=tokens.dtype))


class _TwoRouters(_Listed):
    def __init__(self) -> None:
        super().__init__()
        self.other = _Router(HIDDEN, EXPERTS)


class _Sampled(nn.Linear):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(tokens)
        if logits.shape[-1] < 2:
            return torch.topk(logits, 2)
        return logits[:, :2], torch.arange(2).expand(len(tokens), 2)


class _NoSelection(_Listed):
    def __init__(self) -> None:
        super().__init__()
        self.router = _Sampled(HIDDEN, EXPERTS)


def _model(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ModuleList([block(), block()]))


def _run(model: nn.Module, tokens: Tensor) -> Tensor:
    for block in model[0]:
        tokens = block(tokens)
    return tokens


@pytest.mark.parametrize(("block", "path"), [(_Inline, "0.{}"), (_Listed, "0.{}.router")])
def test_selection_in_a_router_or_in_the_mixture_itself_is_replayed(block: type[nn.Module], path: str) -> None:
    model, tokens = _model(block), torch.randn(5, HIDDEN)
    assert [*find_routers(model).by_path] == [path.format(index) for index in (0, 1)]
    plain = _run(model, tokens)
    with record_routes(model) as routes:
        assert torch.equal(_run(model, tokens), plain)
    assert torch.equal(next(iter(routes.values())), _own_ids(model, tokens))
    with replay_routes(model, routes):
        assert torch.equal(_run(model, tokens), plain)
    with replay_routes(model, {name: (ids + 1) % EXPERTS for name, ids in routes.items()}):
        assert not torch.allclose(_run(model, tokens), plain)


def _own_ids(model: nn.Module, tokens: Tensor) -> Tensor:
    block = model[0][0]
    linear = block.gate if isinstance(block, _Inline) else block.router
    return nn.Linear.forward(linear, tokens).topk(2).indices


def test_routers_are_found_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = _model(_Listed)
    assert {router.experts for router in find_routers(model).by_path.values()} == {EXPERTS}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (_Argmax, "0.0 (_Argmax) holds experts, and neither its code nor the code of its children"),
        (_TwoRouters, "several modules that may select its experts: 0.0.router (_Router), 0.0.other (_Router)"),
    ],
)
def test_a_selection_that_cannot_be_identified_is_refused_by_name(block: type[nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)), record_routes(_model(block)):
        pass


def test_a_router_that_runs_without_its_selection_is_refused() -> None:
    model = _model(_NoSelection)
    with pytest.raises(ModelError, match=r"0.0.router .* ran without a selection among its 6"), record_routes(model):
        _run(model, torch.randn(5, HIDDEN))
