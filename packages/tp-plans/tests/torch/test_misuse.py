"""Wrong arguments, generated, to every public function: an error of this package or a right result."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tp_plans
from harness.misuse import Call, complaint, wrong_arguments
from tp_plans import ColwiseParallel, Plan, RowwiseParallel

ERRORS = (tp_plans.TpPlansError,)
#: The records that functions return, and names of several types.
RESULTS = {
    *("BatchDivisibility", "CheckReport", "CollectiveSummary", "Doubt", "Explanation", "Finding", "PlanDiff"),
    *("AdapterStyles", "RuleChange", "RuleExplanation", "ShardedParameter", "Suggestion", "ModelTree"),
    *("Layout", "Style"),
}


class Model(torch.nn.Module):
    """Two blocks of two linear layers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        blocks = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)) for _ in range(2)]
        self.layers = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(4, 10)

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def plan():
    return Plan({"layers.*.0": ColwiseParallel(), "layers.*.1": RowwiseParallel()})


def planned():
    return {"plan": plan(), "model": Model()}


def architecture():
    sublayers = (tp_plans.SublayerSpec(path="mlp", colwise=("up",), rowwise="down"),)
    decoder = tp_plans.DecoderSpec(sublayers=sublayers, norms=("norm",))
    return {"class_name": "OwnForCausalLM", "model_type": "own", "decoder": decoder}


def decoder_arguments():
    return {"decoder": architecture()["decoder"], "name": "own"}


#: The classes that users construct, with what has no default.
CLASSES = {
    "Architecture": architecture,
    "DecoderSpec": lambda: {"sublayers": architecture()["decoder"].sublayers, "norms": ("norm",)},
    "ExpertsSpec": lambda: {"path": "experts"},
    "FusedLinear": lambda: {"name": "qkv", "fused_sizes": (1, 1, 1)},
    "Plan": lambda: {"rules": {"0": ColwiseParallel()}},
    "ReplicatedSublayer": lambda: {"path": "mixer", "linears": ("proj",)},
    "Shard": lambda: {"dim": 0},
    "SublayerSpec": lambda: {"path": "mlp", "colwise": ("up",), "rowwise": "down"},
}
STYLES = [name for name in tp_plans.__all__ if dataclasses.is_dataclass(getattr(tp_plans, name))]
STYLES = [name for name in STYLES if name not in RESULTS and dataclasses.fields(getattr(tp_plans, name))]

CALLS = {
    **{name: Call(getattr(tp_plans, name), CLASSES.get(name, dict)) for name in sorted({*STYLES, *CLASSES})},
    "ModelTree.of": Call(tp_plans.ModelTree.of, lambda: {"model": Model()}),
    "Plan.diff": Call(plan().diff, lambda: {"other": plan()}),
    "Plan.from_json": Call(Plan.from_json, lambda: {"text": plan().to_json()}),
    "Plan.match": Call(plan().match, lambda: {"path": "layers.0.0"}),
    "Plan.override": Call(plan().override, lambda: {"rules": {"head": ColwiseParallel()}}),
    "Plan.to_json": Call(plan().to_json),
    "Plan.with_prefix": Call(plan().with_prefix, lambda: {"prefix": "model"}),
    "adapter_styles": Call(tp_plans.adapter_styles, lambda: {"style": ColwiseParallel()}),
    "batch_divisibility": Call(tp_plans.batch_divisibility, lambda: {"plan": plan(), "tp": 2}),
    "check": Call(tp_plans.check, lambda: {**planned(), "tp": 2}),
    "decoder_plan": Call(tp_plans.decoder_plan, decoder_arguments),
    "explain": Call(tp_plans.explain, lambda: {**planned(), "tp": 2}),
    "from_hugging_face": Call(tp_plans.from_hugging_face, lambda: {"model": Model()}),
    "plan_for": Call(tp_plans.plan_for, lambda: {"target": "LlamaForCausalLM"}),
    "register": Call(tp_plans.register, lambda: {"entry": tp_plans.architectures()[0]}),
    "resolve_plan": Call(tp_plans.resolve_plan, planned),
    "resolve_style": Call(tp_plans.resolve_style, lambda: {"style": ColwiseParallel(), "owner": Model()}),
    "rowwise_free": Call(tp_plans.rowwise_free, lambda: {"plan": plan()}),
    "styles_by_path": Call(tp_plans.styles_by_path, planned),
    "suggest": Call(tp_plans.suggest, lambda: {"model": Model()}),
}


def test_every_public_function_is_called():
    without_arguments = {"Replicate", "Partial", "ScaleInput", "architectures"}
    public = {name for name in tp_plans.__all__ if not name.endswith("Error")}
    assert {name.partition(".")[0] for name in CALLS} - {"ModelTree"} == public - RESULTS - without_arguments


@pytest.mark.parametrize("name", [name for name in CALLS if name != "from_hugging_face"])
def test_right_arguments_are_taken(name):
    CALLS[name].function(**CALLS[name].valid())


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=50, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_wrong_arguments_are_refused_or_understood(name, data):
    changes = data.draw(wrong_arguments(CALLS[name]))
    assert complaint(CALLS[name], changes, tp_plans, *ERRORS) is None
