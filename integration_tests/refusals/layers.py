"""What tensor and expert parallelism, checkpointing and compile refuse."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_runtime import FSDP2, _torchao_compat
from fsdp_runtime.model import inspect_model
from fsdp_runtime.steps import Compile, Float8, Quantized, SelectiveCheckpoint
from fsdp_runtime.steps.compile import async_compile_options
from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import Own, Tree, ids, parallelized, refuse
from tp_plans import NoParallel, ParameterStyle, Shard, plan_for

TP, EP = {"tp": 2}, {"dp_shard": 2, "ep": 2}
MOE = "Qwen3MoeForCausalLM"
CUDA: Any = SimpleNamespace(device_type="cuda", mesh_dim_names=("tp",))
STACKED = {"target_parameters": ["mlp.experts.gate_up_proj"]}


def _adapted(architecture: str = "LlamaForCausalLM", *, merged: bool = False, **settings: Any) -> Any:
    model = peft.get_peft_model(tiny_model(architecture), peft.LoraConfig(r=2, **settings))
    if merged:
        model.merge_adapter()
    return model


def _injected() -> nn.Module:
    outer = Tree(policy=tiny_model("LlamaForCausalLM"))
    found: nn.Module = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), outer)
    return found


def _adapted_router() -> None:
    gate = "model.layers.*.mlp.gate"
    plan = plan_for(tiny_model(MOE)).override({f"{gate}.weight": ParameterStyle(layout=Shard(0))})
    refuse(_adapted(MOE, target_parameters=["mlp.gate.weight"]), TP, plan=plan)


def _experts_by_feature() -> None:
    plan = plan_for(tiny_model(MOE)).override({"model.layers.*.mlp.experts": NoParallel()})
    refuse(_adapted(MOE, **STACKED), TP, plan=plan)


def _prompts(config: type[peft.PromptLearningConfig]) -> Any:
    return peft.get_peft_model(tiny_model("LlamaForCausalLM"), config(task_type="CAUSAL_LM", num_virtual_tokens=2))


def _later_adapter() -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with parallelized(peft.get_peft_model(tiny_model("LlamaForCausalLM"), lora), TP) as model:
        model.peft_config["later"] = lora
        model(input_ids=ids(1, 4))


def _with_cache() -> None:
    with parallelized(tiny_model("LlamaForCausalLM"), activation_checkpointing="block") as model:
        model(input_ids=ids(1, 4), use_cache=True)


def _compiled(**options: Any) -> None:
    refuse(tiny_model("LlamaForCausalLM"), TP, **options)


def _in_float8(step: Float8) -> None:
    refuse(tiny_model("LlamaForCausalLM"), TP, steps=(step,))


def _float8_by_styles_of_torch() -> None:
    model = tiny_model("LlamaForCausalLM")
    setup: Any = SimpleNamespace(
        packed_base=False,
        meshes=SimpleNamespace(tp=CUDA),
        plan=plan_for(model).to_torch(model),
        structure=inspect_model(model),
    )
    Float8(emulate=True).check(setup)


def _without_torchao() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao", None)
        _in_float8(Float8(emulate=True))


def _with_old_torchao() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torchao_compat, "OLDEST", (99, 0))
        _in_float8(Float8(emulate=True))


def _with_another_prototype() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torchao_compat, "MX_RELEASE", (0, 99))
        _in_float8(Float8("mxfp8", emulate=True))


def _gathers(**fsdp: Any) -> None:
    refuse(
        tiny_model("LlamaForCausalLM", dtype=torch.float32),
        {"dp_shard": 2},
        steps=(Float8(emulate=True, gather=True),),
        fsdp=FSDP2(**fsdp),
    )


ASYNC = Compile(async_tensor_parallel=True)
CASES: Provocations = {
    "fsdp_runtime/steps/refused_adapters.py": {
        "OptionError: that are merged, or not plain LoRA": (
            lambda: refuse(_adapted(target_modules=["q_proj"], use_dora=True), TP),
            lambda: refuse(_adapted(MOE, merged=True, **STACKED), TP),
            lambda: refuse(_adapted(MOE, merged=True, **STACKED), EP),
        ),
        "OptionError: was added after parallelize": _later_adapter,
    },
    "fsdp_runtime/steps/tensor/lora.py": {
        "OptionError: the model is no PeftModel": lambda: refuse(_injected(), TP),
        "OptionError: learns keys and values": lambda: refuse(_prompts(peft.PrefixTuningConfig), TP),
        "OptionError: puts learned embeddings in front": lambda: refuse(
            _prompts(peft.PromptTuningConfig), TP, sequence_parallel=True
        ),
        "OptionError: each rank computes with its part": _adapted_router,
        "OptionError: is not sharded by expert": _experts_by_feature,
        "OptionError: is adapted by peft's": lambda: refuse(
            peft.get_peft_model(
                tiny_model("LlamaForCausalLM"), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
            ),
            TP,
        ),
    },
    "fsdp_runtime/steps/tensor/step.py": {
        "OptionError: needs a plan, and plan=None": lambda: refuse(Own(), plan=None, sequence_parallel=True),
    },
    "fsdp_runtime/steps/experts/step.py": {
        "OptionError: Over tp this needs a rule": lambda: refuse(
            _adapted(MOE, **STACKED), {"tp": 2, "ep": 2}, plan=None
        ),
    },
    "fsdp_runtime/steps/quantized/step.py": {
        "OptionError: finds no weight to quantize": lambda: refuse(
            tiny_model("LlamaForCausalLM"), steps=(Quantized("nf4", 16),)
        ),
        "OptionError: give a tuple of patterns": lambda: Quantized("nf4", keep="lm_head"),  # type: ignore[arg-type]
        "OptionError: not with whole blocks of 32": lambda: refuse(
            _adapted(target_modules=["q_proj"]), TP, steps=(Quantized("nf4", 32),)
        ),
    },
    "fsdp_runtime/weights/quantize/packed.py": {
        "OptionError: give an even number of elements": lambda: Quantized("nf4", block_size=3),
    },
    "fsdp_runtime/steps/checkpointing.py": {
        "OptionError: has no namespace": lambda: _recomputed(SelectiveCheckpoint(save=("mm",))),
        "OptionError: has none of these operators": lambda: _recomputed(SelectiveCheckpoint(save=("aten.no_such",))),
        "ModelError: and no module called": lambda: _recomputed("mlp"),
    },
    "fsdp_runtime/steps/recomputation.py": {
        "ModelError: was given a key/value cache": _with_cache,
    },
    "fsdp_runtime/steps/float8.py": {
        "BackendError: needs a GPU with such units": (
            lambda: _in_float8(Float8()),
            lambda: _in_float8(Float8("blockwise")),
            lambda: _in_float8(Float8("mxfp8")),
        ),
        "ModelError: can multiply in float8": lambda: refuse(Own(), plan=None, steps=(Float8(emulate=True),)),
        "OptionError: stores them as packed bytes": lambda: refuse(
            _adapted(target_modules=["q_proj"]), plan=None, steps=(Quantized("nf4"), Float8(emulate=True))
        ),
        "OptionError: not torch's styles": _float8_by_styles_of_torch,
        "OptionError: casts a weight twice": lambda: Float8("rowwise", gather=True),
    },
    "fsdp_runtime/steps/fsdp/dtypes.py": {
        "OptionError: casts shards on the device": lambda: _gathers(offload_policy=CPUOffloadPolicy()),
        "OptionError: would round small weights": lambda: _gathers(mp_policy=MixedPrecisionPolicy(torch.float16)),
    },
    "fsdp_runtime/_torchao_compat.py": {
        "OptionError: needs torchao": _without_torchao,
        "OptionError: or later, and": _with_old_torchao,
        "OptionError: where it is a prototype": _with_another_prototype,
    },
    "fsdp_runtime/steps/compile.py": {
        "OptionError: it needs a mesh with tp larger": lambda: _compiled(compile=ASYNC),
        "OptionError: is a pass of Inductor": lambda: _compiled(
            compile=Compile({"backend": "aot_eager"}, async_tensor_parallel=True), sequence_parallel=True
        ),
        "BackendError: needs CUDA devices": lambda: _compiled(compile=ASYNC, sequence_parallel=True),
        "OptionError: cannot be combined with mode": lambda: async_compile_options(
            CUDA, {"mode": "max-autotune"}, sequence_parallel=True
        ),
        "OptionError: records CUDA graphs": lambda: _compiled(compile=Compile({"mode": "reduce-overhead"})),
        "OptionError: is refused by torch.compile": lambda: refuse(Own(), plan=None, compile=Compile({"colour": True})),
    },
}


def _recomputed(mode: Any) -> None:
    refuse(Own(), plan=None, activation_checkpointing=mode)
