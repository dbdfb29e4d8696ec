"""``unsharded`` within a bound: what fits is held, the rest gathered per call, everything back afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime import FSDP2, MeshSpec, parallelize, unsharded
from fsdp_runtime._torch_compat import gathered_bytes
from fsdp_runtime.steps import Compile
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool, RanksFailed


def _model(**options: Any) -> nn.Module:
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=4, dtype=torch.float32)
    return parallelize(model, mesh, **options)


def _gathers(model: nn.Module) -> int:
    with RecordCollectives() as communication, torch.no_grad():
        model(**tiny_inputs(model, batch=1, length=5), use_cache=False)
    return communication.counts()["all_gather"]


def _held_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that are gathered now."""
    return sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))


def _within(blocks: int) -> dict[str, Any]:
    """Room for the root and ``blocks`` blocks, one of which is gathered per call unless all four fit."""
    model = _model()
    root, block = gathered_bytes(model), gathered_bytes(model.model.layers[0])
    bound = root + blocks * block
    peaks: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: peaks.append(_held_bytes(model)))
    found: dict[str, Any] = {"before": _held_bytes(model)}
    with unsharded(model, max_bytes=bound):
        found["held"] = (_held_bytes(model) - root) / block
        found["gathers"] = [_gathers(model), _gathers(model)]
        with unsharded(model):  # the outer bound stays in force
            found["nested"] = _gathers(model)
    found["bounded"] = max(peaks) <= bound
    found["after"] = _held_bytes(model)
    return found


@pytest.mark.parametrize(("blocks", "held"), [(1, 0), (3, 2), pytest.param(4, 4, marks=pytest.mark.slow), (9, 4)])
def test_as_many_blocks_as_fit_are_held_and_no_more_at_once(two_ranks: RankPool, blocks: int, held: int) -> None:
    for found in two_ranks.run(_within, blocks):
        rest = 4 - held
        assert found == {
            "before": 0,
            "held": held,
            "gathers": [rest, rest],
            "nested": rest,
            "bounded": True,
            "after": 0,
        }


def _too_little() -> None:
    with unsharded(_model(), max_bytes=1000):
        pass


def test_a_bound_that_no_forward_could_keep_is_refused_with_what_it_takes(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"OptionError: max_bytes=1,000 is too small: the root and .* take [\d,]+ by"):
        two_ranks.run(_too_little)


def _dtypes() -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype], float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _model(fsdp=FSDP2(mp_policy=policy))
    sharded = {p.dtype for p in model.parameters()}
    with unsharded(model), torch.inference_mode():
        inside = {p.dtype for p in model.parameters()}
        share = gathered_bytes(model) / sum(p.nbytes for p in model.parameters(recurse=True))
        model(**tiny_inputs(model, batch=1, length=5), use_cache=False)
    return sharded, inside, {p.dtype for p in model.parameters()}, share


def test_gathered_parameters_are_in_the_dtype_to_compute_in(two_ranks: RankPool) -> None:
    sharded, inside, after, share = two_ranks.run(_dtypes)[0]
    assert (sharded, inside, after) == ({torch.float32}, {torch.bfloat16}, {torch.float32})
    assert 0 < share < 1


def _some_blocks() -> list[int]:
    model = _model()
    with unsharded(model.model.layers[1]), unsharded(model.model.layers[2]):
        inside = _gathers(model)
    return [inside, _gathers(model)]


def test_single_blocks_can_be_held(two_ranks: RankPool) -> None:
    assert two_ranks.run(_some_blocks)[0] == [3, 5]


def _with_gradients(compile_options: Any) -> list[str]:
    """The gradients that differ from one process: backward inside or after, below the root, twice."""
    plain = tiny_model("Qwen3ForCausalLM", num_hidden_layers=1 if compile_options else 2)
    batches = [tiny_inputs(plain, batch=1, length=7, seed=seed) for seed in (1, 2)]
    wrong = []
    # What the compiler sees does not depend on when backward runs.
    for case in ("twice",) if compile_options else ("inside", "after", "below the root", "twice"):
        reference, model = copy.deepcopy(plain), copy.deepcopy(plain)
        parallelize(
            model,
            MeshSpec(dp_shard=2).build(device_type="cpu"),
            compile=Compile(compile_options) if compile_options else False,
        )
        used = batches if case == "twice" else batches[:1]
        for inputs in used:
            _loss(reference, inputs, below=case == "below the root").backward()
        with unsharded(model):
            losses = [_loss(model, inputs, below=case == "below the root") for inputs in used]
            if case != "after":
                sum(losses).backward()
        if case == "after":
            losses[0].backward()
        for (name, expected), actual in zip(reference.named_parameters(), model.parameters(), strict=True):
            if expected.grad is None or actual.grad is None:
                wrong += [f"{case}: {name}"] if expected.grad is not actual.grad else []
            elif (actual.grad.full_tensor() - expected.grad).abs().max() > 1e-12 * max(1, expected.grad.abs().max()):
                wrong.append(f"{case}: {name}")
    return wrong


def _loss(model: nn.Module, inputs: dict[str, torch.Tensor], *, below: bool) -> torch.Tensor:
    if below:
        return model.model(**inputs, use_cache=False).last_hidden_state.square().mean()
    return model(**inputs, use_cache=False).logits.square().mean()


@pytest.mark.parametrize(
    "compile_options",
    [False, pytest.param({"backend": "aot_eager"}, marks=pytest.mark.slow)],
    ids=["eager", "compiled"],
)
def test_gradients_of_gathered_parameters_are_those_of_one_process(two_ranks: RankPool, compile_options: Any) -> None:
    assert two_ranks.run(_with_gradients, compile_options) == [[], []]


def _collectives_of_images() -> list[int]:
    model = tiny_model("Gemma3ForConditionalGeneration", dtype=torch.float32)
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"))
    inputs = tiny_inputs(model, batch=1, length=9)
    found = []
    with torch.no_grad(), unsharded(model), RecordCollectives() as communication:
        model(**inputs)
        found.append(sum(communication.counts().values()))
    with torch.no_grad(), RecordCollectives() as communication:
        model(**inputs)
        found.append(sum(communication.counts().values()))
    return found


def test_ranks_that_hold_all_of_a_model_with_images_wait_for_no_other_rank(two_ranks: RankPool) -> None:
    for held, sharded in two_ranks.run(_collectives_of_images):  # ranks generate completions of several lengths
        assert held == 0 < sharded
