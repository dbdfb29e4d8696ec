"""Every method that reads or changes parameters, on a parallelized model: right, or refused with what to do instead."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import MeshSpec, ModelError, parallelize, unsharded
from harness.models import VOCAB, tiny_inputs, tiny_model
from harness.ranks import RankPool

Method = Callable[[Any], Any]


def _lora() -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)


def _full_weights(model: Any) -> dict[str, Tensor]:
    source = tiny_model("LlamaForCausalLM", tied=model.config.tie_word_embeddings)
    return {name: 2 * value for name, value in source.state_dict().items()}


def _scale(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.mul_(0.9)


#: Methods that do to a parallelized model what they do to a plain one.
RIGHT: dict[str, Method] = {
    "tie_weights": lambda m: m.tie_weights(),
    "resize_token_embeddings to the same size": lambda m: m.resize_token_embeddings(VOCAB) and None,
    "resize_token_embeddings without a size": lambda m: m.resize_token_embeddings() and None,
    "set_input_embeddings to the same": lambda m: m.set_input_embeddings(m.get_input_embeddings()),
    "set_decoder to the same": lambda m: m.set_decoder(m.get_decoder()),
    "to a device": lambda m: m.to("cpu") and None,
    "to the same dtype": lambda m: m.double() and None,
    "state_dict": lambda m: sorted((name, value.shape) for name, value in m.state_dict().items()),
    "load_state_dict": lambda m: str(m.load_state_dict({name: 2 * value for name, value in m.state_dict().items()})),
    "load_state_dict of full tensors": lambda m: str(m.load_state_dict(_full_weights(m))),
    "load_state_dict of full tensors of a part": lambda m: str(
        m.model.load_state_dict({n[6:]: v for n, v in _full_weights(m).items() if "layers" in n}, strict=False)
    ),
    "load_state_dict of a part": lambda m: str(m.model.layers[0].load_state_dict(m.model.layers[1].state_dict())),
    "gradient_checkpointing_enable": lambda m: (m.train(), m.gradient_checkpointing_enable())[1],
    "gradient_checkpointing_enable reentrant": lambda m: (
        m.train(),
        m.gradient_checkpointing_enable({"use_reentrant": True}),
        m.enable_input_require_grads(),
    )[1],
    "gradient_checkpointing_disable": lambda m: m.gradient_checkpointing_disable(),
    "compile": lambda m: m.compile(backend="eager"),
    "eval": lambda m: m.eval() and None,
    "train": lambda m: m.train() and None,
    "requires_grad_ of the model": lambda m: m.requires_grad_(False) and None,
    "requires_grad_ of a block": lambda m: m.model.layers[-1].requires_grad_(False) and None,
    "requires_grad_ of the head": lambda m: m.lm_head.requires_grad_(False) and None,
    "zero_grad": lambda m: m.zero_grad(),
    "apply": lambda m: m.apply(_scale) and None,
    "init_weights": lambda m: m.init_weights(),
    "initialize_weights": lambda m: m.initialize_weights(),
    "post_init": lambda m: m.post_init(),
    "enable_input_require_grads": lambda m: m.enable_input_require_grads(),
    "disable_input_require_grads": lambda m: m.disable_input_require_grads(),
    "set_attn_implementation": lambda m: m.set_attn_implementation("eager"),
    "num_parameters": lambda m: m.num_parameters(only_trainable=True),
    "get_memory_footprint": lambda m: m.get_memory_footprint(),
    "get_parameter": lambda m: tuple(m.get_parameter("lm_head.weight").shape),
    "register_buffer": lambda m: m.register_buffer("further", torch.ones(2)),
}

#: Methods that are refused, with the call that the error names.
REFUSED: dict[str, tuple[Method, str]] = {
    "resize_token_embeddings": (lambda m: m.resize_token_embeddings(VOCAB + 9), "resize it before parallelize"),
    "resize of a part": (lambda m: m.model.resize_token_embeddings(VOCAB + 9), "resize it before parallelize"),
    "add_adapter": (lambda m: m.add_adapter(_lora()), "add adapters before parallelize"),
    "load_adapter": (lambda m: m.load_adapter("folder"), r"load_adapter\(model, directory\)"),
    "load_state_dict, assigned": (lambda m: m.load_state_dict(_full_weights(m), assign=True), "leave assign out"),
    "save_pretrained": (lambda m: m.save_pretrained("folder"), r"save_weights\(model, directory\)"),
    "push_to_hub": (lambda m: m.push_to_hub("name"), r"save_weights\(model, directory\)"),
    "save_distributed_checkpoint": (lambda m: m.save_distributed_checkpoint(m, "folder"), r"save_weights\(model"),
    "resize_position_embeddings": (lambda m: m.resize_position_embeddings(64), "resize it before parallelize"),
    "share_memory": (lambda m: m.share_memory(), "share the plain model's"),
}

#: Those that FSDP2 alone cannot follow.
REFUSED_BY_FSDP2: dict[str, tuple[Method, str]] = {
    "deepcopy": (copy.deepcopy, "parallelize a copy of the plain one"),
}


def _merged_for_a_while(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def _run_without_merged_adapters(model: Any) -> None:
    model.merge_adapter()
    try:
        with model.disable_adapter():
            _loss(model)
    finally:
        model.unmerge_adapter()


def _merge_gathered(model: Any) -> None:
    with unsharded(model):
        model.merge_adapter()


#: The same of a model with adapters.
RIGHT_WITH_ADAPTERS: dict[str, Method] = {
    "merge_adapter": lambda m: m.merge_adapter(),
    "unmerge_adapter": _merged_for_a_while,
    "disable_adapter_layers": lambda m: m.base_model.disable_adapter_layers(),
    "set_adapter": lambda m: m.set_adapter("default"),
    "set_requires_grad": lambda m: m.set_requires_grad("default", requires_grad=False),
    "get_nb_trainable_parameters": lambda m: m.get_nb_trainable_parameters(),
}
REFUSED_WITH_ADAPTERS: dict[str, tuple[Method, str]] = {
    "add_adapter": (lambda m: m.add_adapter("second", _lora()), "add adapters before parallelize"),
    "load_adapter": (lambda m: m.load_adapter("folder", "second"), r"load_adapter\(model, directory\)"),
    "add_weighted_adapter": (
        lambda m: m.base_model.add_weighted_adapter(["default"], [0.5], "second", combination_type="linear"),
        "add adapters before parallelize",
    ),
    "save_pretrained": (lambda m: m.save_pretrained("folder"), r"save_adapter\(model, directory\)"),
}
REFUSED_BY_FSDP2_WITH_ADAPTERS: dict[str, tuple[Method, str]] = {
    "unmerge in a forward": (lambda m: _run_without_merged_adapters(m), r"unmerge_adapter\(\) before"),
    "merge_adapter inside of unsharded": (lambda m: _merge_gathered(m), r"merge_adapter\(\) or unmerge_adapter\(\) b"),
}

#: Methods that need no rule: why, and their names.
OTHERS: dict[str, str] = {
    "they read the structure, flags or the config": """
        buffers children modules named_buffers named_children named_modules named_non_persistent_buffers can_generate
        extra_repr get_buffer get_compiled_call get_correct_attn_implementation get_correct_experts_implementation
        get_decoder get_encoder get_expanded_tied_weights_keys get_experts_implementation get_extra_state
        get_input_embeddings get_output_embeddings get_position_embeddings get_submodule is_backend_compatible
        is_custom_code is_remote_code should_save_on_this_rank warn_if_padding_and_no_attention_mask
        generation_config_class retrieve_modules_from_names""",
    "they are rules of their own, tested by what calls them": "named_parameters parameters get_parameter_or_buffer",
    "they call a method that has a rule": "cpu cuda double ipu mtia xpu to_empty",
    "they are tested under another name": """
        activation_checkpointing_disable activation_checkpointing_enable smart_apply forward
        mark_tied_weights_as_initialized""",
    "they register hooks, which stay": """
        register_backward_hook register_forward_hook register_forward_pre_hook register_full_backward_hook
        register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook
        register_state_dict_post_hook register_state_dict_pre_hook""",
    "they add plain parameters, which the step of an optimizer compares": """
        add_module register_module register_parameter set_encoder set_output_embeddings set_submodule""",
    "they raise in torch after FSDP2's first forward": "bfloat16 float half type",
    "a model that is parallelized has no use for them": "maybe_distribute_model set_use_kernels",
    "they set what does not compute": "add_model_tags register_for_auto_class set_extra_state",
    "they make another model, or prepare one before it is made": """
        from_pretrained get_init_context init_parallel_plans prepare_distribute_model""",
    "they are of adapters that transformers adds itself, which parallelize refuses": """
        active_adapters delete_adapter disable_adapters enable_adapters enable_peft_hotswap get_adapter_state_dict
        set_adapter""",
    "they do nothing for a model that transformers has not distributed": """
        barrier_after_gathered_checkpoint_save gather_sharded_state_dict_for_save""",
    "they raise as on one process, for a model that is not quantized": "dequantize",
    "they are tested with mixtures": "set_experts_implementation",
}


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _loss(model: Any) -> Tensor:
    return _whole(model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits).square().mean()


def _train(model: Any, method: Method, runs_before: str) -> tuple[Any, Any]:
    """What a method returns, and the model afterwards: its loss, weights, gradients, flags."""
    if runs_before == "a step":
        _loss(model).backward()
        model.zero_grad()
    elif runs_before == "a forward":
        _loss(model)
    returned = method(model)
    loss = _loss(model)
    if loss.requires_grad:
        loss.backward()
    found: dict[str, Any] = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        found[name] = _whole(parameter).detach()
        found[f"{name}: trains"] = torch.tensor(parameter.requires_grad)
        if parameter.grad is not None:
            found[f"{name}: gradient"] = _whole(parameter.grad)
    return returned, found


def _started(adapters: bool, tied: bool) -> nn.Module:
    model = tiny_model("LlamaForCausalLM", tied=tied)
    if not adapters:
        return model
    torch.manual_seed(0)
    return peft.get_peft_model(model, _lora()).double().eval()


def _differences(axes: dict[str, int], tied: bool, adapters: bool, runs_before: str) -> list[str]:
    start = _started(adapters, tied)
    mesh = MeshSpec(**axes).build(device_type="cpu")
    wrong = []
    for name, method in (RIGHT_WITH_ADAPTERS if adapters else RIGHT).items():
        wanted = _train(copy.deepcopy(start), method, runs_before)
        found = _train(parallelize(copy.deepcopy(start), mesh), method, runs_before)
        if found[0] != wanted[0]:
            wrong.append(f"{name} after {runs_before} returns {found[0]}, not {wanted[0]}")
        if found[1].keys() != wanted[1].keys():
            wrong.append(f"{name} after {runs_before}: {sorted(found[1].keys() ^ wanted[1].keys())[:3]}")
            continue
        wrong += [
            f"{name} after {runs_before}: {key}"
            for key, value in wanted[1].items()
            if not torch.allclose(found[1][key].double(), value.double(), atol=1e-6, rtol=1e-4)
        ]
    return wrong


#: A forward leaves the parameters of FSDP2's root gathered; a step leaves all of them sharded, as they were at first.
@pytest.mark.parametrize("runs_before", ["a forward", pytest.param("a step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
@pytest.mark.parametrize(
    ("axes", "tied"),
    [pytest.param({"tp": 2}, True, marks=pytest.mark.slow), ({"dp_shard": 2}, False)],  # FSDP2 has more of the rules
    ids=str,
)
def test_methods_do_what_they_do_to_a_plain_model(
    two_ranks: RankPool, axes: dict[str, int], tied: bool, adapters: bool, runs_before: str
) -> None:
    assert two_ranks.run(_differences, axes, tied, adapters, runs_before) == [[], []]


def _trained_without_adapters(model: Any, method: str) -> dict[str, Tensor]:
    """Leave the adapters out, train two steps, and return losses and parameters."""
    inside = getattr(model, method)()
    optimizer = torch.optim.SGD(inside.requires_grad_().parameters(), lr=0.1)
    values = {}
    for step in range(2):
        loss = _loss(inside)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values[f"loss {step}"] = loss.detach()
    return values | {name: _whole(parameter).detach() for name, parameter in inside.named_parameters()}


def _wrong_without_adapters() -> list[str]:
    start = _started(adapters=True, tied=True)
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    wrong: list[str] = []
    for method in ("merge_and_unload", "unload"):
        expected = _trained_without_adapters(copy.deepcopy(start), method)
        values = _trained_without_adapters(parallelize(copy.deepcopy(start), mesh), method)
        assert values.keys() == expected.keys()
        wrong += [
            f"{method}: {name} off by {(values[name] - value).abs().max():.1e}"
            for name, value in expected.items()
            if not torch.allclose(values[name].double(), value.double(), atol=1e-6, rtol=1e-4)
        ]
    return wrong


def test_unload_of_a_tensor_parallel_model_trains_on(two_ranks: RankPool) -> None:
    assert two_ranks.run(_wrong_without_adapters) == [[], []]


def _unloaded_under_fsdp2() -> None:
    model: Any = parallelize(_started(adapters=True, tied=False), MeshSpec(dp_shard=2).build(device_type="cpu"))
    with pytest.raises(ModelError, match="embed_tokens is called outside of the model's own forward"):
        _loss(model.merge_and_unload())


def test_unload_under_fsdp2_is_refused_at_the_next_forward(two_ranks: RankPool) -> None:
    two_ranks.run(_unloaded_under_fsdp2)


def _expected(axes: dict[str, int], adapters: bool) -> dict[str, tuple[Method, str]]:
    if adapters:
        return REFUSED_WITH_ADAPTERS | (REFUSED_BY_FSDP2_WITH_ADAPTERS if "dp_shard" in axes else {})
    return REFUSED | (REFUSED_BY_FSDP2 if "dp_shard" in axes else {})


def _messages(axes: dict[str, int], adapters: bool) -> tuple[dict[str, str], bool]:
    """The error of each method, and whether the model is as it was."""
    model = parallelize(_started(adapters, tied=False), MeshSpec(**axes).build(device_type="cpu"))
    wanted = _loss(model).detach()
    found = {}
    for name, (method, _) in _expected(axes, adapters).items():
        try:
            method(model)
            found[name] = "no error"
        except ModelError as error:
            found[name] = str(error)
    return found, torch.equal(_loss(model), wanted)


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_methods_that_cannot_be_right_name_the_call_that_is(
    two_ranks: RankPool, axes: dict[str, int], adapters: bool
) -> None:
    for messages, unchanged in two_ranks.run(_messages, axes, adapters):
        for name, (_, message) in _expected(axes, adapters).items():
            assert re.search(message, messages[name]), (name, messages[name])
        assert unchanged


def test_methods_of_a_model_that_is_not_sharded_stay_as_they_are() -> None:
    model: Any = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec().build(device_type="cpu"))
    model.resize_token_embeddings(VOCAB + 9)
    model.load_state_dict(model.half().state_dict())


def test_every_method_of_any_release_is_classified() -> None:
    tested = {name.split()[0].rstrip(",") for name in (*RIGHT, *REFUSED, *REFUSED_BY_FSDP2)}
    others = {name for names in OTHERS.values() for name in names.split()}
    cls = transformers.PreTrainedModel
    methods = {name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}
    assert methods - tested - others == set()
    assert others.isdisjoint(tested)


def _of_experts(axes: dict[str, int]) -> list[float]:
    """Errors of a mixture whose experts are computed another way after it was sharded."""
    plain: Any = tiny_model("Qwen3MoeForCausalLM")
    model: Any = parallelize(copy.deepcopy(plain), MeshSpec(**axes).build(device_type="cpu"))
    errors = []
    for way in ("batched_mm", "eager"):
        losses = []
        for each in (plain, model):
            each.set_experts_implementation(way)
            losses.append(_loss(each))
            losses[-1].backward()
        errors.append(float((losses[0] - losses[1]).abs()))
        for name, parameter in plain.named_parameters():
            errors.append(float((_whole(model.get_parameter(name).grad) - parameter.grad).abs().max()))
    return errors


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2, "ep": 2}], ids=str)
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.20"), reason="ways of experts of newer releases")
def test_experts_are_computed_another_way_after_parallelize(two_ranks: RankPool, axes: dict[str, int]) -> None:
    for errors in two_ranks.run(_of_experts, axes):
        assert max(errors) < 1e-6
