"""Muon on any mesh takes the steps of one process with the full matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from coverage.table import coverage_entries, entries, tiny_model
from fsdp_runtime import FSDP2, ModelError, OptionError, load_training_state, parallelize, save_training_state, submesh
from fsdp_runtime.optim import Muon
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs
from harness.parity import largest, mesh_for, own_part
from harness.ranks import RankPool

Axes = Mapping[str, int]
#: AdamW divides a gradient that is rounding alone by its magnitude; the large epsilon keeps such a step small.
SETTINGS: Mapping[str, Any] = {"lr": 1e-3, "adamw_eps": 1e-3, "ns_dtype": torch.float32}
TWO: tuple[Axes, ...] = ({"dp_shard": 2}, {"tp": 2})
HSDP, EP = {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4, "ep": 2}


class _Experts(nn.Module):
    """Experts of sizes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, 6))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("...i,eoi->...eo", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("...eo,eio->...i", torch.tanh(gate) * up, self.down_proj)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall, self.gate, self.experts = (
            nn.Linear(6, 3),
            nn.Linear(3, 6, bias=False),
            nn.Linear(6, 1),
            _Experts(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.tall(torch.tanh(self.wide(x))) * self.gate(x) + self.experts(x)


def _uneven() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 6), nn.Sequential(_Block(), _Block()), nn.Linear(6, 5))


def _model(name: str) -> nn.Module:
    return _uneven() if name == "uneven" else tiny_model(coverage_entries()[name], dtype=torch.float32)


def _backward(model: nn.Module, rows: slice = slice(None), scale: float = 1.0) -> None:
    if isinstance(model, nn.Sequential):
        logits = model(torch.arange(28).view(4, 7)[rows] % 8)
    else:
        inputs = {name: value[rows] for name, value in tiny_inputs(model, batch=4, length=7).items()}
        logits = model(**inputs, use_cache=False).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    weights = torch.randn(4, *logits.shape[1:], generator=torch.Generator().manual_seed(2))[rows]
    (logits * weights).sum().mul(scale / 100).backward()


def _train(model: nn.Module, optimizer: Any, steps: int, axes: Axes) -> None:
    ranks = submesh(mesh_for(axes), "dp") if axes else None
    share = 4 if ranks is None else 4 // ranks.size()
    first = 0 if ranks is None else share * ranks.get_local_rank()
    for _ in range(steps):
        _backward(model, slice(first, first + share), 4 / share)
        optimizer.step()
        optimizer.zero_grad()


@lru_cache(maxsize=2)
def _alone(name: str, steps: int = 5) -> Mapping[str, Tensor]:
    model = _model(name)
    _train(model, Muon(model, **SETTINGS), steps, {})
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _worst(expected: Mapping[str, Tensor], model: nn.Module) -> tuple[float, str]:
    errors = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part = own_part(expected[name], parameter) if isinstance(parameter, DTensor) else expected[name]
        errors[name] = largest(local.detach().view(part.shape) - part)
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def _on(name: str, axes: Axes, **options: Any) -> tuple[float, str]:
    model = parallelize(_model(name), mesh_for(axes))
    _train(model, Muon(model, **SETTINGS, **options), 5, axes)
    return _worst(_alone(name), model)


def _assert_equal(results: list[tuple[float, str]]) -> None:
    for error, worst in results:
        assert error <= 1e-6, worst


@pytest.mark.parametrize("axes", TWO)
@pytest.mark.parametrize("name", ["phi3", "deepseek_v3", "qwen3_moe", "olmo_hybrid"])
def test_muon_on_two_ranks_equals_one_process(two_ranks: RankPool, name: str, axes: Axes) -> None:
    _assert_equal(two_ranks.run(_on, name, axes))


@pytest.mark.parametrize("name", ["dbrx", "gpt_bigcode"])
def test_muon_takes_fused_rows_that_the_plan_of_tp_adds_or_leaves_out(two_ranks: RankPool, name: str) -> None:
    _assert_equal(two_ranks.run(_on, name, {"tp": 2}))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("phi3", {"tp": 4}),  # more ranks than key/value heads
        ("gpt_oss", {"dp_shard": 2, "tp": 2}),  # gate and up take turns, and matrices are [in, out]
        ("qwen3_moe", EP),
        ("qwen3_moe", HSDP),
        ("uneven", {"dp_shard": 4}),
    ],
)
def test_muon_on_four_ranks_equals_one_process(four_ranks: RankPool, name: str, axes: Axes) -> None:
    _assert_equal(four_ranks.run(_on, name, axes))


