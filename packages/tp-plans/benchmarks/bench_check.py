"""Finding and checking the plan of an 80-layer model without weights, beside a plain match of its patterns."""

from __future__ import annotations

import argparse
from fnmatch import fnmatch

from deep import deep_model
from torch import nn
from turns import table, take_turns

import tp_plans


def matched(model: nn.Module) -> int:
    """What torch does to find the modules of a plan: every pattern against every path."""
    plan = tp_plans.plan_for("LlamaForCausalLM")
    return sum(fnmatch(path, pattern) for path, _ in model.named_modules() for pattern in plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    model = deep_model()
    steps = {
        "fnmatch, every pattern against every path": (lambda: model, matched),
        "plan_for and check": (lambda: model, lambda m: tp_plans.check(tp_plans.plan_for(m), m, tp=8)),
        "explain": (lambda: model, lambda m: tp_plans.explain(tp_plans.plan_for(m), m, tp=8)),
        "suggest": (lambda: model, tp_plans.infer.suggest),
    }
    times = take_turns(steps, options.rounds)
    table("80 layers on the meta device", times, None, "plan_for and check under 100 ms")


if __name__ == "__main__":
    main()
