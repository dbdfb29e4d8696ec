"""AdamW with states in few bits: the same steps on every mesh, resumed on another, near torch's AdamW."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_runtime import load_training_state, parallelize, save_training_state
from fsdp_runtime.errors import MismatchError, OptionError
from fsdp_runtime.optim import LowBitAdamW
from fsdp_runtime.optim.low_bit import round_stochastically
from harness.parity import mesh_for, own_part
from harness.ranks import RankPool
from tp_plans import ColwiseParallel, RowwiseParallel

low_bit: Any = importlib.import_module("fsdp_runtime.optim.low_bit")
#: Rows, columns and vectors that no axis divides; one is below the least size on every rank of four, not in full.
_SHAPES = ((67, 300), (3, 21, 520), (513,), (20, 30), (70, 60))
_OPTIONS = {
    "8bit": {"states": "8bit"},
    "bf16": {"states": "bf16"},
    "bf16 parameters": {"states": "8bit", "stochastic_rounding": True},
}


def _layouts(dims: int) -> list[Any]:
    """Placements over two axes: rows, columns, both, and one axis twice."""
    last = dims - 1
    return [[Shard(0), Replicate()], [Replicate(), Shard(last)], [Shard(0), Shard(last)], [Shard(last), Replicate()]]


def _trained(place: Any, options: dict[str, Any], dtype: torch.dtype, steps: int = 5) -> list[Tensor]:
    """The parameters after some steps; ``place`` distributes a full tensor."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(place(torch.randn(shape, generator=generator).to(dtype))) for shape in _SHAPES]
    optimizer = LowBitAdamW(parameters, lr=0.01, weight_decay=0.1, **options)
    for _ in range(steps):
        for parameter, shape in zip(parameters, _SHAPES, strict=True):
            parameter.grad = place(torch.randn(shape, generator=generator).mul(0.1).to(dtype))
        optimizer.step()
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in parameters]