def _takes_part(name: str) -> bool:
    # In one process too, Doge's gradient of a batch differs from the sum over its halves.  The rest needs images.
    return name != "doge, mixture" and not entries()[name].class_name.endswith("ForConditionalGeneration")


@pytest.mark.slow
def test_muon_on_two_ranks_equals_one_process_in_every_architecture(two_ranks: RankPool) -> None:
    wrong = {}
    for name in filter(_takes_part, entries()):
        for axes in TWO if "multimodal" not in name else ():
            error, worst = max(two_ranks.run(_on, name, axes))
            if not error <= 2e-6:  # Gemma 4 multiplies its embeddings, and reaches 1.5e-6
                wrong[name, str(axes)] = error, worst
    assert wrong == {}


def test_muon_in_small_buckets_and_compiled_equals_one_process(two_ranks: RankPool) -> None:
    options = {"bucket_numel": 3000, "compile": {"backend": "eager"}}
    _assert_equal(two_ranks.run(_on, "qwen3_moe", {"dp_shard": 2}, **options))


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_in_one_process_gives_the_bits_of_torch(scale: Any) -> None:
    ours, torchs = (nn.Sequential(nn.Sequential(nn.Linear(40, 72), nn.Linear(72, 40))) for _ in range(2))
    torchs.load_state_dict(ours.state_dict())
    optimizers = (
        Muon(ours, lr=0.1, adjust_lr_fn=scale),
        torch.optim.Muon([p for p in torchs.parameters() if p.ndim == 2], lr=0.1, adjust_lr_fn=scale),
    )
    for step in range(5):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    pairs = zip(ours.parameters(), torchs.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs if one.ndim == 2)


