"""What pipeline stages refuse: options, models when they are parallelized, and batches of their schedules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_runtime import replay_routes
from fsdp_runtime.mesh import require_axes
from fsdp_runtime.steps import MultiTokenHeads, Pipeline, forward_backward, forward_only
from fsdp_runtime.steps.pipeline.shapes import Sent
from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import Own, ids, parallelized, refuse, row, world

PP = {"pp": 2}


def _llama() -> Any:
    return tiny_model("LlamaForCausalLM")


def _refuse(step: Pipeline | None = None, model: Any = None, axes: Mapping[str, int] = PP, *, sp: bool = False) -> None:
    refuse(_llama() if model is None else model, axes, steps=() if step is None else (step,), sequence_parallel=sp)


def _scheduled(**batch: Any) -> None:
    """Call a schedule on the first of two stages."""
    with parallelized(_llama(), PP, steps=(Pipeline(microbatches=2),)) as staged:
        forward_backward(staged, [batch, batch])


def _in_stages(call: Any, model: Any = None) -> None:
    with parallelized(_llama() if model is None else model, PP, steps=(Pipeline(),)) as staged:
        call(staged)


def refuse_routes(axes: Mapping[str, int]) -> None:
    """Replay the routes of too few tokens in a schedule of a mixture."""
    routes = torch.tensor([[[0, 1]] * 3] * 2)
    mixture = parallelized(row("mixtral, batched"), axes, steps=(Pipeline(microbatches=2),))
    with mixture as staged, replay_routes(staged, routes):
        forward_only(staged, [{"input_ids": ids(1, 4)}] * 2)


def _own() -> Any:
    """A model with another keyword for its tokens."""
    return Own()


def _with_heads() -> Any:
    model = row("glm4_moe")
    MultiTokenHeads(model)
    return model


def _recording() -> Any:
    model = row("mixtral, batched")
    model.config.output_router_logits = True
    return model


def _trainer() -> None:
    with world(**PP) as mesh:
        require_axes(mesh, stages=False)


CASES: Provocations = {
    "fsdp_runtime/mesh/spec.py": {"MeshError: and a trainer calls the whole model": _trainer},
    "fsdp_runtime/steps/pipeline/step.py": {
        "OptionError: the mesh has no axis pp": lambda: _refuse(Pipeline(), axes={}),
        "OptionError: Pipeline: give one": _refuse,
        "OptionError: give a positive integer": lambda: Pipeline(microbatches=0),
        "OptionError: takes 2": lambda: Pipeline("ZBVZeroBubble", stages_per_rank=3),
        "OptionError: give a positive number of blocks": lambda: Pipeline(layers=(0, 2)),
        "OptionError: takes at least 2": lambda: _refuse(Pipeline(microbatches=1)),
        "OptionError: takes multiples of pp=2": lambda: _refuse(Pipeline("interleaved1f1b", 3)),
        "OptionError: and the model 2 blocks": lambda: _refuse(Pipeline(layers=(1, 2))),
        "OptionError: computes both at once": lambda: _refuse(Pipeline("ZBVZeroBubble"), axes={**PP, "tp": 2}, sp=True),
        "ModelError: is an encoder-decoder": lambda: _refuse(Pipeline(), tiny_model("T5ForConditionalGeneration")),
        "ModelError: multi-token heads": lambda: _refuse(Pipeline(), _with_heads()),
        "ModelError: records only its blocks": lambda: _refuse(Pipeline(), _recording()),
        "ModelError: its small copy raises": lambda: _refuse(Pipeline(), _own()),
        "OptionError: each stage needs a block": lambda: _refuse(Pipeline(), axes={"pp": 4}),
    },
    "fsdp_runtime/steps/pipeline/trace.py": {
        "ModelError: calls its blocks in the order": lambda: _refuse(Pipeline(), row("dory")),
        "ModelError: after its last block": lambda: _refuse(Pipeline(), row("inkling2_text")),
        "OptionError: does not take: leave the media out": lambda: _scheduled(pixel_values=torch.zeros(1)),
    },
    "fsdp_runtime/steps/pipeline/parts.py": {
        "ModelError: outside of a pipeline schedule": lambda: _in_stages(lambda model: model(input_ids=ids(1, 4))),
        "ModelError: cannot be copied": lambda: _in_stages(lambda model: copy.deepcopy(model)),
    },
    "fsdp_runtime/steps/pipeline/schedule.py": {
        "ModelError: is not in pipeline stages": lambda: forward_only(_llama(), []),
        "OptionError: micro-batches were given": lambda: _in_stages(lambda model: forward_only(model, [])),
        "OptionError: micro-batch 0 is a Tensor": lambda: _in_stages(
            lambda model: forward_only(model, [ids(1, 4)] * 4)
        ),
        "OptionError: cannot serve for all blocks": lambda: _scheduled(output_hidden_states=True),
        "OptionError: are not next tokens": lambda: _in_stages(
            lambda model: forward_backward(model, [{}] * 4), row("qwen3, classifier")
        ),
        "OptionError: has no labels": lambda: _scheduled(input_ids=ids(1, 4)),
    },
    "fsdp_runtime/steps/pipeline/shapes.py": {
        "ModelError: a stage sends torch.float32": lambda: Sent((2,), torch.float32).sent(
            torch.ones(2), Sent((3,), torch.float32)
        ),
        "OptionError: has neither input_ids": lambda: _scheduled(labels=ids(1, 4)),
    },
    "fsdp_runtime/steps/routing/replay.py": {
        "ModelError: routes of pipeline stages are not sharded over cp": lambda: refuse_routes({**PP, "cp": 2}),
        "RoutesError: give the routes of all micro-batches": lambda: refuse_routes(PP),
    },
}
