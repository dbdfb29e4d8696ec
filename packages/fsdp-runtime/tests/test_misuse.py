"""Wrong arguments, generated, to every public function: a typed error before anything changes, or a right result."""

import itertools
from importlib import import_module

import pytest
import torch
from torch import nn

import fsdp_runtime
import fsdp_runtime.sync
import tp_plans
from fsdp_runtime import FSDP2, MeshSpec
from fsdp_runtime.batching import pack, pack_tree
from fsdp_runtime.dry_run import estimate, sweep
from fsdp_runtime.mesh import fsdp_mesh, rank_info_from_env
from fsdp_runtime.model import inspect_model
from fsdp_runtime.monitor import monitor_ranks, stop_on_signal
from fsdp_runtime.steps import SharedPrefixes
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.weights import multi_token_weights
from harness.misuse import Call, try_wrong_arguments, use

ERRORS = (fsdp_runtime.FsdpRuntimeError, tp_plans.TpPlansError)
ROOMS = (
    "fsdp_runtime",
    *(f"fsdp_runtime.{room}" for room in ("batching", "mesh", "model", "monitor", "sync", "weights")),
)
#: The records that functions return, and what a custom attention is given.
RESULTS = {
    *("AttentionHeads", "GroupMember", "LoadReport"),
    *("ModelStructure", "RankInfo", "RankMonitor"),
    *("SyncReport", "WeightInfo"),
}


class Model(nn.Module):
    """Two blocks of two linear layers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
        self.lm_head = nn.Linear(4, 10)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


def mesh():
    return MeshSpec().build(device_type="cpu")


def sharded():
    return fsdp_runtime.parallelize(Model(), mesh(), plan=None)


def on_mesh():
    return {"model": Model(), "mesh": mesh(), "plan": None}


def resolved():
    model = Model()
    return {"model": model, "parallelism": fsdp_runtime.resolve_parallelism(model, mesh(), plan=None)}


def optimized():
    model = Model()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def saved_weights():
    model = Model()
    fsdp_runtime.save_weights(model, "weights")
    return {"model": model, "path": "weights"}


def saved_state():
    arguments = optimized()
    fsdp_runtime.save_training_state("state", **arguments, step=1)
    return {"directory": "state", **arguments}


def adapted():
    """A model with LoRA adapters, of transformers since peft reads a config."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, num_hidden_layers=1, **sizes))
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))


def saved_adapter():
    model = adapted()
    fsdp_runtime.save_adapter(model, "adapter")
    return {"model": model, "directory": "adapter"}


def bucket():
    return next(fsdp_runtime.sync.WeightExport().buckets(Model()))


def flat_bucket():
    given = bucket()
    weights = [fsdp_runtime.sync.WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in given]
    return {"weights": weights, "flat": fsdp_runtime.sync.flatten_bucket(given)}