def _on_a_slice() -> tuple[float, str]:
    """The other axis of the mesh has other values, as two jobs or two stages have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shard"))["shard"]
    models = _uneven(), fully_shard(_uneven(), mesh=mesh)
    for model in models:
        optimizer = Muon(model, **SETTINGS)
        for _ in range(2):
            model(torch.arange(14) * (1 + torch.distributed.get_rank() // 2) % 8).square().sum().div(100).backward()
            optimizer.step()
            optimizer.zero_grad()
    return _worst(dict(models[0].named_parameters()), models[1])


def test_muon_on_a_slice_of_a_mesh_keeps_the_other_axis_apart(four_ranks: RankPool) -> None:
    _assert_equal(four_ranks.run(_on_a_slice))


def _costs(axes: Axes, kind: str, bucket_numel: int) -> tuple[Counter[str], int, int, int]:
    model = parallelize(tiny_model(entries()["qwen3"], dtype=torch.float32), mesh_for(axes))
    optimizer: Any = Muon(model, bucket_numel=bucket_numel)
    if kind == "torch":
        groups = [group["params"] for group in optimizer.param_groups if group["use_muon"]]
        optimizer = torch.optim.Muon([parameter for group in groups for parameter in group])
    for _ in range(2):  # the first step plans
        _backward(model)
        with RecordCollectives() as traffic, FlopCounterMode(display=False) as flops:
            optimizer.step()
    calls = Counter(call.kind for call in traffic.calls)
    buckets = 0 if kind == "torch" else len(optimizer._plan().buckets)
    return calls, sum(call.nbytes for call in traffic.calls), flops.get_total_flops(), buckets


def test_muon_needs_two_collectives_a_bucket_and_orthogonalizes_once(two_ranks: RankPool) -> None:
    for axes in ({"dp_shard": 2}, {"tp": 2}):
        ours, torchs = (two_ranks.run(_costs, axes, kind, 2**15) for kind in ("muon", "torch"))
        for (calls, nbytes, flops, buckets), (their_calls, their_bytes, their_flops, _) in zip(
            ours, torchs, strict=True
        ):
            assert calls == {"all_to_all": 2 * buckets}
            assert buckets > 1
            assert sum(their_calls.values()) > 10 * sum(calls.values())
            assert nbytes < their_bytes / 4
            assert flops < 0.6 * their_flops  # either rank owns half of the matrices


def _resumed(directory: Path) -> dict[str, float]:
    first, expected = {"dp_shard": 2, "tp": 2}, _alone("qwen3_moe", 4)
    model = parallelize(_model("qwen3_moe"), mesh_for(first))
    optimizer = Muon(model, **SETTINGS)
    _train(model, optimizer, 2, first)
    save_training_state(directory / "state", model, optimizer, step=2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory / "dcp")
    errors = {}
    for axes, saved in ((EP, "state"), ({"tp": 4}, "state"), (HSDP, "dcp"), (HSDP, "no momentum")):
        model = parallelize(_model("qwen3_moe"), mesh_for(axes))
        optimizer = Muon(model, **SETTINGS)
        if saved == "dcp":
            of_model, of_optimizer = get_state_dict(model, optimizer)
            dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory / "dcp")
            set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        else:
            load_training_state(directory / "state", model, optimizer)
        if saved == "no momentum":
            optimizer.state.clear()
        _train(model, optimizer, 2, axes)
        errors[f"{saved} on {axes}"] = _worst(expected, model)[0]
    return errors


def test_muon_resumes_with_its_momentum(four_ranks: RankPool, tmp_path: Path) -> None:
    for errors in four_ranks.run(_resumed, tmp_path):
        assert {case: error for case, error in errors.items() if (error <= 1e-6) is ("no momentum" in case)} == {}


def _scaled(axes: Axes, name: str, overflows: str) -> list[tuple[bool, float]]:
    model = parallelize(_model(name), mesh_for(axes))
    optimizer, scaler = Muon(model, **SETTINGS), torch.amp.GradScaler("cpu", init_scale=128.0)
    steps = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        _backward(model, scale=scaler.scale(torch.tensor(1.0)).item())
        found = [p.grad for n, p in model.named_parameters() if overflows in n and p.grad is not None]
        if step == 1 and submesh(mesh_for(axes), "dp").get_local_rank() == 1:
            found[0].to_local().view(-1)[0] = float("inf")
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim == 1], 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        steps.append((changed, scaler.get_scale()))
    return steps


@pytest.mark.parametrize("overflows", ["experts", "q_proj"])
def test_muon_skips_a_step_on_all_ranks_if_one_gradient_overflows(four_ranks: RankPool, overflows: str) -> None:
    for steps in four_ranks.run(_scaled, EP, "qwen3_moe", overflows):
        assert steps == [(True, 128.0), (False, 64.0), (True, 64.0)]


def _skips() -> tuple[float, str]:
    """Parameters without a gradient in some steps, a schedule, a closure, and parameters on the host."""
    results = []
    for axes in ({}, {"dp_shard": 2}):
        model = _model("qwen3_moe")
        model.model.layers[0].requires_grad_(False)
        if axes:
            offload = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
            parallelize(model, mesh_for(axes), fsdp=FSDP2(offload_policy=offload))
        optimizer = Muon(model, **SETTINGS, nesterov=False)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        for step in range(4):
            _backward(model)
            if step % 2:
                model.model.layers[1].mlp.experts.gate_up_proj.grad = None
            optimizer.step(lambda: 1.0)
            scheduler.step()
            optimizer.zero_grad()
        results.append(model)
    return _worst({name: parameter.detach() for name, parameter in results[0].named_parameters()}, results[1])


def test_muon_follows_gradients_schedules_and_offload(two_ranks: RankPool) -> None:
    _assert_equal(two_ranks.run(_skips))


def _refusals() -> list[str]:
    messages = []

    def refused(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        messages.append(str(error.value))

    model = _model("qwen3")
    refused(OptionError, lambda: Muon(model.parameters()))
    early = Muon(model)
    parallelize(model, mesh_for({"dp_shard": 2}))
    _backward(model)
    refused(ModelError, early.step)
    optimizer, weight = Muon(model), model.model.layers[1].mlp.up_proj.weight
    if torch.distributed.get_rank():
        weight.grad = None
    before = model.model.norm.weight.to_local().clone()
    refused(OptionError, optimizer.step)
    assert torch.equal(before, model.model.norm.weight.to_local())
    return messages


def test_muon_refuses_before_a_parameter_changes(two_ranks: RankPool) -> None:
    for unknown, replaced, missing in two_ranks.run(_refusals):
        assert "the roles of 25 parameters are unknown: pass model=model" in unknown
        assert "build the optimizer after parallelize" in replaced
        assert (
            "the gradient of model.layers.1.mlp.up_proj.weight is 'present' on rank 0 and 'missing' on rank 1"
            in missing
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0: give 0 or more, less than 1"),
        ({"lr": -1.0}, "lr=-1.0: give 0 or more"),
        ({"adjust_lr_fn": "rms"}, "write one of 'match_rms_adamw', 'original'"),
        ({"ns_dtype": torch.int8}, "give a floating dtype"),
        ({"ns_coefficients": (2.0, -1.5)}, "give the three factors"),
    ],
)
def test_muon_refuses_wrong_options(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Muon(_uneven(), **options)


def test_muon_refuses_a_vector() -> None:
    with pytest.raises(OptionError, match=r"use_muon=True has a parameter of shape \(3,\), which is no matrix"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "use_muon": True}])
