"""What peft adds to a model, of every kind that a plan takes: outputs and gradients of one process, on ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import (
    ModelError,
    OptionError,
    forward_with_lm_head,
    load_adapter,
    parallelize,
    save_adapter,
    stream_weights,
)
from harness.float64 import compute_in_float64
from harness.models import HIDDEN, VOCAB, copy_of_one_build, jitter, tiny_config, tiny_model
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool
from rl_logprobs import linear_token_logprobs, token_logprobs

BOUND = 1e-9
QV = ["q_proj", "v_proj"]
NORMS = ["input_layernorm", "q_norm", "norm"]

#: Configs of peft by name, with the class of the model and changes to its config.
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "head": ("Qwen3ForCausalLM", {}, {"target_modules": ["q_proj", "lm_head"]}),
    "tied head": ("Qwen3ForCausalLM", {"tied": True}, {"target_modules": ["o_proj", "lm_head"]}),
    "rank-stabilised head": ("Qwen3ForCausalLM", {}, {"target_modules": ["lm_head"], "use_rslora": True}),
    "saved head": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "saved tied head": ("Qwen3ForCausalLM", {"tied": True}, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "saved ends": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved norms": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": NORMS}),
    "saved layers": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["mlp", "k_proj", "o_proj"]}),
    "saved blocks": ("Qwen3ForCausalLM", {}, {"target_modules": QV, "modules_to_save": ["layers.1"]}),
    "LN tuning": ("Qwen3ForCausalLM", {}, peft.LNTuningConfig(target_modules=NORMS)),
    "biases": ("Qwen2ForCausalLM", {}, {"target_modules": QV, "bias": "all"}),
    "biases of adapters": ("LlamaForCausalLM", {}, {"target_modules": [*QV, "o_proj", "lm_head"], "lora_bias": True}),
    "experts": (
        "Qwen3MoeForCausalLM",
        {},
        {"target_modules": QV, "target_parameters": ["experts.gate_up_proj"], "modules_to_save": ["gate", "norm"]},
    ),
    "reward": ("Qwen3ForSequenceClassification", {}, {"target_modules": QV, "task_type": "SEQ_CLS"}),
    "tokens": ("LlamaForTokenClassification", {}, {"target_modules": QV, "task_type": "TOKEN_CLS"}),
    "answers": ("LlamaForQuestionAnswering", {}, {"target_modules": QV, "task_type": "QUESTION_ANS"}),
    "reward of a mixture": ("Qwen3MoeForSequenceClassification", {}, {"target_modules": QV, "task_type": "SEQ_CLS"}),
}


#: Further kinds, which a mesh without ``tp`` takes.
REPLICATED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "DoRA": ("LlamaForCausalLM", {}, {"target_modules": [*QV, "lm_head"], "use_dora": True}),
    "tokens of the embedding": (
        "Qwen3ForCausalLM",
        {},
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [3, 7, 100]}},
    ),
    "tokens of both ends": (
        "Qwen3ForCausalLM",
        {"tied": True},
        {"target_modules": QV, "trainable_token_indices": [3, 7, 100]},
    ),
    "IA3": (
        "Qwen3ForCausalLM",
        {},
        peft.IA3Config(target_modules=["k_proj", "down_proj", "lm_head"], feedforward_modules=["down_proj"]),
    ),
    "VeRA": ("Qwen3ForCausalLM", {}, peft.VeraConfig(r=4, target_modules=["o_proj"])),
    "VB-LoRA": (
        "Qwen3ForCausalLM",
        {},
        peft.VBLoRAConfig(r=2, target_modules=QV, vector_length=2, num_vectors=16, topk=2),
    ),
    "LoHa": ("Qwen3ForCausalLM", {}, peft.LoHaConfig(r=4, target_modules=QV)),
}


def adapted(kind: str, seed: int = 0) -> Any:
    """Return a model of one kind, no value of it zero or initial."""
    return copy_of_one_build(lambda: _adapted(kind, seed), ("adapted", kind, seed))


def _adapted(kind: str, seed: int) -> Any:
    architecture, changes, settings = (KINDS | REPLICATED)[kind]
    torch.manual_seed(0)
    if architecture.endswith("CausalLM"):
        model: Any = tiny_model(architecture, **changes)
    else:
        config = tiny_config(architecture.partition("For")[0] + "ForCausalLM")
        config.num_labels, config._experts_implementation = 2 if "Question" in architecture else 3, "eager"
        model = getattr(transformers, architecture)(config)
    settings = copy.deepcopy(settings)
    config = settings if isinstance(settings, peft.PeftConfig) else peft.LoraConfig(r=3, lora_alpha=7, **settings)
    found: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double().eval()
    torch.manual_seed(seed)
    jitter(found)
    return found


PAD = 0
IDS = torch.randint(3, 130, (4, 7), generator=torch.Generator().manual_seed(1))
IDS[0, 5:] = PAD


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _scores(model: nn.Module, ids: Tensor, *, hidden: bool) -> Tensor:
    """Log-probabilities from logits or from hidden states, or a task's scores."""
    if hidden:
        targets = ids.roll(-1, 1)
        found = forward_with_lm_head(
            model,
            lambda states, head: linear_token_logprobs(states, head.weight, targets, bias=head.bias),
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            use_cache=False,
        )
        return _plain(found)
    output = model(input_ids=ids, use_cache=False, attention_mask=(ids != PAD).long())
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits]).transpose(0, 1)
    if output.logits.shape[-1] == VOCAB:
        return token_logprobs(output.logits, ids.roll(-1, 1))
    return _plain(output.logits)


