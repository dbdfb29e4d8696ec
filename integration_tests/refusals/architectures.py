"""Architectures whose plan is refused, plans that transformers ships, and adapters that no plan describes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
from torch import nn

from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import Own, Tree, refuse
from tp_plans import Partial, RowwiseParallel, plan_for, register, registry
from tp_plans.hugging_face.translate import from_hugging_face
from tp_plans.styles.words import parameter_style_from_name

TP = {"tp": 2}
LORA = peft.LoraConfig(r=2, target_modules=["down_proj"])


def _entry(name: str) -> Any:
    return next(each for each in registry.architectures() if each.class_name == name)


def _limited(axes: dict[str, int], options: dict[str, Any], **limits: Any) -> None:
    """Parallelize a model of an architecture that cannot do everything."""
    entry = replace(_entry("LlamaForCausalLM"), **limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_BY_NAME", {**registry._BY_NAME, **dict.fromkeys(entry.names, entry)})
        refuse(tiny_model("LlamaForCausalLM"), axes, **options)


class LlamaForCausalLM(Own):
    """By its name, a model with blocks at another place."""


class Qwen3ForQuestionAnswering(Own):
    """By its name, a known model with another head."""

    config = SimpleNamespace(architectures=["Qwen3ForCausalLM"])


def _shipping(model: nn.Module, **words: str) -> Any:
    """A model with a plan of transformers'."""
    found: Any = model
    found._tp_plan = words
    return found


def _addends() -> None:
    rules = plan_for("LlamaForCausalLM").override(
        {"model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Partial())}
    )
    refuse(peft.get_peft_model(tiny_model("LlamaForCausalLM"), LORA), TP, plan=rules)


CASES: Provocations = {
    "tp_plans/registry.py": {
        "PlanError: register takes": lambda: register(3),  # type: ignore[arg-type]
        "PlanError: belongs to LlamaForCausalLM already": lambda: register(
            replace(_entry("LlamaForCausalLM"), notes="another")
        ),
        "UnknownArchitectureError: no plan is known for": lambda: plan_for("birch"),
        "UnknownArchitectureError: keeps its blocks at": lambda: plan_for(LlamaForCausalLM(), "own"),
        "UnknownArchitectureError: with another head": lambda: plan_for(Qwen3ForQuestionAnswering),
    },
    "tp_plans/models/spec.py": {
        "CapabilityError: has no sequence-parallel form": lambda: _limited(
            TP, {"sequence_parallel": True}, sequence_parallel=False
        ),
    },
    "tp_plans/infer/inner_models.py": {
        "UnknownArchitectureError: carries adapters inside a module of yours": lambda: refuse(
            Tree(policy=peft.get_peft_model(tiny_model("LlamaForCausalLM"), LORA), value=nn.Linear(64, 1)), TP
        ),
    },
    "tp_plans/infer/complete.py": {
        "PlanError: carries low-rank adapters": lambda: refuse(
            peft.inject_adapter_in_model(LORA, tiny_model("LlamaForCausalLM")), TP, plan="inferred"
        ),
    },
    "tp_plans/styles/words.py": {
        "UnknownStyleError: unknown style word 'colums' for 'lm_head'": lambda: refuse(
            Own(), TP, plan={"lm_head": "colums"}
        ),
        "UnknownStyleError: unknown style word 'sequence_parallel'": lambda: parameter_style_from_name(
            "sequence_parallel", 2
        ),
    },
    "tp_plans/hugging_face/translate.py": {
        "PlanError: is not a model: the plan that transformers ships": lambda: from_hugging_face(Own),
        "PlanError: ships no tensor-parallel plan": lambda: from_hugging_face(Own()),
        "PlanError: none of its patterns matches": lambda: from_hugging_face(_shipping(Own(), head="colwise")),
        "PlanError: has no get_input_embeddings()": lambda: from_hugging_face(
            _shipping(Tree(fc=nn.Linear(2, 2)), fc="rowwise"), sequence_parallel=True
        ),
    },
    "tp_plans/styles/adapters.py": {
        "PlanError: cannot carry a low-rank adapter": _addends,
    },
}
