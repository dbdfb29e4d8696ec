"""A call between two others of a training step changes nothing of what they compute."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp_runtime
import rl_logprobs
from fsdp_runtime import FSDP2, MeshSpec, ModelError, parallelize
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.pairwise import pairwise_first
from harness.ranks import RankPool

Call = Callable[[Any, Tensor], Any]


def _logprobs(model: Any, tokens: Tensor) -> Tensor:
    return rl_logprobs.token_logprobs(model(tokens, use_cache=False).logits, tokens, shift=True)


def _no_grad(model: Any, tokens: Tensor, call: Call = _logprobs) -> None:
    with torch.no_grad():
        call(model, tokens)


def _inference_mode(model: Any, tokens: Tensor) -> None:
    with torch.inference_mode():
        _logprobs(model, tokens)


def _with_lm_head(model: Any, tokens: Tensor) -> None:
    fsdp_runtime.forward_with_lm_head(model, lambda hidden, head: hidden.sum(), tokens, use_cache=False)


def _unsharded(model: Any, tokens: Tensor) -> None:
    with fsdp_runtime.unsharded(model), torch.no_grad():
        _logprobs(model, tokens)
        model.model(tokens, use_cache=False)


def _offload(model: Any, tokens: Tensor) -> None:
    _logprobs(model, tokens)
    fsdp_runtime.offload(model, device="cpu")
    fsdp_runtime.onload(model)


def _routes(model: Any, tokens: Tensor) -> None:
    with fsdp_runtime.record_routes(model):
        _logprobs(model, tokens)


def _weights_out(model: Any, tokens: Tensor) -> None:
    _logprobs(model, tokens)
    for _ in fsdp_runtime.stream_weights(model):
        pass
    with tempfile.TemporaryDirectory() as directory:
        folder = [directory]
        torch.distributed.broadcast_object_list(folder)
        fsdp_runtime.save_weights(model, f"{folder[0]}/weights")
        fsdp_runtime.save_training_state(f"{folder[0]}/state", model, torch.optim.SGD(model.parameters()), step=0)
        torch.distributed.barrier()


def _raises(model: Any, tokens: Tensor) -> None:
    def fail(*_: Any) -> None:
        raise ValueError

    hook = model.model.norm.register_forward_pre_hook(fail)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), suppress(ValueError):
            model(tokens, use_cache=False)
    hook.remove()


def _part(model: Any, tokens: Tensor) -> None:
    """Only the last block, which FSDP2 leaves gathered."""
    hidden = torch.ones(*tokens.shape, 64, dtype=torch.float64)
    position = model.model.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])
    model.model.layers[-1](hidden, position_embeddings=position)


def _read(model: Any, tokens: Tensor) -> None:
    _logprobs(model, tokens)
    assert all(isinstance(value, DTensor) for value in (*model.parameters(), *model.state_dict().values()))
    assert all(isinstance(value, DTensor) for value in model.lm_head.parameters())


BETWEEN: dict[str, Call] = {
    "forward without gradients": _no_grad,
    "inference mode": _inference_mode,
    "forward whose backward never comes": _logprobs,
    "generate": lambda m, t: m.generate(t, max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(t)),
    "forward_with_lm_head": _with_lm_head,
    "forward_with_lm_head without gradients": partial(_no_grad, call=_with_lm_head),
    "unsharded": _unsharded,
    "offload": _offload,
    "stream and save": _weights_out,
    "forward that raises": _raises,
    "last block": _part,
    "parameters read": _read,
    "routes": _routes,
}


def _train(model: Any, call: Callable[[], Any], *, micro_batches: int = 1) -> dict[str, Tensor]:
    """Two steps, with calls between all others of the first: losses, norms and the weights afterwards."""
    rows = tiny_inputs(model, batch=2 * micro_batches, length=9)["input_ids"].chunk(micro_batches)
    found: dict[str, Tensor] = {}
    call()
    held = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, between in enumerate((call, lambda: None)):
        for index, tokens in enumerate(rows):
            with fsdp_runtime.no_sync(model) if index < len(rows) - 1 else torch.enable_grad():
                loss = -_logprobs(model, tokens).mean()
                between()
                loss.backward()
                between()
            found[f"loss {step} {index}"] = loss.detach()
        found[f"norm {step}"] = rl_logprobs.clip_grad_norm_(model.parameters(), 0.5)
        parts = [*model.lm_head.parameters(), *model.model.layers[-1].parameters()]
        found[f"norm of parts {step}"] = rl_logprobs.clip_grad_norm_(parts, 1e9)
        between()
        optimizer.step()
        between()
        model.zero_grad()
        with torch.no_grad():
            for parameter in held:
                parameter.mul_(0.99)
    found["last"] = -_logprobs(model, rows[0]).mean().detach()
    for name, value in fsdp_runtime.stream_weights(model):
        found[name] = value.clone()
    return found


def _differences(
    axes: dict[str, int],
    options: dict[str, Any],
    calls: list[str],
    micro_batches: int = 1,
    architecture: str = "Qwen3ForCausalLM",
) -> list[str]:
    plain = tiny_model(architecture)
    start = copy.deepcopy(plain)
    wanted = _train(plain, lambda: None, micro_batches=micro_batches)
    other = tiny_inputs(plain, batch=1, length=6)["input_ids"]
    mesh = MeshSpec(**axes).build(device_type="cpu")
    wrong = []
    for name in calls:
        model = parallelize(copy.deepcopy(start), mesh, **options)
        found = _train(model, partial(BETWEEN[name], model, other), micro_batches=micro_batches)
        wrong += [
            f"{name}: {key}"
            for key, value in wanted.items()
            if not torch.allclose(found[key].double(), value.double(), atol=1e-6, rtol=1e-5)
        ]
    return wrong


def test_calls_between_those_of_a_step_change_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_differences, {"dp_shard": 2}, {}, [name for name in BETWEEN if name != "routes"]) == [[], []]


SOME = ["forward without gradients", "forward whose backward never comes"]
KEEP, OFFLOAD = FSDP2(reshard_after_forward=False), FSDP2(offload_policy=CPUOffloadPolicy())


@pytest.mark.parametrize(
    ("axes", "options", "micro_batches"),
    [
        ({"dp_shard": 2}, {"fsdp": KEEP}, 1),
        ({"dp_shard": 2}, {"fsdp": OFFLOAD}, 1),
        ({"dp_shard": 2}, {"activation_checkpointing": "block"}, 2),
    ],
    ids=["kept", "offloaded", "checkpointing"],
)
def test_evaluations_change_nothing(
    two_ranks: RankPool, axes: dict[str, int], options: dict[str, Any], micro_batches: int
) -> None:
    assert two_ranks.run(_differences, axes, options, SOME, micro_batches) == [[], []]


@pytest.mark.parametrize(
    ("axes", "calls", "micro_batches"),
    [
        ({"dp_shard": 2, "tp": 2}, SOME[:1], 1),
        ({"dp_replicate": 2, "dp_shard": 2}, SOME[:1], 2),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, ["routes"], 1),
    ],
    ids=["tp", "replicas", "experts"],
)
def test_evaluations_change_nothing_on_several_axes(
    four_ranks: RankPool, axes: dict[str, int], calls: list[str], micro_batches: int
) -> None:
    architecture = "Qwen3MoeForCausalLM" if "routes" in calls else "Qwen3ForCausalLM"
    assert four_ranks.run(_differences, axes, {}, calls, micro_batches, architecture) == [[]] * 4


def _another_model_runs_between() -> list[str]:
    plain, policy, other = (tiny_model("Qwen3ForCausalLM", seed=seed) for seed in (0, 0, 1))
    wanted = _train(plain, lambda: None)
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    for model in (policy, other):
        parallelize(model, mesh)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    tokens = tiny_inputs(other, batch=1, length=6)["input_ids"]

    def between() -> None:
        _logprobs(other, tokens).mean().backward()
        _logprobs(other, tokens)
        optimizer.step()

    found = _train(policy, between)
    return [name for name, value in wanted.items() if not torch.allclose(found[name], value, atol=1e-6, rtol=1e-5)]


def test_two_models_are_trained_side_by_side(two_ranks: RankPool) -> None:
    assert two_ranks.run(_another_model_runs_between) == [[], []]


def _model(**options: Any) -> Any:
    model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=4)
    return parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"), **options)


def _collectives() -> dict[str, dict[str, int]]:
    model, found = _model(), {}
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]

    def step(read: bool) -> None:
        loss = _logprobs(model, tokens).mean()
        if read and torch.distributed.get_rank() == 0:  # one rank alone may read
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        loss.backward()

    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: step(read=False),
        "evaluation": lambda: _no_grad(model, tokens),
        "step after it": lambda: step(read=True),
        "forward alone": lambda: _logprobs(model, tokens),
        "forward again": lambda: _logprobs(model, tokens),
    }
    for name, call in calls.items():
        with RecordCollectives() as communication:
            call()
        found[name] = dict(communication.counts())
        held = [part for module in model.modules() for part in vars(module)["_parameters"].values()]
        assert all(isinstance(parameter, DTensor) for parameter in held if parameter is not None), name
    return found


def test_evaluations_free_what_they_gathered_and_steps_communicate_as_before(two_ranks: RankPool) -> None:
    # Four blocks and the root; backward gathers again what its forward freed.
    step = {"all_gather": 5 + 3, "reduce_scatter": 5}
    assert two_ranks.run(_collectives)[0] == {
        "step": step,
        "evaluation": {"all_gather": 5},
        "step after it": step,
        "forward alone": {"all_gather": 5},
        "forward again": {"all_gather": 5},  # what is written to parameter.data in between changes no version
    }


def _written_between(write: str) -> None:
    model = _model()
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    loss = _logprobs(model, tokens).mean()
    for weight in (model.lm_head.weight, model.model.norm.weight):
        with torch.no_grad():
            weight.data.mul_(2) if write == "data" else weight.mul_(2)
    loss.backward() if write == "backward" else None
    again = _logprobs(model, tokens).mean()
    assert not torch.equal(again, loss)
    after = model.state_dict()
    for name in ("lm_head.weight", "model.norm.weight"):
        assert torch.equal(after[name].full_tensor(), 2 * before[name])


@pytest.mark.parametrize("write", ["data", "no_grad", "backward"])
def test_what_is_written_to_a_module_between_forward_and_backward_is_kept(two_ranks: RankPool, write: str) -> None:
    two_ranks.run(_written_between, write)


def _built_from_attributes() -> str:
    model = _model()
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    loss = _logprobs(model, tokens).mean()
    kept = torch.optim.SGD([model.lm_head.weight], lr=0.1)
    loss.backward()
    before = model.lm_head.weight.full_tensor()
    kept.step()
    assert not torch.equal(before, model.lm_head.weight.full_tensor())
    with fsdp_runtime.unsharded(model):
        optimizer = torch.optim.SGD([model.lm_head.weight], lr=0.1)
    try:
        optimizer.step()
    except ModelError as error:
        return str(error)
    return "no error"


def test_an_optimizer_of_gathered_copies_is_refused_at_its_step(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_built_from_attributes):
        assert message.startswith("this SGD holds 1 gathered copies of FSDP2's parameters")
        assert "build the optimizer from model.parameters()" in message


def _after_a_backward_that_raised(reduced: bool) -> list[str]:
    """Gradients that differ from one process after a failed backward was cleared."""
    plain, model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=4), _model()
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(_gradient: Tensor) -> None:
        raise ValueError

    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with suppress(ValueError), nullcontext() if reduced else fsdp_runtime.no_sync(model):
        _logprobs(model, tokens).mean().backward()
    hook.remove()
    optimizer.zero_grad()
    for each in (plain, model):
        _logprobs(each, tokens).mean().backward()
    return [
        name
        for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.allclose(found.grad.full_tensor(), wanted.grad, atol=1e-9)
    ]


@pytest.mark.parametrize("reduced", [True, False])
def test_a_backward_that_raised_leaves_nothing_behind(two_ranks: RankPool, reduced: bool) -> None:
    assert two_ranks.run(_after_a_backward_that_raised, reduced) == [[], []]


def _by_hand(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


#: Calls that clear gradients.
CLEAR: dict[str, Callable[[Any], None]] = {
    "model": lambda model: model.zero_grad(),
    "model, to zeros": lambda model: model.zero_grad(set_to_none=False),
    "optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "optimizer, to zeros": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    "hand": _by_hand,
}
PLACES = ("inside", "outside", "between forward and backward")


def _cleared_between_micro_batches(by: str, dtype: torch.dtype | None, kept: bool) -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=dtype)
    plain = tiny_model("Qwen3ForCausalLM")
    model = parallelize(
        copy.deepcopy(plain), MeshSpec(dp_shard=2).build(device_type="cpu"), fsdp=FSDP2(mp_policy=policy)
    )
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    wrong = []
    for place in PLACES:
        for each in (plain, model):
            each.zero_grad()
            with fsdp_runtime.no_sync(each, reshard_after_backward=not kept):
                _logprobs(each, tokens).mean().backward()
                if place == "inside":
                    CLEAR[by](each)
            if place == "outside":
                CLEAR[by](each)
            loss = _logprobs(each, tokens).square().mean()
            if place == "between forward and backward":
                CLEAR[by](each)
            loss.backward()
        wrong += [f"{place}: {name}" for name in _other_gradients(plain, model)]
    return wrong


def _other_gradients(plain: Any, model: Any) -> list[str]:
    return [
        name
        for (name, shard), parameter in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.allclose(shard.grad.full_tensor().double(), parameter.grad, atol=1e-6)
    ]


@pytest.mark.parametrize(
    ("by", "dtype", "kept"), pairwise_first([*CLEAR], [None, torch.float32], [False, True]), ids=str
)
def test_cleared_gradients_that_are_not_reduced_are_dropped(
    two_ranks: RankPool, by: str, dtype: torch.dtype | None, kept: bool
) -> None:
    assert two_ranks.run(_cleared_between_micro_batches, by, dtype, kept) == [[], []]


def _cleared_in_part() -> str:
    model = parallelize(tiny_model("Qwen3ForCausalLM"), MeshSpec(dp_replicate=2).build(device_type="cpu"))
    optimizer = torch.optim.SGD([model.get_parameter("lm_head.weight")])
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    with fsdp_runtime.no_sync(model, reduce_scatter=True):
        _logprobs(model, tokens).mean().backward()
    optimizer.zero_grad()
    try:
        _logprobs(model, tokens).mean().backward()
    except fsdp_runtime.ModelError as error:
        return str(error)
    return "no error"


def test_zero_grad_of_some_gradients_before_an_all_reduce_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_cleared_in_part):
        assert message.startswith("the gradients of 1 parameters were cleared, and no_sync(reduce_scatter=True)")


def _step_before_the_reduction(axis: str, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64)
    mesh = MeshSpec(**{axis: 2}).build(device_type="cpu")
    model = parallelize(tiny_model("Qwen3ForCausalLM"), mesh, fsdp=FSDP2(mp_policy=policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    with fsdp_runtime.no_sync(model, reduce_scatter=axis == "dp_replicate"):
        _logprobs(model, tokens).mean().backward()
    with pytest.raises(ModelError, match="gradients that are not reduced"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="single memory location"):  # torch's own, of a placeholder
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(rl_logprobs.errors.PlacementError, match="not reduced yet"):
        rl_logprobs.clip_grad_norm_(model.parameters(), 1.0)
    _logprobs(model, tokens).mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("axis", "dtype"), [("dp_shard", None), ("dp_shard", torch.bfloat16), ("dp_replicate", None)])
def test_steps_and_norms_before_gradients_are_reduced_are_refused(
    two_ranks: RankPool, axis: str, dtype: torch.dtype | None
) -> None:
    two_ranks.run(_step_before_the_reduction, axis, dtype)


def _reference_without_adapters(adapters_in: list[str]) -> list[str]:
    """Gradients that differ from one process where a reference, computed with gradients, comes before the backward."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=adapters_in, init_lora_weights=False)
    plain: Any = peft.get_peft_model(tiny_model("Qwen3ForCausalLM"), config).double()
    model: Any = parallelize(copy.deepcopy(plain), MeshSpec(dp_shard=2).build(device_type="cpu"))
    tokens = tiny_inputs(plain, batch=2, length=5)["input_ids"]
    for each in (plain, model):
        loss = _logprobs(each, tokens)
        with each.disable_adapter():
            reference = _logprobs(each, tokens).detach()
        (loss - reference).square().mean().backward()
    return [
        name
        for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True)
        if wanted.grad is not None
        and (found.grad is None or not torch.allclose(found.grad.full_tensor(), wanted.grad, atol=1e-9))
    ]


