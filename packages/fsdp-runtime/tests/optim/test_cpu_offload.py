"""AdamW on the host takes the steps of one process on every mesh, in every cut of its chunks, and resumes anywhere."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fsdp_runtime import (
    FSDP2,
    ModelError,
    OptionError,
    load_training_state,
    parallelize,
    save_training_state,
    stream_weights,
)
from fsdp_runtime.errors import MismatchError, OffloadError
from fsdp_runtime.memory import host_copies
from fsdp_runtime.optim import CPUOffloadAdamW, cpu_offload, host_step
from fsdp_runtime.steps import Compile
from harness.lazy_copies import LazyCopies
from harness.models import tiny_inputs, tiny_model
from harness.parity import largest, mesh_for, own_part
from harness.ranks import RankPool
from rl_logprobs import clip_grad_norm_

BOUND = 1e-6


def _layers(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype))


def _set_gradients(model: nn.Module, step: int) -> None:
    """Give a model the same full gradients on every mesh."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = full
        if isinstance(parameter, DTensor):
            local = own_part(full, parameter).contiguous()
            parameter.grad = torch.empty_like(parameter.detach())
            parameter.grad.to_local().copy_(local)


@pytest.mark.parametrize("elements", [20, 2**24])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_equal_torch_adamw(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fraction: float, elements: int
) -> None:
    copies = LazyCopies()
    monkeypatch.setattr(host_copies, "make_copies", lambda _device: copies)
    monkeypatch.setattr(host_step, "CHUNK_ELEMENTS", elements)
    settings: dict[str, Any] = {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}
    model, expected = _layers(dtype), _layers(dtype)
    if dtype == torch.bfloat16:
        expected.float()
    optimizers = [
        CPUOffloadAdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1e-3}], **settings,
                        fraction=fraction),
        torch.optim.AdamW(
            [{"params": expected[0].parameters()}, {"params": expected[1].parameters(), "lr": 1e-3}], **settings
        ),
    ]  # fmt: skip
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
    for step in range(5):
        _set_gradients(model, step)
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            one.grad = other.grad.to(one.dtype)
        for stepped in (*optimizers, *schedulers):
            stepped.step()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        master = optimizers[0].state[other].get("master", other)
        assert master.dtype == one.dtype
        assert largest(one.detach() - master.detach()) < BOUND
        assert torch.equal(other, master.to(dtype))
    assert bool(copies.log) == (fraction > 0)
    assert not copies.queue  # the device has waited for all parameters