def _backward(model: nn.Module, ids: Tensor, own: slice, ranks: int, *, hidden: bool) -> Tensor:
    scores = _scores(model, ids[own], hidden=hidden)
    weights = torch.randn(len(ids), *scores.shape[1:], generator=torch.Generator().manual_seed(2), dtype=scores.dtype)
    (scores * weights[own]).sum().mul(ranks).backward()
    return scores.detach()


def errors_of(kind: str, axes: Mapping[str, int], options: Mapping[str, Any], *, hidden: bool) -> dict[str, float]:
    """Return what is off by more than rounding on this rank."""
    reference = adapted(kind)
    candidate = copy.deepcopy(reference)
    mesh = mesh_for(axes)
    with compute_in_float64():
        wanted = _backward(reference, IDS, slice(None), 1, hidden=False)
        candidate = parallelize(candidate, mesh, **options)
        ranks = axes.get("dp_shard", 1)
        share = len(IDS) // ranks
        first = share * (mesh["dp_shard"].get_local_rank() if "dp_shard" in axes else 0)
        own = slice(first, first + share)
        found = _backward(candidate, IDS, own, ranks, hidden=hidden)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    trained = [name for name, gradient in expected.items() if gradient is not None]
    errors = gradient_errors(expected, candidate) | {"scores": largest(found - wanted[own])}
    assert trained
    return {name: error for name, error in errors.items() if not error <= BOUND}


def _wrong(axes: Mapping[str, int], options: Mapping[str, Any], kinds: list[str], *, hidden: bool) -> dict[str, Any]:
    """Return what is off by kind; with ``hidden`` of language models under a loss from hidden states."""
    found = {}
    for kind in kinds:
        from_hidden = hidden and (KINDS | REPLICATED)[kind][0].endswith("CausalLM")
        found[kind] = errors_of(kind, axes, options, hidden=from_hidden)
    return {kind: errors for kind, errors in found.items() if errors}


def test_every_kind_computes_what_one_process_does(two_ranks: RankPool) -> None:
    options = {"sequence_parallel": True}
    assert two_ranks.run(_wrong, {"tp": 2}, options, list(KINDS), hidden=True) == [{}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
def test_every_kind_does_from_logits(two_ranks: RankPool, options: dict[str, Any]) -> None:
    assert two_ranks.run(_wrong, {"tp": 2}, options, list(KINDS), hidden=False) == [{}] * 2


@pytest.mark.parametrize(
    "kinds", [["head", "saved norms", "reward"], pytest.param(list(KINDS), marks=pytest.mark.slow)], ids=len
)
def test_kinds_do_under_fsdp_too(four_ranks: RankPool, kinds: list[str]) -> None:
    options = {"sequence_parallel": True, "activation_checkpointing": "block"}
    assert four_ranks.run(_wrong, {"dp_shard": 2, "tp": 2}, options, kinds, hidden=True) == [{}] * 4


def test_kinds_that_read_full_weights_do_on_shards_of_fsdp(two_ranks: RankPool) -> None:
    axes, others = {"dp_shard": 2}, [kind for kind in REPLICATED if kind != "IA3"]
    assert two_ranks.run(_wrong, axes, {}, ["IA3"], hidden=False) == [{}] * 2
    assert two_ranks.run(_wrong, axes, {}, others, hidden=True) == [{}] * 2


def _refusals(sequence_parallel: bool) -> dict[str, str]:
    found = {}
    for kind in REPLICATED:
        model = adapted(kind)
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(OptionError) as error:
            parallelize(model, mesh_for({"tp": 2}), sequence_parallel=sequence_parallel)
        assert before == {name: type(module) for name, module in model.named_modules()}
        found[kind] = str(error.value)
    return found


def test_they_are_refused_by_name_over_tp(two_ranks: RankPool) -> None:
    for sequence_parallel in (False, True):
        for found in two_ranks.run(_refusals, sequence_parallel):
            assert "q_proj carries adapters" in found["DoRA"]
            assert "(DoRA, peft's DoraLinearVariant: set use_dora=False)" in found["DoRA"]
            assert "embed_tokens is adapted by peft's TrainableTokensWrapper" in found["tokens of the embedding"]
            assert "k_proj is adapted by peft's ia3.Linear" in found["IA3"]


def test_heads_that_are_no_one_product_are_refused_without_logits() -> None:
    def forward(model: nn.Module, **inputs: Any) -> Any:
        return forward_with_lm_head(model, lambda states, head: states, input_ids=IDS, **inputs)

    with pytest.raises(ModelError, match=r"lm_head is not one linear map, .* peft's ia3.Linear adapts it"):
        forward(adapted("IA3"))
    dropout: Any = peft.get_peft_model(
        tiny_model("LlamaForCausalLM"), peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.1)
    )
    with pytest.raises(ModelError, match=r"its adapter has dropout \(0.1\)"):
        forward(dropout.train())
    assert forward(dropout.eval()).shape == (4, 7, HIDDEN)
    with pytest.raises(OptionError, match="adapter_names gives each row another head"):
        forward(dropout, adapter_names=["default"] * 4)