@pytest.mark.parametrize("adapters_in", [["q_proj", "down_proj"], ["lm_head"]], ids=str)
def test_a_reference_without_adapters_leaves_gradients_as_they_are(two_ranks: RankPool, adapters_in: list[str]) -> None:
    assert two_ranks.run(_reference_without_adapters, adapters_in) == [[], []]


def _functional(model: Any, tokens: Tensor) -> None:
    scaled = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, scaled, (tokens,), {"use_cache": False})


def _assigned(model: Any, tokens: Tensor) -> None:
    kept = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(2 * kept.detach())
    try:
        _logprobs(model, tokens)
    finally:
        model.lm_head.weight = kept


def _swapped(model: Any, tokens: Tensor) -> None:
    other = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    torch.utils.swap_tensors(model.lm_head.weight, other)
    try:
        _logprobs(model, tokens)
    finally:
        torch.utils.swap_tensors(model.lm_head.weight, other)


#: Calls that FSDP2 would compute with the earlier tensors, and the replaced parameter.
REPLACED: dict[str, tuple[Call, str]] = {
    "functional_call": (_functional, ""),
    "another parameter": (_assigned, "lm_head.weight"),
    "swapped parameter": (_swapped, "lm_head.weight"),
}


def _with_replaced_parameters() -> list[str]:
    """Differences from one process after refused calls."""
    plain: Any = tiny_model("Qwen3ForCausalLM")
    model = parallelize(copy.deepcopy(plain), MeshSpec(dp_shard=2).build(device_type="cpu"))
    tokens = tiny_inputs(plain, batch=2, length=5)["input_ids"]
    _no_grad(model, tokens)
    for call, path in REPLACED.values():
        with pytest.raises(ModelError, match=rf"{path}.* was replaced after parallelize.* parameter\.copy_\(values\)"):
            call(model, tokens)
        for each in (plain, model):
            each.zero_grad()
            _logprobs(each, tokens).mean().backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return [name for name, p in plain.named_parameters() if not torch.allclose(gradients[name], p.grad, atol=1e-9)]


def test_replaced_parameters_are_refused_and_change_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_with_replaced_parameters) == [[], []]


def _converted_part() -> None:
    model = _model()
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    _no_grad(model, tokens)
    model.model.norm.float()
    with pytest.raises(ModelError, match=r"model.norm.weight was replaced after parallelize"):
        _logprobs(model, tokens)


def test_a_converted_part_is_refused(two_ranks: RankPool) -> None:
    two_ranks.run(_converted_part)


def _step_inside_unsharded() -> None:
    model = _model()
    tokens = tiny_inputs(model, batch=2, length=5)["input_ids"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with fsdp_runtime.unsharded(model), torch.no_grad():
        before = _logprobs(model, tokens)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = 0.01 * torch.ones_like(parameter)
        optimizer.step()
        inside = _logprobs(model, tokens)
    with torch.no_grad():
        assert torch.equal(inside, _logprobs(model, tokens))
    assert not torch.equal(inside, before)


def test_a_step_inside_unsharded_is_seen_by_the_next_forward(two_ranks: RankPool) -> None:
    two_ranks.run(_step_inside_unsharded)
