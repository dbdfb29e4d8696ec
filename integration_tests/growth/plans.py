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
    return lambda: (tp_plans.check(plan, model, tp=2), tp_plans.styles_by_path(plan, model))


def _expert_parallelism(size: int) -> Callable[[], Any]:
    model = mixture(size, 4)
    return lambda: tp_plans.with_expert_parallelism(tp_plans.suggest(model).plan, model)


def _suggest_experts(size: int) -> Callable[[], Any]:
    model = mixture(2, size)
    return lambda: tp_plans.suggest(model)


CASES = [
    Case("ModelTree.of: layers", LAYERS, _on_layers(tp_plans.ModelTree.of)),
    Case("plan_for: layers", LAYERS, _on_layers(tp_plans.plan_for)),
    Case("resolve_plan: layers", LAYERS, _on_layers(lambda m: tp_plans.resolve_plan("auto", m))),
    Case("check: layers", LAYERS, _on_layers(lambda m: tp_plans.check(_plan(m), m, tp=2))),
    Case("explain: layers", LAYERS, _on_layers(lambda m: tp_plans.explain(_plan(m), m, tp=2))),
    Case("str(explain): layers", LAYERS, _on_layers(lambda m: str(tp_plans.explain(_plan(m), m, tp=2)))),
    Case("suggest: layers", LAYERS, _on_layers(tp_plans.suggest)),
    Case("styles_by_path: layers", LAYERS, _on_layers(lambda m: tp_plans.styles_by_path(_plan(m), m))),
    Case("from_hugging_face: layers", LAYERS, _on_layers(tp_plans.from_hugging_face)),
    Case("split_towers: layers", LAYERS, _on_layers(lambda m: tp_plans.split_towers(_plan(m), m, tp=2))),
    Case("check and styles_by_path, a rule a module: layers", LAYERS, _rule_for_each_module),
    Case("check: experts that are modules", EXPERT_MODULES, partial(_expert_modules, tp_plans.check)),
    Case("explain: experts that are modules", EXPERT_MODULES, partial(_expert_modules, tp_plans.explain)),
    Case("suggest: experts", EXPERTS, _suggest_experts),
    Case("Plan.to_json and from_json: rules", RULES, _json),
    Case("suggest and with_expert_parallelism: layers of experts", LAYERS, _expert_parallelism),
    Case("rowwise_free: rules", RULES, lambda size: partial(tp_plans.rowwise_free, _rules(size))),
]