# Files


def _differing_files(axes: dict[str, int], kinds: list[str], folder: Path) -> dict[str, Any]:
    """Return, by kind, the names that differ between our file and peft's, and after each has loaded the other's."""
    found: dict[str, Any] = {}
    for kind in kinds:
        ours, theirs, alone = folder / kind / "ours", folder / kind / "peft", adapted(kind)
        model = parallelize(adapted(kind), mesh_for(axes))
        save_adapter(model, ours)
        if torch.distributed.get_rank() == 0:
            alone.save_pretrained(theirs)
        torch.distributed.barrier()
        wanted, written = (load_file(each / "adapter_model.safetensors") for each in (theirs, ours))
        differing = [n for n in wanted.keys() | written.keys() if not _equal(wanted.get(n), written.get(n))]
        configs = [json.loads((each / "adapter_config.json").read_text()) for each in (theirs, ours)]
        differing += [n for n in configs[0].keys() | configs[1].keys() if configs[0].get(n) != configs[1].get(n)]
        other = parallelize(adapted(kind, seed=5), mesh_for(axes))
        load_adapter(other, theirs)
        save_adapter(other, folder / kind / "again")
        again = load_file(folder / kind / "again" / "adapter_model.safetensors")
        differing += [f"{n} after load_adapter" for n in wanted if not _equal(wanted[n], again.get(n))]
        reloaded: Any = adapted(kind, seed=5)
        peft.set_peft_model_state_dict(reloaded, peft.load_peft_weights(str(ours)))
        reread = peft.get_peft_model_state_dict(reloaded, save_embedding_layers="auto")
        differing += [f"{n} after peft has loaded it" for n in wanted if not _equal(wanted[n], reread.get(n))]
        found[kind] = differing
    return {kind: differing for kind, differing in found.items() if differing}


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(
    ("axes", "kinds"), [({"tp": 2}, list(KINDS)), ({"dp_shard": 2}, list(REPLICATED))], ids=["tp", "dp_shard"]
)
def test_adapter_files_are_those_of_peft(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int], kinds: list[str]
) -> None:
    assert two_ranks.run(_differing_files, axes, kinds, tmp_path) == [{}] * 2


# Exports

#: Kinds that are not merged: on a weight with two names, and with a bias of their own.
NOT_MERGED = {"tied head", "biases of adapters"}


def _differing_exports(kinds: list[str]) -> dict[str, list[str]]:
    """Return, by kind, the weights that differ between our stream and what peft merges."""
    found = {}
    for kind in kinds:
        wanted = dict(stream_weights(adapted(kind).merge_and_unload()))
        streamed = dict(stream_weights(parallelize(adapted(kind), mesh_for({"tp": 2}))))
        names = wanted.keys() | streamed.keys()
        found[kind] = [
            name
            for name in sorted(names)
            if name not in wanted
            or name not in streamed
            or not torch.allclose(wanted[name], streamed[name], rtol=1e-12)
        ]
    return {kind: names for kind, names in found.items() if names}


def test_exports_are_what_peft_merges(two_ranks: RankPool) -> None:
    kinds = [kind for kind in KINDS if kind not in NOT_MERGED]
    assert two_ranks.run(_differing_exports, kinds) == [{}] * 2


def test_other_kinds_are_not_exported_in_silence() -> None:
    for kind in (*NOT_MERGED, *REPLICATED):
        with pytest.raises(OptionError, match=r"cannot be merged for export|which is not merged for export"):
            list(stream_weights(adapted(kind)))


