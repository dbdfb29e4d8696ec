"""Refusals of a model in pipeline stages: each function is called on two ranks, and both raise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coverage.multimodal import multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from fsdp_runtime import MeshSpec, offload, parallelize, save_weights
from fsdp_runtime.meters import ModelFlops
from fsdp_runtime.steps.pipeline.schedule import forward_only
from fsdp_runtime.steps.pipeline.step import Pipeline
from fsdp_runtime.training_state import save_training_state
from fsdp_runtime.weights.export import common_ranks
from harness.models import tiny_model
from refusals import Provocations


def _staged(call: Callable[[Any, str], Any]) -> Callable[[], None]:
    def run() -> None:
        mesh = MeshSpec(pp=2).build(device_type="cpu")
        model = parallelize(tiny_model("LlamaForCausalLM"), mesh, steps=(Pipeline(),))
        with tempfile.TemporaryDirectory() as directory:
            shared = [directory]
            dist.broadcast_object_list(shared)
            call(model, shared[0])

    return run


def _deepstack() -> None:
    mesh = MeshSpec(pp=2).build(device_type="cpu")
    model = multimodal_model("qwen3_vl")
    inputs = multimodal_inputs(model)
    forward_only(parallelize(model, mesh, steps=(Pipeline(microbatches=2),)), [inputs] * 2)


def _own_tokens(model: Any, directory: str) -> None:
    ids = torch.arange(6).view(1, 6) + dist.get_rank()
    forward_only(model, [{"input_ids": ids}] * 4)


def _offloaded(model: Any, directory: str) -> None:
    batches = [{"input_ids": torch.arange(6).view(1, 6)}] * 4
    forward_only(model, batches)
    offload(model, device="cpu")
    forward_only(model, batches)


def _with_a_parameter(model: Any, directory: str) -> None:
    model.scale = nn.Parameter(torch.ones(()))
    save_weights(model, directory)


def _groups_by_stage(model: Any, directory: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    save_training_state(directory, model, optimizer, step=1)


CASES: Provocations = {
    "fsdp_runtime/model/stages.py": {
        "ModelError: is a part of a model in pipeline stages": _staged(lambda m, d: save_weights(m.model, d)),
        "ModelError: when parallelize divided the model": _staged(lambda m, d: save_weights(m.to(torch.bfloat16), d)),
        "ModelError: 1 tensors were added": _staged(_with_a_parameter),
    },
    "fsdp_runtime/model/state.py": {"ModelError: are offloaded to host memory": _staged(_offloaded)},
    "fsdp_runtime/steps/guards/check_inputs.py": {
        "LayoutError: of one pp group were given different inputs": _staged(_own_tokens)
    },
    "fsdp_runtime/steps/pipeline/trace.py": {"ModelError: after the first stage": _deepstack},
    "fsdp_runtime/meters/model_flops.py": {
        "ModelError: only the blocks of its pipeline stages": _staged(lambda m, d: ModelFlops.of(m)),
    },
    "fsdp_runtime/training_state/optimizers.py": {
        "OptionError: give every pipeline stage the same": _staged(_groups_by_stage)
    },
    "fsdp_runtime/weights/export.py": {
        "ConversionError: no pipeline stage has all": lambda: common_ranks({"query": (0, 2), "key": (1, 3)})
    },
}
