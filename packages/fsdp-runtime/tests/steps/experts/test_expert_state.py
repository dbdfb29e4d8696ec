"""Experts over ``ep`` outside of a step: loaded, streamed, saved, resumed, clipped, compared, gathered, offloaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import rl_logprobs
from fsdp_runtime import (
    FSDP2,
    assert_replicas_equal,
    describe_parallelism,
    load_training_state,
    load_weights,
    no_sync,
    offload,
    onload,
    parallelize,
    save_training_state,
    save_weights,
    stream_weights,
    submesh,
    unsharded,
)
from fsdp_runtime.errors import ReplicaError
from fsdp_runtime.steps import Compile
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for, own_part
from harness.ranks import RankPool

MOE = "Qwen3MoeForCausalLM"
TWO, ALL = {"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}
REPLICAS, SMALLER = {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"tp": 4, "ep": 2}
#: All of them are tried by slow tests, and two that differ in every axis by default.
MESHES = [
    pytest.param((ALL, REPLICAS), id="pair"),
    pytest.param((TWO, ALL, REPLICAS, SMALLER), id="all", marks=pytest.mark.slow),
]


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model(MOE, dtype=dtype, num_hidden_layers=1)


def _parallel(axes: dict[str, int], **options: Any) -> nn.Module:
    return parallelize(_model(), mesh_for(axes), **options)


Meshes = tuple[dict[str, int], ...]


def _loss(model: nn.Module, axes: dict[str, int]) -> Tensor:
    """A loss on this rank's own rows."""
    inputs = tiny_inputs(model, batch=4, length=5)
    data = submesh(mesh_for(axes), "dp")
    share = 4 // data.size()
    rows = inputs["input_ids"][share * data.get_local_rank() :][:share]
    logits = model(input_ids=rows, use_cache=False).logits
    full = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return full.float().square().mean()


def _weights_moved(path: Path, meshes: Meshes) -> list[str]:
    """What differs between a checkpoint and a model that loaded, streamed and saved it, for every mesh."""
    wrong = []
    expected = load_file(path / "model.safetensors")
    reference = dict(_model().named_parameters())
    whole = sum(value.nbytes for value in expected.values())
    for number, axes in enumerate(meshes):
        with torch.device("meta"):
            empty = _model()
        model = parallelize(empty, mesh_for(axes))
        report = load_weights(model, path)
        wrong += [f"{axes}: reads {report.bytes_read} of {whole} bytes"] if report.bytes_read > 0.6 * whole else []
        for name, parameter in model.named_parameters():
            local, part = parameter.to_local(), own_part(reference[name], parameter)
            wrong += [] if torch.equal(local, part) else [f"{axes}: {name} is loaded wrongly"]
        for streamed in (dict(stream_weights(model)), _gathered_stream(model)):
            same = streamed.keys() == expected.keys() and all(
                torch.equal(expected[name], value) for name, value in streamed.items()
            )
            wrong += [] if same else [f"{axes}: the stream differs"]
        save_weights(model, path / f"saved{number}")
        saved = load_file(path / f"saved{number}" / "model.safetensors")
        wrong += [
            f"{axes}: {name} is saved wrongly" for name in expected if not torch.equal(expected[name], saved[name])
        ]
    return wrong


def _gathered_stream(model: nn.Module) -> dict[str, Tensor]:
    with unsharded(model):
        return {name: value.clone() for name, value in stream_weights(model)}


@pytest.mark.parametrize("meshes", MESHES)
def test_weights_are_loaded_streamed_and_saved_by_the_ranks_that_hold_them(
    four_ranks: RankPool, tmp_path: Path, meshes: Meshes
) -> None:
    _model().save_pretrained(tmp_path)
    assert four_ranks.run(_weights_moved, tmp_path, meshes) == [[]] * 4


def _norm_by_copies(model: nn.Module, *, experts_have_copies: bool) -> float:
    """A norm from the squares of all ranks, each divided by its copies; or those of experts by none."""
    total = torch.zeros((), dtype=torch.float64)
    for name, each in model.named_parameters():
        mesh, placements = each.device_mesh, each.placements
        copies = dist.get_world_size() // mesh.size()
        for axis, placement in enumerate(placements):
            copies *= mesh.size(axis) if placement.is_replicate() else 1
        counted = copies if experts_have_copies or ".experts." not in name else 1
        total += each.grad.to_local().double().square().sum() / counted
    dist.all_reduce(total)
    return total.sqrt().item()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """The experts and all other parameters, which are on other meshes: a fused optimizer takes tensors of one.

    Fused, since DTensor derives the layouts of each operator of a step, once for each shape and placement.
    """
    parameters = list(model.named_parameters())
    return [
        {"params": [each for name, each in parameters if (".experts." in name) == experts]} for experts in (True, False)
    ]