@pytest.mark.parametrize("kind", ["saved norms", "LN tuning", "IA3"])
def test_a_disabled_adapter_leaves_the_base_model(kind: str) -> None:
    model = adapted(kind)
    with model.disable_adapter():
        streamed = dict(stream_weights(model))
        wanted = model(input_ids=IDS, use_cache=False).logits
    plain: Any = tiny_model((KINDS | REPLICATED)[kind][0], seed=3)
    plain.load_state_dict(streamed)
    assert torch.equal(plain(input_ids=IDS, use_cache=False).logits, wanted)


# Several adapters


def _two_adapters() -> Any:
    model: Any = tiny_model("Qwen3ForCausalLM")
    first = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"])
    model = peft.get_peft_model(model, first, autocast_adapter_dtype=False)
    second = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], modules_to_save=["norm"], use_rslora=True)
    model.add_adapter("other", second)
    model.double().eval()
    torch.manual_seed(3)
    jitter(model)
    return model


#: What peft does to a model between two forwards, in this order.
CHANGES: dict[str, Any] = {
    "the first": lambda model: None,
    "the second": lambda model: model.set_adapter("other"),
    "both": lambda model: model.base_model.set_adapter(["default", "other"]),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "enabled": lambda model: model.base_model.enable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: model.unmerge_adapter(),
    "the first again": lambda model: model.set_adapter("default"),
}


def _changed() -> tuple[dict[str, Any], str, str]:
    """Return what is off after each change, and the errors of adapters that are added."""
    reference = _two_adapters()
    model: Any = parallelize(copy.deepcopy(reference), mesh_for({"tp": 2}), sequence_parallel=True)
    wrong = {}
    for name, change in CHANGES.items():
        errors = {}
        for each in (reference, model):
            each.zero_grad()
            change(each)
        trains = any(parameter.requires_grad for parameter in reference.parameters())
        with compute_in_float64(), torch.set_grad_enabled(trains):
            for hidden in (False, True):
                wanted, found = (_scores(each, IDS, hidden=hidden) for each in (reference, model))
                errors["scores"] = largest(found.detach() - wanted.detach())
                if trains:
                    wanted.square().sum().backward()
                    found.square().sum().backward()
                    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
                    errors |= gradient_errors(expected, model)
        wrong[name] = {each: error for each, error in errors.items() if not error <= BOUND}
    with pytest.raises(ModelError) as added:
        model.add_adapter("third", peft.LoraConfig(target_modules=["q_proj"]))
    model.peft_config["fourth"] = model.peft_config["default"]
    with pytest.raises(OptionError) as injected:
        model(input_ids=IDS)
    return {name: errors for name, errors in wrong.items() if errors}, str(added.value), str(injected.value)


def test_adapters_are_chosen_disabled_and_merged_after_parallelize_and_none_is_added(two_ranks: RankPool) -> None:
    for wrong, added, injected in two_ranks.run(_changed):
        assert wrong == {}
        assert "add adapters before parallelize" in added
        assert "the adapter 'fourth' was added after parallelize" in injected


def _learned_prompts() -> list[str]:
    found = []
    for kind, sequence_parallel in ((peft.PrefixTuningConfig, False), (peft.PromptTuningConfig, True)):
        config = kind(num_virtual_tokens=3, task_type="CAUSAL_LM")
        model = peft.get_peft_model(tiny_model("Qwen3ForCausalLM"), config)
        with pytest.raises(OptionError) as error:
            parallelize(model, mesh_for({"tp": 2}), sequence_parallel=sequence_parallel)
        found.append(str(error.value))
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("Qwen3ForCausalLM"), config).double().eval()
    wanted = model(input_ids=IDS, use_cache=False).logits
    sharded = parallelize(copy.deepcopy(model), mesh_for({"tp": 2}))(input_ids=IDS, use_cache=False).logits
    return [*found, "right" if torch.allclose(_plain(sharded), wanted, rtol=0, atol=1e-6) else "wrong"]


def test_learned_prompts_are_right_or_refused_over_tp(two_ranks: RankPool) -> None:
    for prefix, prompt, logits in two_ranks.run(_learned_prompts):
        assert "learns keys and values of all heads (prefix tuning)" in prefix
        assert "puts learned embeddings in front of the token embeddings" in prompt
        assert logits == "right"


def _added_later() -> str:
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh_for({"tp": 2}))
    later: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=QV))
    with pytest.raises(OptionError) as error:
        later(input_ids=IDS, use_cache=False)
    return str(error.value)


def test_a_peft_model_that_is_made_of_a_sharded_one_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_added_later):
        assert message.startswith("the adapter 'default' was added after parallelize")
