"""Wrong arguments, generated, to every public function: an error of this package or a right result."""

import dataclasses

import pytest
import torch

import tp_plans
from harness.misuse import Call, try_wrong_arguments
from tp_plans import ColwiseParallel, DispatchExperts, Plan, RowwiseParallel
from tp_plans.model_tree import ModelTree

ERRORS = (tp_plans.TpPlansError,)
#: The records that functions return, and names of several types.
RESULTS = {
    *("CheckReport", "CollectiveSummary", "Doubt", "Explanation", "Finding"),
    *("AdapterStyles", "RuleExplanation", "ShardedParameter", "Suggestion", "ModelTree"),
    *("Layout", "Style", "BlockTransfer", "TransferPlan", "VerificationReport", "WrongPart"),
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
    sublayers = (tp_plans.models.SublayerSpec(path="mlp", colwise=("up",), rowwise="down"),)
    decoder = tp_plans.models.DecoderSpec(sublayers=sublayers, norms=("norm",))
    return {"class_name": "OwnForCausalLM", "model_type": "own", "decoder": decoder}


def decoder_arguments():
    return {"decoder": architecture()["decoder"], "name": "own"}


def checkpoint():
    return {"weight": tp_plans.transfer.CheckpointTensor((4, 2))}


def transfer_layout():
    return tp_plans.transfer.mesh_layout(checkpoint(), (2,), {"weight": [tp_plans.Shard(0)]})


def block():
    return {"rank": 0, "box": ((0, 4), (0, 2)), "local": "weight", "offset": (0, 0), "dims": (0, 1)}


def layout_of_block(rank, box, local, offset, dims):
    return tp_plans.transfer.TransferLayout(
        checkpoint(), {"weight": [tp_plans.transfer.StoredBlock(rank, box, local, offset, dims)]}
    )


class Experts(torch.nn.Module):
    """Stacked experts."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 16, 8))
        self.down_proj = torch.nn.Parameter(torch.zeros(4, 8, 8))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


#: The classes that users construct, with what has no default.
CLASSES = {
    "Architecture": architecture,
    "CheckpointTensor": lambda: {"shape": (4, 2)},
    "DecoderSpec": lambda: {"sublayers": architecture()["decoder"].sublayers, "norms": ("norm",)},
    "EngineRule": lambda: {"pattern": "*.weight", "split": "rows"},
    "EngineSize": lambda: {"num_attention_heads": 4},
    "ExpertsSpec": lambda: {"path": "experts"},
    "FusedLinear": lambda: {"name": "qkv", "fused_sizes": (1, 1, 1)},
    "Plan": lambda: {"rules": {"0": ColwiseParallel()}},
    "ReplicatedSublayer": lambda: {"path": "mixer", "linears": ("proj",)},
    "Shard": lambda: {"dim": 0},
    "StoredBlock": block,
    "StridedShard": lambda: {"dim": 0},
    "SublayerSpec": lambda: {"path": "mlp", "colwise": ("up",), "rowwise": "down"},
}
#: Names of the front door for runtimes that users call too; its others are not for them.
FOR_USERS = ("AdapterStyles", "adapter_styles", "dispatch_styles", "resolve_style")
#: Names of the front doors that only runtimes call, with boxes and steps that are checked already.
FOR_RUNTIMES = {
    *("ARCHITECTURES", "Box", "MeshLayout", "ShardStep", "box_shape", "full_box", "intersection", "shard_steps"),
    *("parameter_layout", "split_box", "style_from_dict", "style_to_dict", "volume"),
}
DOORS = (
    *(tp_plans.models, tp_plans.boxes, tp_plans.transfer, tp_plans.styles, tp_plans.verification),
    *(tp_plans.explanation, tp_plans.checks, tp_plans.infer, tp_plans),
)
PUBLIC = {
    **{name: getattr(tp_plans.runtime, name) for name in FOR_USERS},
    **{name: getattr(door, name) for door in DOORS for name in door.__all__ if name not in FOR_RUNTIMES},
}
STYLES = [name for name, value in PUBLIC.items() if dataclasses.is_dataclass(value)]
STYLES = [name for name in STYLES if name not in RESULTS and dataclasses.fields(PUBLIC[name])]

CALLS = {
    **{name: Call(PUBLIC[name], CLASSES.get(name, dict)) for name in sorted({*STYLES, *CLASSES})},
    "ModelTree.of": Call(ModelTree.of, lambda: {"model": Model()}),
    "Plan.from_json": Call(Plan.from_json, lambda: {"text": plan().to_json()}),
    "Plan.match": Call(plan().match, lambda: {"path": "layers.0.0"}),
    "Plan.override": Call(plan().override, lambda: {"rules": {"head": ColwiseParallel()}}),
    "Plan.by_path": Call(plan().by_path, lambda: {"model": Model()}),
    "Plan.to_json": Call(plan().to_json),
    "Plan.to_torch": Call(plan().to_torch, lambda: {"model": Model()}),
    "Plan.with_prefix": Call(plan().with_prefix, lambda: {"prefix": "model"}),
    "TransferLayout": Call(
        tp_plans.transfer.TransferLayout,
        lambda: {"tensors": checkpoint(), "blocks": {"weight": [tp_plans.transfer.StoredBlock(**block())]}},
    ),
    "TransferLayout.blocks": Call(transfer_layout().blocks, lambda: {"tensor": "weight"}),
    "TransferLayout.from_json": Call(
        tp_plans.transfer.TransferLayout.from_json, lambda: {"text": transfer_layout().to_json()}
    ),
    "TransferLayout.shifted": Call(transfer_layout().shifted, lambda: {"by": 2}),
    "TransferLayout.union": Call(transfer_layout().union, lambda: {"other": transfer_layout().shifted(2)}),
    "TransferLayout of a block": Call(layout_of_block, block),
    "adapter_styles": Call(tp_plans.runtime.adapter_styles, lambda: {"style": ColwiseParallel()}),
    "check": Call(tp_plans.check, lambda: {**planned(), "tp": 2}),
    "decoder_plan": Call(tp_plans.models.decoder_plan, decoder_arguments),
    "engine_layout": Call(
        tp_plans.transfer.engine_layout,
        lambda: {
            "tensors": {"model.embed_tokens.weight": tp_plans.transfer.CheckpointTensor((4, 2))},
            "size": tp_plans.transfer.EngineSize(num_attention_heads=4),
        },
    ),
    "engine_rules": Call(tp_plans.transfer.engine_rules, lambda: {"engine": "vllm"}),
    "dispatch_styles": Call(tp_plans.runtime.dispatch_styles, lambda: {"rules": {"experts": DispatchExperts()}}),
    "explain": Call(tp_plans.explain, lambda: {**planned(), "tp": 2}),
    "mesh_boxes": Call(
        tp_plans.boxes.mesh_boxes, lambda: {"shape": (5, 4), "mesh_shape": (2,), "layouts": [tp_plans.Shard(0)]}
    ),
    "mesh_layout": Call(
        tp_plans.transfer.mesh_layout,
        lambda: {"tensors": checkpoint(), "mesh_shape": (2,), "layouts": {"weight": [tp_plans.Shard(0)]}},
    ),
    "plan_cover": Call(tp_plans.transfer.plan_cover, lambda: {"layout": transfer_layout()}),
    "plan_for": Call(tp_plans.plan_for, lambda: {"model": "LlamaForCausalLM"}),
    "plan_transfer": Call(
        tp_plans.transfer.plan_transfer,
        lambda: {"source": transfer_layout(), "destination": transfer_layout().shifted(1)},
    ),
    "register": Call(tp_plans.register, lambda: {"entry": tp_plans.architectures()[0]}),
    "plan_for of a plan": Call(tp_plans.plan_for, lambda: {"model": Model(), "source": plan(), "rowwise": False}),
    "plan_for towers": Call(tp_plans.plan_for, lambda: {"model": Model(), "source": plan(), "towers_tp": 2}),
    "resolve_style": Call(tp_plans.runtime.resolve_style, lambda: {"style": ColwiseParallel(), "owner": Model()}),
    "suggest": Call(tp_plans.infer.suggest, lambda: {"model": Model()}),
    # Without rules nothing is run: every call would start processes.
    "verify_plan": Call(tp_plans.verify_plan, lambda: {"plan": Plan({}), "model": Model()}),
    "with_expert_parallelism": Call(
        tp_plans.with_expert_parallelism,
        lambda: {"plan": None, "model": torch.nn.ModuleDict({"experts": Experts()})},
    ),
}


def test_every_public_function_is_called():
    without_arguments = {"Replicate", "Partial", "ScaleInput", "architectures"}
    public = {name for name in PUBLIC if not name.endswith("Error")}
    called = {name.partition(".")[0].partition(" ")[0] for name in CALLS}
    assert called - {"ModelTree"} == public - RESULTS - without_arguments


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name):
    CALLS[name].function(**CALLS[name].valid())


@pytest.mark.parametrize("examples", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused_or_understood(name, examples):
    try_wrong_arguments(CALLS[name], tp_plans, *ERRORS, examples=examples)