def _clipped(axes: dict[str, int]) -> tuple[float, list[float], int, list[str]]:
    """The norm of one process, those of the ranks, the collectives of a clip, and ranks that differ after it.

    Those of the ranks: the clip's, one by hand, and one that counts experts once per replica.
    """
    reference = _model(torch.float64)
    inputs = tiny_inputs(reference, batch=4, length=5)
    reference(**inputs, use_cache=False).logits.float().square().mean().backward()
    expected = torch.nn.utils.get_total_norm([each.grad for each in reference.parameters()])
    model = parallelize(_model(torch.float64), mesh_for(axes))
    _loss(model, axes).backward()
    rl_logprobs.grad_norm(model.parameters())  # makes the groups
    by_hand = [_norm_by_copies(model, experts_have_copies=correct) for correct in (True, False)]
    with RecordCollectives() as record:
        norm = rl_logprobs.clip_grad_norm_(model.parameters(), 0.1)
    optimizer = torch.optim.AdamW(_groups(model), lr=0.1, fused=True)
    optimizer.step()
    problems = []
    try:
        assert_replicas_equal(model, mesh_for(axes))
    except ReplicaError as error:
        problems.append(str(error))
    return expected.item(), [norm.item(), *by_hand], len(record.calls), problems


def _all_clipped(meshes: Meshes) -> list[tuple[float, list[float], int, list[str]]]:
    return [_clipped(axes) for axes in meshes]


@pytest.mark.parametrize("meshes", MESHES)
def test_the_norm_counts_every_expert_once_in_one_collective_and_replicas_stay_equal(
    four_ranks: RankPool, meshes: Meshes
) -> None:
    for found in four_ranks.run(_all_clipped, meshes):
        for expected, (norm, by_hand, _), collectives, problems in found:
            assert norm == pytest.approx(expected, rel=1e-6)
            assert by_hand == pytest.approx(expected, rel=1e-6)
            assert collectives == 1
            assert problems == []
        expected, (_, _, once_per_replica), *_ = found[meshes.index(REPLICAS)]
        assert once_per_replica > (1 + 1e-4) * expected  # a hundred times the bound: the comparison finds it


def _resumed(directory: Path, meshes: Meshes) -> list[str]:
    """Train, save, resume on other meshes, and compare the next step with that of the first model."""
    wrong = []
    results = {}
    for number, axes in enumerate(meshes):
        model = _parallel(axes)
        optimizer = torch.optim.AdamW(_groups(model), lr=1e-2, fused=True)
        if number:
            load_training_state(directory, model, optimizer)
        else:
            _step(model, optimizer, axes)
            save_training_state(directory, model, optimizer, step=1)
        _step(model, optimizer, axes)
        results[number] = {name: value.clone() for name, value in stream_weights(model)}
        wrong += [
            f"{axes}: {name} differs after the step"
            for name, value in results[number].items()
            if not torch.allclose(value, results[0][name], atol=2e-5)
        ]
    return wrong


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, axes: dict[str, int]) -> None:
    _loss(model, axes).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("meshes", MESHES)
def test_a_training_state_is_resumed_on_another_size_of_ep(
    four_ranks: RankPool, tmp_path: Path, meshes: Meshes
) -> None:
    assert four_ranks.run(_resumed, tmp_path / "state", meshes) == [[]] * 4


def _same_gradients(axes: dict[str, int]) -> dict[str, float]:
    """How far gradients are off the default's under accumulation, gathering, offload and lower precision."""
    reference = _parallel(axes)
    _loss(reference, axes).backward()
    expected = {name: each.grad.to_local().clone() for name, each in reference.named_parameters()}
    found = {}

    accumulated = _parallel(axes)
    with no_sync(accumulated):
        (_loss(accumulated, axes) * 0.25).backward()
    (_loss(accumulated, axes) * 0.75).backward()
    found["accumulated"] = _off(accumulated, expected)

    held = _parallel(axes)
    with unsharded(held):
        _loss(held, axes).backward()
    found["unsharded"] = _off(held, expected)

    moved = _parallel(axes)
    offload(moved)
    onload(moved)
    _loss(moved, axes).backward()
    found["offloaded"] = _off(moved, expected)

    on_cpu = _parallel(axes, fsdp=FSDP2(offload_policy=CPUOffloadPolicy()))
    _loss(on_cpu, axes).backward()
    found["CPU offload policy"] = _off(on_cpu, expected)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed = _parallel(axes, fsdp=FSDP2(mp_policy=policy, master_dtype=torch.float32))
    _loss(mixed, axes).backward()
    found["bfloat16"] = _off(mixed, expected) / 1e4
    return found


