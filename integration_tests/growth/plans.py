"""Calls of ``tp_plans``: plans over layers, experts and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

import tp_plans
from growth.measure import Case
from growth.models import llama, mixture

LAYERS = (2, 6, 20, 60, 200)
EXPERTS = (2, 6, 20, 60, 200)
EXPERT_MODULES = (4, 12, 40, 120, 400)
RULES = (100, 300, 1000, 3000, 10_000)


def _on_layers(call: Callable[[Any], Any]) -> Callable[[int], Callable[[], Any]]:
    def make(size: int) -> Callable[[], Any]:
        model = llama(size)
        return lambda: call(model)

    return make


def _plan(model: nn.Module) -> tp_plans.Plan:
    return tp_plans.plan_for(model)


class _Experts(nn.Module):
    """Mixtures whose experts are modules of their own, as in the code of older models."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(self._expert(experts))}) for _ in range(2))

    def _expert(self, experts: int) -> Iterator[nn.Module]:
        for _ in range(experts):
            yield nn.ModuleDict({n: nn.Linear(8, 8, bias=False, device="meta") for n in ("up_proj", "down_proj")})


def _expert_modules(call: Callable[..., Any], size: int) -> Callable[[], Any]:
    model = _Experts(size)
    rules = {"up_proj": tp_plans.ColwiseParallel(), "down_proj": tp_plans.RowwiseParallel()}
    plan = tp_plans.Plan({f"layers.*.experts.*.{name}": style for name, style in rules.items()})
    return lambda: call(plan, model, tp=2)


def _rules(count: int) -> tp_plans.Plan:
    return tp_plans.Plan({f"layers.{number}.up_proj": tp_plans.ColwiseParallel() for number in range(count)})


def _json(size: int) -> Callable[[], Any]:
    plan = _rules(size)
    return lambda: tp_plans.Plan.from_json(plan.to_json())


def _rule_for_each_module(size: int) -> Callable[[], Any]:
    model = llama(size)
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    plan = tp_plans.Plan({path: tp_plans.NoParallel() for path in paths})
    return lambda: (tp_plans.check(plan, model, tp=2), plan.to_torch(model))


def _expert_parallelism(size: int) -> Callable[[], Any]:
    model = mixture(size, 4)
    return lambda: tp_plans.with_expert_parallelism(tp_plans.infer.suggest(model).plan, model)


def _suggest_experts(size: int) -> Callable[[], Any]:
    model = mixture(2, size)
    return lambda: tp_plans.infer.suggest(model)


CASES = [
    Case("ModelTree.of: layers", LAYERS, _on_layers(tp_plans.model_tree.ModelTree.of)),
    Case("plan_for own: layers", LAYERS, _on_layers(lambda m: tp_plans.plan_for(m, "own"))),
    Case("plan_for: layers", LAYERS, _on_layers(tp_plans.plan_for)),
    Case("check: layers", LAYERS, _on_layers(lambda m: tp_plans.check(_plan(m), m, tp=2))),
    Case("explain: layers", LAYERS, _on_layers(lambda m: tp_plans.explain(_plan(m), m, tp=2))),
    Case("str(explain): layers", LAYERS, _on_layers(lambda m: str(tp_plans.explain(_plan(m), m, tp=2)))),
    Case("suggest: layers", LAYERS, _on_layers(tp_plans.infer.suggest)),
    Case("to_torch: layers", LAYERS, _on_layers(lambda m: _plan(m).to_torch(m))),
    Case("plan_for transformers: layers", LAYERS, _on_layers(lambda m: tp_plans.plan_for(m, "transformers"))),
    Case("plan_for towers: layers", LAYERS, _on_layers(lambda m: tp_plans.plan_for(m, _plan(m), towers_tp=2))),
    Case("check and to_torch, a rule a module: layers", LAYERS, _rule_for_each_module),
    Case("check: experts that are modules", EXPERT_MODULES, partial(_expert_modules, tp_plans.check)),
    Case("explain: experts that are modules", EXPERT_MODULES, partial(_expert_modules, tp_plans.explain)),
    Case("suggest: experts", EXPERTS, _suggest_experts),
    Case("Plan.to_json and from_json: rules", RULES, _json),
    Case("suggest and with_expert_parallelism: layers of experts", LAYERS, _expert_parallelism),
    Case(
        "plan_for rowwise=False: rules",
        RULES,
        lambda size: partial(tp_plans.plan_for, None, _rules(size), rowwise=False),
    ),
]