def _by_local_size(parameter: Tensor) -> bool:
    """The fault of pytorch/ao#4912."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.ndim > 1 and local.numel() >= low_bit.LEAST_ELEMENTS


def _differing(axes: dict[str, int], kind: str, *, planted: bool = False) -> list[str]:
    options, mesh = _OPTIONS[kind], mesh_for(axes)[tuple(axes)]
    dtype = torch.bfloat16 if kind == "bf16 parameters" else torch.float32
    expected, wrong = _trained(lambda full: full, options, dtype), []
    with mock.patch.object(low_bit, "is_low_bit", _by_local_size if planted else low_bit.is_low_bit):
        for number in range(4):
            actual = _trained(
                lambda full: distribute_tensor(full, mesh, _layouts(full.ndim)[number]),  # noqa: B023
                options,
                dtype,
            )
            wrong += [f"{number} {e.shape}" for a, e in zip(actual, expected, strict=True) if not torch.equal(a, e)]
    return wrong


@pytest.mark.parametrize("kind", _OPTIONS)
def test_low_bit_adamw_takes_the_steps_of_one_process(kind: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    assert two_ranks.run(_differing, {"dp_shard": 2, "tp": 1}, kind) == [[]] * 2
    assert four_ranks.run(_differing, {"dp_shard": 2, "tp": 2}, kind) == [[]] * 4


def test_low_bit_adamw_by_local_size_would_train_otherwise_on_another_mesh(two_ranks: RankPool) -> None:
    found = two_ranks.run(_differing, {"dp_shard": 2, "tp": 1}, "8bit", planted=True)[0]
    assert found
    assert all("[70, 60]" in each for each in found)


@pytest.mark.parametrize(("states", "spread", "bound"), [("8bit", 1, 0.04), ("8bit", 4, 0.2), ("bf16", 1, 0.02)])
def test_low_bit_adamw_is_near_torch(states: Any, spread: int, bound: float) -> None:
    """Gradients of one block differ by some orders of magnitude where ``spread`` is 4."""
    torch.manual_seed(0)
    plain, low = nn.Parameter(torch.randn(64, 512)), nn.Parameter(torch.zeros(64, 512))
    low.data.copy_(start := plain.detach().clone())
    optimizers = torch.optim.AdamW([plain], lr=0.01), LowBitAdamW([low], lr=0.01, states=states)
    scale = torch.rand(64, 512) ** spread
    for _ in range(30):
        gradient = torch.randn(64, 512) * scale + scale / 2
        plain.grad, low.grad = gradient.clone(), gradient
        for optimizer in optimizers:
            optimizer.step()
    assert 0 < (low - plain).norm() / (plain - start).norm() < bound


def test_round_stochastically_keeps_the_mean_of_a_step_below_the_last_place() -> None:
    values = torch.full((512, 512), 1 + 2.0**-10)
    rounded = round_stochastically(values, values, ((0, 512), (0, 512)), seed=5)
    assert rounded.unique().tolist() == [1.0, 1.0078125]
    assert abs(rounded.double().mean().item() - (1 + 2.0**-10)) < 3e-5
    assert round_stochastically(torch.tensor([float("nan"), -float("inf")]), values[0, :2], ((0, 2),), 1)[1] == -float(
        "inf"
    )
    assert not torch.equal(rounded, round_stochastically(values, values, ((0, 512), (0, 512)), seed=6))


def _model() -> nn.Module:
    torch.manual_seed(4)
    layers = nn.Sequential(nn.Linear(96, 300), nn.Linear(300, 96), nn.Linear(4999, 1))  # one row, an empty shard
    return nn.Sequential(nn.ModuleList([layers]))


class _Run:
    """A model with its optimizer on a mesh, trained with given gradients."""

    def __init__(self, axes: dict[str, int]) -> None:
        plan = {"0.0.0": ColwiseParallel(), "0.0.1": RowwiseParallel()}
        self.model = parallelize(_model(), mesh_for(axes), plan=plan)
        self.optimizer = LowBitAdamW(self.model.parameters(), lr=0.01)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for parameter in self.model.parameters():
                full = torch.randn(parameter.shape, generator=generator)
                parameter.grad = full
                if isinstance(parameter, DTensor):
                    shape, stride = parameter.shape, parameter.stride()
                    part = own_part(full, parameter).contiguous()
                    parameter.grad = DTensor.from_local(
                        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
                    )
            self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in self.model.parameters()]


def _save(directory: str, axes: dict[str, int]) -> None:
    run = _Run(axes)
    run.train(0, 3)
    save_training_state(directory, run.model, run.optimizer, step=3)


def _resumed(directory: str, axes: dict[str, int]) -> list[bool]:
    run, unbroken = _Run(axes), _Run(axes)
    load_training_state(directory, run.model, run.optimizer)
    run.train(3, 6)
    unbroken.train(0, 6)
    return [torch.equal(one, other) for one, other in zip(run.parameters(), unbroken.parameters(), strict=True)]


def test_low_bit_adamw_is_resumed_on_another_mesh(tmp_path: Path, two_ranks: RankPool, four_ranks: RankPool) -> None:
    four_ranks.run(_save, str(tmp_path / "four"), {"dp_shard": 2, "tp": 2})
    assert two_ranks.run(_resumed, str(tmp_path / "four"), {"tp": 2}) == [[True] * 6] * 2
    two_ranks.run(_save, str(tmp_path / "two"), {"dp_shard": 2})
    assert four_ranks.run(_resumed, str(tmp_path / "two"), {"dp_shard": 2, "tp": 2}) == [[True] * 6] * 4


def test_low_bit_adamw_load_state_dict_takes_its_state_and_refuses_others() -> None:
    layer = nn.Linear(128, 64).bfloat16()
    layer.weight.grad = torch.ones_like(layer.weight)
    saved, other = LowBitAdamW(layer.parameters()), LowBitAdamW(layer.parameters())
    saved.step()
    other.load_state_dict(saved.state_dict())
    assert {key: type(value) for key, value in other.state[layer.weight].items()}["step"] is int
    for key, value in saved.state[layer.weight].items():
        if isinstance(value, Tensor):
            assert torch.equal(other.state[layer.weight][key], value)
            assert other.state[layer.weight][key].dtype == value.dtype
    for wrong in (torch.optim.AdamW(layer.parameters()), LowBitAdamW(layer.parameters(), states="bf16")):
        with pytest.raises(MismatchError, match=r"has states=.*, and this LowBitAdamW '8bit'"):
            other.load_state_dict(wrong.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": "4bit"}, "states='4bit'"),
        ({"block_size": 0}, "block_size=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_low_bit_adamw_refuses_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LowBitAdamW(nn.Linear(2, 2).parameters(), **options)