def _off(model: nn.Module, expected: dict[str, Tensor]) -> float:
    largest = max(value.abs().max().item() for value in expected.values() if value.numel())
    return max(
        (each.grad.to_local() - expected[name]).abs().max().item() / largest
        for name, each in model.named_parameters()
        if expected[name].numel()
    )


def _all_same_gradients(meshes: Meshes) -> list[dict[str, float]]:
    return [_same_gradients(axes) for axes in meshes]


def _compiled(backend: str) -> float:
    axes = {"dp_shard": 2, "ep": 2}
    eager, compiled = _parallel(axes), _parallel(axes, compile=Compile({"backend": backend}))
    _loss(eager, axes).backward()
    _loss(compiled, axes).backward()
    return _off(compiled, {name: each.grad.to_local() for name, each in eager.named_parameters()})


# Where graphs end does not depend on the backend, and most of the time goes to the one that is slow.
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_the_compiler_leaves_the_exchange_to_python(two_ranks: RankPool, backend: str) -> None:
    assert max(two_ranks.run(_compiled, backend)) < 1e-5


@pytest.mark.parametrize("meshes", [(ALL,), pytest.param((TWO,), marks=pytest.mark.slow)], ids=["ep=4", "ep=2"])
def test_expert_gradients_equal_accumulated_gathered_offloaded_and_rounded(
    four_ranks: RankPool, meshes: Meshes
) -> None:
    for rank in four_ranks.run(_all_same_gradients, meshes):
        for found in rank:
            assert {name: off for name, off in found.items() if not off < 1e-5} == {}


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
#: Meshes and options, and whether FSDP2 has the experts.
WRAPPED: dict[str, tuple[dict[str, int], FSDP2, bool]] = {
    "on one rank": (ALL, FSDP2(), False),
    "on one rank, in their own dtype": (ALL, FSDP2(mp_policy=MixedPrecisionPolicy(torch.float32)), False),
    "on one rank, cast": (ALL, FSDP2(mp_policy=POLICY, master_dtype=torch.float32), True),
    "on one rank, reduced in another dtype": (
        ALL,
        FSDP2(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)),
        True,
    ),
    "on one rank, offloaded": (ALL, FSDP2(offload_policy=CPUOffloadPolicy()), True),
    "on two ranks": (TWO, FSDP2(), True),
    "replicated": (REPLICAS, FSDP2(), True),
}


def _wrapped() -> dict[str, bool]:
    found = {}
    for name, (axes, options, _) in WRAPPED.items():
        paths = describe_parallelism(_parallel(axes, fsdp=options)).fsdp_modules
        found[name] = any(path.endswith(".experts") for path in paths)
    return found


def test_fsdp2_has_the_experts_that_are_shared_cast_or_offloaded(four_ranks: RankPool) -> None:
    assert four_ranks.run(_wrapped) == [{name: wrapped for name, (*_, wrapped) in WRAPPED.items()}] * 4


def _divided_gradients() -> list[float]:
    """How far gradients of experts are off after their parameters were replaced, and of a copy of the experts."""
    model = _parallel(ALL)
    _loss(model, ALL).backward()
    expected = {name: each.grad.to_local().clone() for name, each in model.named_parameters()}
    replaced: Any = _parallel(ALL)
    experts = replaced.model.layers[0].mlp.experts
    experts.load_state_dict(experts.state_dict(), assign=True)
    _loss(replaced, ALL).backward()
    off = _off(replaced, expected)
    own, copied = experts, copy.deepcopy(experts)
    tokens, index = torch.ones(3, own.gate_up_proj.shape[-1]), torch.tensor([[0, 5], [1, 7], [2, 3]])
    for each in (own, copied):
        each.zero_grad()
        each(tokens, index, torch.full((3, 2), 0.5)).sum().backward()
    pairs = zip(own.parameters(), copied.parameters(), strict=True)
    return [off, *((one.grad - other.grad).to_local().abs().max().item() for one, other in pairs)]


def test_gradients_of_replaced_and_copied_experts_are_divided_too(four_ranks: RankPool) -> None:
    for off, *copied in four_ranks.run(_divided_gradients):
        assert off < 1e-6
        assert copied == [0.0, 0.0]
