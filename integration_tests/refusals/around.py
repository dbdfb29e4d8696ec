"""What FSDP2, outputs, guards and trainers refuse."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from coverage.table import coverage_entries
from coverage.table import tiny_model as build_model
from fsdp_runtime import FSDP2, forward_with_lm_head, parallelize, unsharded
from fsdp_runtime.memory import host_copies
from fsdp_runtime.model import inspect_model
from fsdp_runtime.optim import CPUOffloadAdamW, Muon, param_groups
from fsdp_runtime.steps import CheckInputs, GlobalAuxLoss, MultiTokenHeads, RouterBalance, Routes
from fsdp_runtime.steps.fsdp.megatron_fsdp import resolve_megatron_fsdp
from fsdp_runtime.steps.multi_token_heads import LAYOUTS
from fsdp_runtime.steps.outputs.lm_head import KEEPS_OVER_CP
from fsdp_runtime.trainers import training_arguments as trainers
from fsdp_runtime.trainers.logits import check_heads
from fsdp_runtime.wrap import hook_forward
from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import Own, Tree, ids, parallelized, refuse, world

TP, DP = {"tp": 2}, {"dp_shard": 2}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _llama() -> Any:
    return tiny_model("LlamaForCausalLM")


def _mixed_experts() -> None:
    model: Any = tiny_model("Qwen3MoeForCausalLM", dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().bfloat16())
    refuse(model, {"dp_shard": 2, "ep": 2})


def _megatron(*, cuda: bool = True, **options: Any) -> None:
    """Wrap a model by a stand-in for Megatron-FSDP."""

    def fully_shard_model(module: nn.Module, device_mesh: Any = None) -> None: ...

    module = SimpleNamespace(__version__="0.6.1", MixedPrecisionPolicy=dict, fully_shard_model=fully_shard_model)
    with world() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron_fsdp", module)
        patch.setattr(torch.cuda, "is_available", lambda: cuda)
        _wrap(mesh, **options)


def _wrap(mesh: Any, **options: Any) -> None:
    model = _llama()
    resolve_megatron_fsdp(model, mesh, inspect_model(model), dp_shard_dim="dp_shard", **options).apply(model)


def _without_megatron() -> None:
    with world() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron_fsdp", None)
        _wrap(mesh)


def _outside_forward() -> None:
    with parallelized(_llama(), fsdp=FSDP2(mp_policy=MixedPrecisionPolicy())) as model:
        model.model(ids(1, 4), use_cache=False)


def _frozen() -> None:
    model = _llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    refuse(model, DP, fsdp=FSDP2(frozen_params="replicate", mp_policy=BF16))


def _loss(model: Any, **options: Any) -> Any:
    return forward_with_lm_head(model, lambda hidden, head: hidden.sum(), ids(1, 4) % 16, **options)


def _kept_over_cp() -> None:
    model = Own()
    hook_forward(model.lm_head, KEEPS_OVER_CP)
    _loss(model, logits_to_keep=1)


def _changed(change: Callable[[Any, Any], Any]) -> None:
    model = Own(change)
    head = model.lm_head
    try:
        _loss(model)
    finally:
        assert model.lm_head is head
        assert not model._forward_hooks


def _headless() -> None:
    model = Own(lambda model, hidden: hidden if model.lm_head is None else model.lm_head(hidden))
    _loss(model)
    model.lm_head = None  # type: ignore[assignment]
    _loss(model)


def _dropout() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.1)
    found: Any = peft.get_peft_model(_llama(), config)
    return found


def _pickled() -> None:
    with parallelized(_llama(), TP) as model:
        torch.save(model, io.BytesIO())


def _called(call: Callable[[Any], Any], axes: dict[str, int]) -> None:
    with parallelized(_llama(), axes) as model:
        call(model)


def _merged() -> None:
    model: Any = peft.get_peft_model(_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with parallelized(model, DP), unsharded(model):
        model.merge_adapter()


def _merged_dora() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    with parallelized(peft.get_peft_model(_llama(), config), DP) as model:
        model.merge_adapter()


#: Calls of methods that are always refused, each with its mesh.
METHODS: tuple[tuple[dict[str, int], Callable[[Any], Any]], ...] = (
    (TP, lambda model: model.push_to_hub("name")),
    (TP, lambda model: model.add_adapter(peft.LoraConfig())),
    (TP, lambda model: model.share_memory()),
    (DP, copy.deepcopy),
)


def _stale() -> None:
    model = _llama()
    optimizer = torch.optim.SGD(model.parameters())
    with parallelized(model, TP):
        optimizer.step()


def _balance() -> RouterBalance:
    return RouterBalance(tiny_model("DeepseekV3ForCausalLM"))


def _aux_loss(model: Any = None, *, top_k: int = 2, times: int = 1, **options: Any) -> None:
    """Call a mixture inside of a count."""
    model = model or tiny_model("Qwen3MoeForCausalLM")
    model.num_experts_per_tok = top_k
    for _ in range(times):
        aux_loss = GlobalAuxLoss(model)
    with aux_loss.counting():
        model(ids(1, 4), use_cache=False, **options)


def _multi_token(*, after: bool = False, count: int | None = None, times: int = 1) -> None:
    """Add heads to a mixture, and call it without token ids."""
    model: Any = tiny_model("DeepseekV3ForCausalLM")
    if after:
        with parallelized(model, TP):
            MultiTokenHeads(model)
    for _ in range(times):
        MultiTokenHeads(model, count)
    model(inputs_embeds=torch.ones(1, 4, model.config.hidden_size), use_cache=False)


def _mimo() -> nn.Module:
    """A decoder without sliding windows, which the heads of its family have."""
    model: Any = tiny_model("DeepseekV3ForCausalLM")
    model.config.model_type, model.config.layer_types = "mimo_v2_flash", ["full_attention"] * len(model.model.layers)
    return cast(nn.Module, model)


def _heads_in_a_trainer() -> None:
    model = tiny_model("DeepseekV3ForCausalLM")
    MultiTokenHeads(model, loss_scaling_factor=0.3)
    check_heads(SimpleNamespace(model=model, label_smoother=print))


def _passed_by() -> None:
    model: Any = tiny_model("DeepseekV3ForCausalLM")
    MultiTokenHeads(model)
    model.model(ids(1, 4))


#: Arguments of a trainer that ask for nothing.
NOTHING: dict[str, Any] = {
    **dict.fromkeys(("fsdp", "deepspeed", "parallelism_config", "fp16", "fp16_full_eval", "bf16_full_eval")),
    **dict.fromkeys(("torch_compile", "use_liger_kernel", "auto_find_batch_size", "neftune_noise_alpha")),
    "eval_use_gather_object": False,
    "accelerator_config": SimpleNamespace(dispatch_batches=None),
    "n_gpu": 0,
}


class _Tokenizer(dict[str, int]):
    """More tokens than any model has."""

    get_vocab = dict.copy

    def __len__(self) -> int:
        return 1 << 20


def _arguments(**given: Any) -> None:
    trainers.check_arguments(SimpleNamespace(**{**NOTHING, **given}))


def _of_a_trainer(axes: dict[str, int], model: Any = None, *, recompute: bool = False, **options: Any) -> None:
    with world(**axes) as mesh:
        if options:
            parallelize(model, mesh, **options)
        trainers.check_model(model, mesh, SimpleNamespace(activation_checkpointing=recompute))


def _plain_on(axes: dict[str, int]) -> None:
    with world(**axes) as mesh:
        trainers.check_on_mesh(_llama(), mesh)


def _other_mesh() -> None:
    with world(dp_shard=2, tp=2) as mesh:
        model = parallelize(_llama(), mesh)
        trainers.check_on_mesh(model, mesh["dp_shard"])


def _samples(number: int) -> None:
    with world(dp_shard=4) as mesh:
        trainers.check_samples([0] * number, 1, mesh, drop_last=False)


def _adapted(options: Any, *, sharded: bool = False, **given: Any) -> None:
    trainers.adapted(SimpleNamespace(**{**NOTHING, **given}), options, sharded=sharded)


#: For each option of the table, arguments that set it.
SET: dict[str, dict[str, Any]] = {
    "OptionError: fsdp cannot": {"fsdp": "full_shard"},
    "OptionError: deepspeed cannot": {"deepspeed": "zero.json"},
    "OptionError: parallelism_config cannot": {"parallelism_config": 1},
    "OptionError: fp16 cannot": {"fp16": True},
    "OptionError: bf16_full_eval cannot": {"bf16_full_eval": True},
    "OptionError: auto_find_batch_size cannot": {"auto_find_batch_size": True},
    "OptionError: neftune_noise_alpha cannot": {"neftune_noise_alpha": 5.0},
    "OptionError: enable_jit_checkpoint cannot": {"enable_jit_checkpoint": True},
    "OptionError: eval_use_gather_object cannot": {"eval_use_gather_object": True},
    "OptionError: dispatch_batches cannot": {"accelerator_config": SimpleNamespace(dispatch_batches=True)},
    "OptionError: DataParallel over several": {"n_gpu": 2},
    "OptionError: train_sampling_strategy=": {"train_sampling_strategy": "group_by_length"},
}


def _host_optimizer(**state: Any) -> None:
    optimizer = CPUOffloadAdamW(nn.Linear(2, 2).parameters())
    optimizer.load_state_dict(
        {"param_groups": [{"params": [0, 1]}], "state": {0: state} if state else {0: {"step": 0}}}
    )


def _step_during(*, in_a_step: bool) -> None:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]))
    optimizer = CPUOffloadAdamW((model if in_a_step else nn.Linear(2, 2)).parameters())
    optimizer.step_during(model, optimizer.step)


def _without_room() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "available_host_memory", lambda: 10)
        CPUOffloadAdamW(nn.Linear(2, 2).parameters())


CASES: Provocations = {
    "fsdp_runtime/memory/host_copies.py": {"OffloadError: of host memory, and 10 are available": _without_room},
    "fsdp_runtime/optim/cpu_offload.py": {
        "OptionError: give the part of the parameters": lambda: CPUOffloadAdamW([], fraction=2.0),
        "OptionError: give numbers of at least 0": lambda: CPUOffloadAdamW([], lr=-1.0),
        "OptionError: take the next step and state_dict": lambda: _step_during(in_a_step=True),
        "MismatchError: it is not AdamW's": _host_optimizer,
        "MismatchError: load a state of another mesh": lambda: _host_optimizer(
            step=torch.ones(()), exp_avg=torch.ones(1), exp_avg_sq=torch.ones(1)
        ),
    },
    "fsdp_runtime/optim/host_step.py": {"ModelError: are not in the model": lambda: _step_during(in_a_step=False)},
    "fsdp_runtime/steps/fsdp/dtypes.py": {"OptionError: one dtype for the trainable": _mixed_experts},
    "fsdp_runtime/steps/fsdp/megatron_fsdp.py": {
        "BackendError: cannot be imported": _without_megatron,
        "BackendError: needs a CUDA device": lambda: _megatron(cuda=False),
        "ModelError: no module is of class": lambda: _megatron(unit_modules=["Block"]),
        "OptionError: takes no dp_shard_dim, tp_dim": lambda: _megatron(options={"grad_reduce_in_fp32": True}),
    },
    "fsdp_runtime/steps/guards/check_inputs.py": {
        "OptionError: give a number of forwards": lambda: CheckInputs("always"),  # type: ignore[arg-type]
    },
    "fsdp_runtime/steps/fsdp/step.py": {
        "OptionError: give a number of blocks": lambda: FSDP2(prefetch_forward=-1),
        "OptionError: torch takes dtypes there": lambda: FSDP2(mp_policy=MixedPrecisionPolicy("bf16")),  # type: ignore[arg-type]
        "OptionError: give a positive number": lambda: FSDP2(gradient_divide_factor=-1.0),
        "OptionError: without a dtype to compute in": lambda: refuse(
            Own(), DP, plan=None, fsdp=FSDP2(master_dtype=torch.float32)
        ),
        "OptionError: frozen_params='replicate' keeps": _frozen,
    },
    "fsdp_runtime/memory/gathered_copies.py": {
        "ModelError: is called outside of the model's own": _outside_forward,
    },
    "fsdp_runtime/steps/outputs/lm_head.py": {
        "ModelError: is not one linear map": lambda: _loss(_dropout().train()),
        "OptionError: leave out labels": lambda: _loss(Own(), labels=ids(1, 4)),
        "ModelError: is None in": _headless,
        "OptionError: logits_to_keep in": _kept_over_cp,
        "OptionError: adapter_names gives": lambda: _loss(_dropout().eval(), adapter_names=["default"]),
        "ModelError: Own does more with the output of lm_head": (
            lambda: _changed(lambda model, hidden: model.lm_head(hidden).index_fill(-1, torch.tensor(15), 0.0)),
            lambda: _changed(lambda model, hidden: model.lm_head(hidden) + 1.0),
        ),
        "ModelError: is called more than once": lambda: _changed(
            lambda model, hidden: model.lm_head(hidden) + model.lm_head(hidden)
        ),
        "ModelError: the forward of Own does not call lm_head": lambda: _changed(
            lambda model, hidden: hidden @ model.lm_head.weight.T
        ),
        "ModelError: has no linear language-model head": lambda: _loss(
            Tree(layers=nn.ModuleList([Tree(a=nn.Linear(2, 2))]))
        ),
    },
    "fsdp_runtime/optim/groups.py": {
        "OptionError: layer_decay=0: give a positive factor": lambda: param_groups(Own(), lr=1.0, layer_decay=0)
    },
    "fsdp_runtime/optim/muon.py": {
        "OptionError: momentum=1.0: give 0 or more, less than 1": lambda: Muon(Own(), momentum=1.0),
        "OptionError: which is no matrix": lambda: Muon([{"params": [torch.zeros(3)], "use_muon": True}]),
        "OptionError: the roles of 1 parameters are unknown": lambda: Muon([torch.zeros(3, 3)]),
    },
    "fsdp_runtime/steps/guards/calls.py": {
        "ModelError: parallelize has replaced by shards": _stale,
        "ModelError: cannot be pickled": _pickled,
        "ModelError: of a parallelized": tuple(partial(_called, call, axes) for axes, call in METHODS),
        "ModelError: save_pretrained of a": lambda: _called(lambda model: model.save_pretrained("never-written"), TP),
        "ModelError: resize_token_embeddings of a": lambda: _called(lambda model: model.resize_token_embeddings(7), TP),
        "ModelError: load_state_dict": lambda: _called(
            lambda model: model.load_state_dict(_llama().state_dict(), assign=True), TP
        ),
        "ModelError: unmerge": _merged,
        "ModelError: merge": _merged_dora,
    },
    "fsdp_runtime/steps/routing/balance.py": {
        "ModelError: has a correction bias": lambda: RouterBalance(tiny_model("Qwen3MoeForCausalLM")),
        "OptionError: rate=-1: give 0 or more": lambda: RouterBalance(nn.Identity(), rate=-1),
        "RoutesError: no forward was counted": lambda: _balance().step(),
        "RoutesError: mask has 3 tokens": lambda: _balance().count(Routes({"gate": torch.zeros(2, 1)}), torch.ones(3)),
    },
    "fsdp_runtime/steps/multi_token_heads.py": {
        "ModelError: need a block of sliding_attention": lambda: MultiTokenHeads(_mimo()),
        "ModelError: has multi-token heads already": lambda: _multi_token(times=2),
        "ModelError: add multi-token heads before": lambda: _multi_token(after=True),
        "OptionError: has 1 head": lambda: _multi_token(count=0),
        "LayoutError: embed the next tokens": _multi_token,
        "ModelError: was passed by": _passed_by,
        "ModelError: has no known multi-token heads": lambda: MultiTokenHeads(_llama()),
        "ModelError: give the config mtp_layer_types": lambda: LAYOUTS["exaone_moe"].types(
            SimpleNamespace(model_type=""), 1
        ),
    },
    "fsdp_runtime/trainers/logits.py": {
        "OptionError: heads no labels": _heads_in_a_trainer,
    },
    "fsdp_runtime/steps/routing/global_aux_loss.py": {
        "ModelError: computes no auxiliary loss": lambda: GlobalAuxLoss(tiny_model("DeepseekV3ForCausalLM")),
        "ModelError: has a GlobalAuxLoss already": lambda: _aux_loss(times=2),
        "ModelError: another formula": lambda: _aux_loss(top_k=1, output_router_logits=True),
        "ModelError: are not [tokens, experts] for a mask": lambda: _aux_loss(
            build_model(coverage_entries()["doge, mixture"]), output_router_logits=True, attention_mask=torch.ones(1, 4)
        ),
        "OptionError: return_dict=False beside": lambda: _aux_loss(output_router_logits=True, return_dict=False),
        "RoutesError: no forward inside counting": _aux_loss,
    },
    "fsdp_runtime/trainers/training_arguments.py": {
        **{piece: lambda given=given: _arguments(**given) for piece, given in SET.items()},  # type: ignore[misc]
        "OptionError: is not known to be right on shards": lambda: trainers.check_optimizer(
            SimpleNamespace(optim="adafactor")
        ),
        "OptionError: and the training arguments recompute": (
            lambda: _adapted({"activation_checkpointing": "block"}, activation_checkpointing=True),
            lambda: _of_a_trainer(DP, _llama(), recompute=True, activation_checkpointing="block"),
        ),
        "OptionError: for dp=4 ranks": lambda: _samples(3),
        "ModelError: before parallelize": lambda: trainers.check_tokens(_llama(), _Tokenizer()),
        "OptionError: torch_compile cannot": lambda: _adapted({}, sharded=True, torch_compile=True),
        "ModelError: is on the meta device": lambda: _of_a_trainer({}, _llama().to("meta")),
        "ModelError: the model is not sharded": (
            lambda: _plain_on(TP),
            lambda: _plain_on(DP),
        ),
        "ModelError: part of the trainer's mesh": _other_mesh,
    },
}