def routed():
    """A model with one mixture, of transformers since its routers are known by their classes."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=10, num_hidden_layers=1, **sizes, **experts))


def shared_prefixes():
    return fsdp_runtime.parallelize(routed(), mesh(), plan=None, steps=(SharedPrefixes(),))


def score(hidden, head):
    return hidden @ head.weight.mT


def with_head(model, function, ids):
    if callable(function):  # what it raises is its author's
        function = score
    return fsdp_runtime.forward_with_lm_head(model, function, ids)


def loss(model, inputs):
    return model(inputs["input_ids"]).square().mean()


def swept(model, world_size, *, seq_len, sequence_parallel=(False,), workers=0, max_tp=8, cp=(1,)):
    if type(workers) is int and workers > 0:  # right, and each process would take seconds to start
        workers = 0
    options = {**dry_run(), "seq_len": seq_len, "cp": cp, "max_tp": max_tp, "workers": workers}
    modes = {"activation_checkpointing": ("none",), "sequence_parallel": sequence_parallel}
    return sweep(**{**options, **modes, "model": model, "world_size": world_size})


def dry_run():
    return {"model": Model, "plan": None, "logprobs": loss, "clip": False, "seq_len": 4}


def sides():
    source, target = (fsdp_runtime.sync.ModelShards(Model()) for _ in range(2))
    plan = tp_plans.transfer.plan_transfer(source.layout, target.layout)
    return {"plan": plan, "source": source.local, "destination": target.local}


def arrived():
    given = sides()
    fsdp_runtime.sync.execute_transfer(**given)
    return given


def layout():
    shards = fsdp_runtime.sync.ModelShards(Model())
    return {"layout": shards.layout, "local": shards.local}


COUNT = itertools.count()
SAMPLES = [[1, 2, 3], [1, 2, 4]]
PACKING = pack(SAMPLES, budget=8)
ROW = PACKING.rows()[0]
TREE = pack_tree([SAMPLES], budget=8).rows()[0]
ROUTES = fsdp_runtime.steps.Routes({"model.layers.0.mlp.gate": torch.tensor([[0, 1], [2, 3]])})

CALLS = {
    "FSDP2": Call(FSDP2),
    "MeshSpec": Call(MeshSpec),
    "MeshSpec.resolve": Call(MeshSpec(dp_shard=-1).resolve, lambda: {"world_size": 8}),
    "MeshSpec.build": Call(MeshSpec().build),
    "ModelShards": Call(fsdp_runtime.sync.ModelShards, lambda: {"model": Model()}),
    "PackedRow.unpack": Call(ROW.unpack, lambda: {"values": torch.ones(1, 6)}),
    "MicroBatches.rows": Call(PACKING.rows),
    "MicroBatches.unpack": Call(PACKING.unpack, lambda: {"values": [torch.ones(1, 6)]}),
    "Quantization": Call(fsdp_runtime.sync.Quantization, lambda: {"format": "fp8"}),
    "Routes": Call(fsdp_runtime.steps.Routes),
    "Routes.take": Call(ROUTES.take, lambda: {"tokens": torch.tensor([1, -1])}),
    "SelectiveCheckpoint": Call(fsdp_runtime.steps.SelectiveCheckpoint),
    "SequenceLayout": Call(SequenceLayout, lambda: {"length": 8, "ranks": 2, "rank": 0}),
    "SequenceLayout.shard": Call(SequenceLayout(length=8, ranks=2, rank=0).shard, lambda: {"full": torch.ones(2, 8)}),
    "SequenceLayout.shard_batch": Call(
        SequenceLayout(length=8, ranks=2, rank=0).shard_batch,
        lambda: {"batch": {"input_ids": torch.ones(2, 8)}},
    ),
    "TreeRow.inputs": Call(TREE.inputs, lambda: {"model": shared_prefixes()}),
    "TreeRow.mask_mod": Call(TREE.mask_mod),
    "TreeRow.select": Call(TREE.select, lambda: {"values": torch.ones(1, 4, 10)}),
    "TreeRow.shard": Call(TREE.shard, lambda: {"layout": SequenceLayout(length=4, ranks=2, rank=0)}),
    "TreeRow.unpack": Call(TREE.unpack, lambda: {"values": torch.ones(3)}),
    "WeightExport": Call(fsdp_runtime.sync.WeightExport, dict),
    "WeightSource": Call(fsdp_runtime.sync.WeightSource, lambda: {"model": Model()}),
    "WeightSync": Call(fsdp_runtime.sync.WeightSync, sides),
    "AdapterTransfer": Call(
        fsdp_runtime.sync.AdapterTransfer, lambda: {"server": "http://127.0.0.1:9", "directory": "x"}
    ),
    "WeightTransfer": Call(
        fsdp_runtime.sync.WeightTransfer,
        lambda: {"server": "http://127.0.0.1:9", "connect": lambda source, client: None},
    ),
    "adopt_mesh": Call(fsdp_runtime.adopt_mesh, lambda: {"mesh": mesh()}),
    "assert_finite_gradients": Call(fsdp_runtime.assert_finite_gradients, lambda: {"model": Model()}),
    "assert_inputs_equal": Call(
        fsdp_runtime.assert_inputs_equal, lambda: {"mesh": mesh(), "inputs": {"input_ids": torch.ones(2, 8)}}
    ),
    "assert_replicas_equal": Call(fsdp_runtime.assert_replicas_equal, lambda: {"model": Model()}),
    "describe_parallelism": Call(fsdp_runtime.describe_parallelism, lambda: {"model": Model()}),
    "digest": Call(fsdp_runtime.sync.digest, lambda: {"model": Model()}),
    "digest_layout": Call(fsdp_runtime.sync.digest_layout, layout),
    "execute_transfer": Call(fsdp_runtime.sync.execute_transfer, sides),
    "flatten_bucket": Call(fsdp_runtime.sync.flatten_bucket, lambda: {"bucket": bucket()}),
    "forward_with_lm_head": Call(
        with_head,
        lambda: {
            "model": Model(),
            "function": score,
            "ids": torch.ones(1, 3, dtype=torch.int64),
        },
        keep=("ids",),  # the model's own argument
    ),
    "fsdp_mesh": Call(fsdp_mesh, lambda: {"mesh": mesh()}),
    "init_adapters": Call(fsdp_runtime.init_adapters, lambda: {"model": adapted()}),
    "inspect_model": Call(inspect_model, lambda: {"model": Model()}),
    "load_adapter": Call(fsdp_runtime.load_adapter, saved_adapter),
    "load_training_state": Call(fsdp_runtime.load_training_state, saved_state),
    "load_weights": Call(fsdp_runtime.load_weights, saved_weights),
    "materialize": Call(fsdp_runtime.materialize, lambda: {"model": Model()}),
    "monitor_ranks": Call(monitor_ranks),
    "no_sync": Call(fsdp_runtime.no_sync, lambda: {"model": sharded()}),
    "offload": Call(fsdp_runtime.offload, lambda: {**optimized(), "device": "cpu"}),
    "onload": Call(fsdp_runtime.onload, lambda: {"model": Model()}),
    "pack": Call(pack, lambda: {"samples": SAMPLES, "budget": 8}),
    "pack_tree": Call(pack_tree, lambda: {"groups": [SAMPLES], "budget": 8}),
    "parallelize": Call(fsdp_runtime.parallelize, on_mesh),
    "rank_info_from_env": Call(rank_info_from_env, lambda: {"environment": {}}),
    "record_routes": Call(fsdp_runtime.record_routes, lambda: {"model": routed()}),
    "replay_routes": Call(fsdp_runtime.replay_routes, lambda: {"model": routed(), "routes": ROUTES}),
    "resolve_parallelism": Call(fsdp_runtime.resolve_parallelism, on_mesh),
    "routes_from_generator": Call(
        fsdp_runtime.steps.routes_from_generator,
        lambda: {"sequences": [torch.tensor([[[3, 1]]])], "attention_mask": torch.tensor([[0, 1, 1]])},
    ),
    "save_adapter": Call(fsdp_runtime.save_adapter, lambda: {"model": adapted(), "directory": "adapter"}),
    "save_training_state": Call(
        fsdp_runtime.save_training_state, lambda: {**optimized(), "directory": "state", "step": 1}
    ),
    "save_weights": Call(fsdp_runtime.save_weights, lambda: {"model": Model(), "directory": "weights"}),
    "send_weights": Call(
        fsdp_runtime.sync.send_weights, lambda: {"model": Model(), "group": None, "on_bucket": lambda weights: None}
    ),
    "sequence_layout": Call(fsdp_runtime.sequence_layout, lambda: {"mesh": mesh(), "length": 8}),
    "stop_on_signal": Call(stop_on_signal),
    "multi_token_weights": Call(multi_token_weights, lambda: {"model": Model()}),
    "stream_weights": Call(fsdp_runtime.stream_weights, lambda: {"model": Model()}),
    "submesh": Call(fsdp_runtime.submesh, lambda: {"mesh": mesh(), "axis": "dp"}),
    "transfer_group": Call(
        fsdp_runtime.sync.transfer_group,
        lambda: {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1, "name": str(next(COUNT))},
    ),
    "unflatten_bucket": Call(fsdp_runtime.sync.unflatten_bucket, flat_bucket),
    "unsharded": Call(fsdp_runtime.unsharded, lambda: {"model": sharded()}),
    "verify_transfer": Call(fsdp_runtime.sync.verify_transfer, arrived),
}
#: Each runs in a process without a world, and a right one takes a second.
DRY_RUNS = {
    "estimate": Call(estimate, lambda: {**dry_run(), "mesh": {"dp_shard": 2}}),
    "sweep": Call(swept, lambda: {"model": Model, "world_size": 1, "seq_len": 4}),
}
#: These make and read files, or a model with adapters.
COSTLY = {"load_training_state", "load_weights", "save_training_state", "init_adapters", "load_adapter", "save_adapter"}


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_calls_name_every_public_function():
    public = {name for room in ROOMS for name in import_module(room).__all__ if not name.endswith("Error")}
    called = {name.partition(".")[0] for name in CALLS | DRY_RUNS}
    of_steps = {"Routes", "SelectiveCheckpoint", "routes_from_generator"}
    assert called == (public - RESULTS - {"meta_device"}) | {"SequenceLayout", "estimate", "sweep"} | of_steps


@pytest.mark.parametrize("name", sorted(CALLS))
def test_right_arguments_are_taken(name):
    mesh()
    use(CALLS[name].function(**CALLS[name].valid()))


@pytest.mark.parametrize("examples", [6, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused_or_understood(name, examples):
    mesh()
    few = examples // 3 if name in COSTLY else examples
    try_wrong_arguments(CALLS[name], fsdp_runtime, *ERRORS, examples=few)


@pytest.mark.parametrize("examples", [5, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DRY_RUNS)
def test_wrong_arguments_of_a_dry_run_are_refused_or_understood(name, examples):
    try_wrong_arguments(DRY_RUNS[name], fsdp_runtime, *ERRORS, examples=examples)