def test_a_parameter_written_between_steps_is_the_new_master() -> None:
    model, expected = _layers(torch.bfloat16), _layers(torch.bfloat16)
    optimizer = CPUOffloadAdamW(model.parameters(), lr=1e-2)
    _set_gradients(model, 0)
    optimizer.step()
    with torch.no_grad():
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            one.copy_(other)
    optimizer.step()
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["master"].bfloat16(), parameter)
    change = max(largest((a - b).detach()) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert 0 < change < 0.02  # one step from the written values


def test_a_scaler_skips_a_step_with_infinite_gradients() -> None:
    model = _layers(torch.float32)
    before = copy.deepcopy(model)
    optimizer, scaler = CPUOffloadAdamW(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((2, 16), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    model.zero_grad()
    scaler.scale(model(torch.ones(2, 16)).sum()).backward()
    scaler.step(optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_what_cannot_be_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _layers(torch.bfloat16)
    for fraction in (-0.1, 1.5, float("nan")):
        with pytest.raises(OptionError, match="give the part of the parameters on the host, from 0 to 1"):
            CPUOffloadAdamW(model.parameters(), fraction=fraction)
    with pytest.raises(OptionError, match="betas below 1"):
        CPUOffloadAdamW(model.parameters(), betas=(0.9, 1.0))
    optimizer = CPUOffloadAdamW(model.parameters())
    _set_gradients(model, 0)
    optimizer.step()
    saved, other = copy.deepcopy(optimizer.state_dict()), torch.optim.SGD(model.parameters(), momentum=0.9)
    other.step()
    before = copy.deepcopy(saved)
    with pytest.raises(MismatchError, match="parameter 0 lacks exp_avg, exp_avg_sq, step: it is not AdamW's"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(MismatchError, match=r"the groups have \[4\] parameters, and the saved ones \[2, 2\]"):
        optimizer.load_state_dict(torch.optim.AdamW([{"params": part.parameters()} for part in model]).state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(MismatchError, match=r"exp_avg of parameter 1 has shape \(3,\)"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(_tensors(optimizer), _state_values(before), strict=True))
    monkeypatch.setattr(host_copies, "available_host_memory", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(OffloadError, match=r"states of 2 ranks on this host take 3,432 bytes .* and 1,000 are"):
        CPUOffloadAdamW(model.parameters())
    CPUOffloadAdamW(model.parameters(), fraction=0.1)
    CPUOffloadAdamW(model.requires_grad_(False).parameters())


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return _state_values(optimizer.state_dict())


def _state_values(state_dict: dict[str, Any]) -> list[Tensor]:
    return [value for state in state_dict["state"].values() for value in state.values()]


@pytest.mark.parametrize("way", ["state dict", "copy"])
def test_a_loaded_or_copied_state_continues_bit_for_bit(way: str) -> None:
    model = _layers(torch.bfloat16)
    optimizer = CPUOffloadAdamW(model.parameters(), lr=1e-2, fraction=0.5)
    _set_gradients(model, 0)
    optimizer.step()
    other, resumed = copy.deepcopy((model, optimizer))
    if way == "state dict":
        resumed = CPUOffloadAdamW(other.parameters())
        resumed.load_state_dict(optimizer.state_dict())
    for step, (each, stepped) in ((1, (model, optimizer)), (1, (other, resumed))):
        _set_gradients(each, step)
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(_tensors(optimizer), _tensors(resumed), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: Any) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        inputs = tiny_inputs(model, batch=2, length=7)
        logits = model(**inputs, use_cache=False).logits
        (logits.full_tensor() if isinstance(logits, DTensor) else logits).square().sum().backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _errors(model: nn.Module, expected: nn.Module) -> float:
    """The largest difference of this rank's parts of the parameters."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(
        largest(local_part.detach() - (own_part(full, part) if isinstance(part, DTensor) else full).detach())
        for part, full in pairs
        for local_part in [part.to_local() if isinstance(part, DTensor) else part]
    )


def _five_steps(name: str, axes: dict[str, int]) -> tuple[float, float]:
    """The largest error of a parameter after five clipped steps, and the largest change of a parameter."""
    start = tiny_model(name)
    expected = copy.deepcopy(start)
    _train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2), 5, nn.utils.clip_grad_norm_)
    model = parallelize(copy.deepcopy(start), mesh_for(axes))
    _train(model, CPUOffloadAdamW(model.parameters(), lr=1e-2, fraction=0.7), 5, clip_grad_norm_)
    return _errors(model, expected), _errors(model, start)


MESHES = [
    ("Qwen3ForCausalLM", {"dp_shard": 4}),
    ("Qwen3ForCausalLM", {"tp": 2, "dp_shard": 2}),
    ("Qwen3ForCausalLM", {"dp_replicate": 2, "dp_shard": 2}),
    ("Qwen3MoeForCausalLM", {"dp_shard": 4, "ep": 2}),
    pytest.param("Qwen3ForCausalLM", {"tp": 4}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "axes"), MESHES, ids=str)
def test_five_clipped_steps_on_a_mesh_equal_one_process(four_ranks: RankPool, name: str, axes: dict[str, int]) -> None:
    for error, change in four_ranks.run(_five_steps, name, axes):
        assert error < BOUND
        assert change > 1e-3


def _on(axes: dict[str, int]) -> tuple[nn.Module, CPUOffloadAdamW]:
    model = parallelize(tiny_model("Qwen3ForCausalLM", dtype=torch.bfloat16), mesh_for(axes))
    return model, CPUOffloadAdamW(model.parameters(), lr=1e-2)


def _resumed(directory: Path) -> dict[str, bool]:
    """Whether the parameters and states after a resume on another mesh are the bits of one process."""
    expected = tiny_model("Qwen3ForCausalLM", dtype=torch.bfloat16)
    whole = CPUOffloadAdamW(expected.parameters(), lr=1e-2)
    model, optimizer = _on({"dp_shard": 2, "tp": 2})
    for step in range(4):
        for each, stepped in ((expected, whole), *([(model, optimizer)] if step < 2 else [])):
            _set_gradients(each, step)
            stepped.step()
    save_training_state(directory / "state", model, optimizer, step=2)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=directory / "dcp")
    same = {}
    for way in ("training state", "dcp"):
        other, resumed = _on({"dp_replicate": 2, "dp_shard": 2})
        load_training_state(directory / "state", other, None if way == "dcp" else resumed)
        if way == "dcp":
            state = {"optimizer": get_optimizer_state_dict(other, resumed)}
            dcp.load(state, checkpoint_id=directory / "dcp")
            set_optimizer_state_dict(other, resumed, state["optimizer"])
        for step in (2, 3):
            _set_gradients(other, step)
            resumed.step()
        masters = [resumed.state[p]["master"].to_local() for p in other.parameters()]
        full = [whole.state[p]["master"] for p in expected.parameters()]
        parts = [own_part(f, p) for f, p in zip(full, other.parameters(), strict=True)]
        same[way] = all(torch.equal(a, b) for a, b in zip(masters, parts, strict=True))
    return same


def test_a_state_resumes_on_another_mesh_bit_for_bit(four_ranks: RankPool, tmp_path: Path) -> None:
    for same in four_ranks.run(_resumed, tmp_path):
        assert same == {"training state": True, "dcp": True}


def _built_before() -> str:
    model = tiny_model("Qwen3ForCausalLM")
    optimizer = CPUOffloadAdamW(model.parameters())
    parallelize(model, mesh_for({"dp_shard": 2}))
    model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits.sum().backward()
    try:
        optimizer.step()
    except ModelError as error:
        return str(error)
    return ""


def test_an_optimizer_built_before_parallelize_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_built_before):
        assert "CPUOffloadAdamW" in message


class _LockedCopies(LazyCopies):
    """Copies of two threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._lock:
            super().copy(target, source)

    def record(self) -> int:
        with self._lock:
            return super().record()

    def wait(self, event: int) -> None:
        with self._lock:
            super().wait(event)

    synchronize = wait


def _trained(model: nn.Module, *, beside: bool) -> list[Tensor]:
    """The losses of three steps and this rank's parameters after them."""
    optimizer = CPUOffloadAdamW(model.parameters(), lr=1e-2, fraction=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    inputs = tiny_inputs(model, batch=2, length=8)

    def forward() -> Tensor:
        loss: Tensor = model(**inputs, use_cache=False).logits.square().mean()
        return loss

    losses = [forward()]
    for _ in range(3):
        losses[-1].backward()
        if not beside:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(optimizer.step_during(model, forward) if beside else forward())
        assert all(parameter.grad is None for parameter in model.parameters())
        scheduler.step()
    return [*losses, *(getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())]


def _same_bits(axes: dict[str, int], options: dict[str, Any]) -> tuple[bool, list[str], int]:
    copies, original, elements = _LockedCopies(), host_copies.make_copies, host_step.CHUNK_ELEMENTS
    host_copies.make_copies, host_step.CHUNK_ELEMENTS = lambda _device: copies, 500
    try:
        one, other = (
            _trained(parallelize(tiny_model("Qwen3ForCausalLM", num_hidden_layers=3), mesh_for(axes), **options),
                     beside=beside)
            for beside in (False, True)
        )  # fmt: skip
    finally:
        host_copies.make_copies, host_step.CHUNK_ELEMENTS = original, elements
    return all(map(torch.equal, one, other)), copies.faults, len(copies.queue)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp_shard": 2}, {"fsdp": FSDP2(prefetch_forward=1), "activation_checkpointing": "block"}),
        ({"tp": 2}, {"sequence_parallel": True, "compile": Compile({"backend": "eager"})}),
    ],
    ids=["dp_shard", "tp"],
)
def test_step_during_has_the_bits_of_a_step_and_a_forward(
    two_ranks: RankPool, axes: dict[str, int], options: dict[str, Any]
) -> None:
    assert two_ranks.run(_same_bits, axes, options) == [(True, [], 0)] * 2


def _with_groups() -> tuple[nn.Module, CPUOffloadAdamW]:
    """A model with gradients, and an optimizer with a chunk of each block, and one of the other parameters first."""
    model = tiny_model("Qwen3ForCausalLM", num_hidden_layers=3)
    blocks = [list(block.parameters()) for block in model.model.layers]
    others = [p for name, p in model.named_parameters() if ".layers." not in name]
    optimizer = CPUOffloadAdamW([{"params": group} for group in (others, *blocks)])
    model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits.sum().backward()
    return model, optimizer


def test_step_during_lets_a_block_wait_for_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _with_groups()
    events: list[str] = []
    ran = [threading.Event() for _ in range(4)]
    original = cpu_offload._compute

    def compute(*args: Any) -> None:
        number = sum(event.startswith("chunk") for event in events)
        assert number < 2 or ran[number - 2].wait(timeout=60)  # the block before has run
        original(*args)
        events.append(f"chunk {number}")

    def run(number: int) -> None:
        events.append(f"block {number}")
        ran[number].set()

    monkeypatch.setattr(cpu_offload, "_compute", compute)
    for number, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, number=number: run(number))
    optimizer.step_during(model, lambda: model(**tiny_inputs(model, batch=2, length=5), use_cache=False))
    assert events[:2] == ["chunk 0", "chunk 1"]
    assert events[2:] == ["block 0", "chunk 2", "block 1", "chunk 3", "block 2"]


@pytest.mark.parametrize("read", [nn.Module.state_dict, lambda model: dict(stream_weights(model))])
def test_step_during_lets_other_readers_wait_for_all_parameters(monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    model, optimizer = _with_groups()
    reads, original = threading.Event(), cpu_offload._compute

    def compute(*args: Any) -> None:
        assert reads.wait(timeout=60)
        time.sleep(0.05)  # a reader that does not wait is done by then
        original(*args)

    def forward() -> dict[str, Tensor]:
        reads.set()
        with pytest.raises(OptionError, match="take the next step and state_dict when it has returned"):
            optimizer.state_dict()
        return {name: tensor.clone() for name, tensor in read(model).items()}

    monkeypatch.setattr(cpu_offload, "_compute", compute)
    values = optimizer.step_during(model, forward)
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())


def test_step_during_raises_errors_and_refuses_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _with_groups()
    before = copy.deepcopy(model)
    with pytest.raises(ModelError, match="36 parameters of the optimizer are not in the model"):
        optimizer.step_during(before, lambda: None)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    with pytest.raises(OptionError, match="when it has returned"):
        optimizer.step_during(model, optimizer.step)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert not any(map(torch.equal, model.parameters(), before.parameters()))

    def fail(*_args: Any) -> None:
        raise ValueError("no kernel")

    monkeypatch.setattr(cpu_offload, "_compute", fail)
    model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits.sum().backward()
    with pytest.raises(ValueError, match="no kernel"):
        optimizer.step_during(model, lambda: model(**tiny_inputs(model, batch=2, length=5), use_cache=False))
    assert not any(module._forward_pre_hooks for module in model.modules())
