"""The examples that use tp-plans alone, each against the same thing in one process."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.launched import launch
from harness.layers import gradient_mismatches, tp_mesh
from harness.models import jitter
from harness.ranks import RankPool
from tp_plans import Plan, plan_for

FOLDER = Path(__file__).parents[1] / "docs" / "examples" / "foreign_trainers"
PLANNED = [FOLDER / "plan.json", FOLDER / "llama-3-8b.json"]

# Qwen3's norms and rotary code compute in float32, even in a float64 model; all else of it agrees to 1e-12.
FLOAT32_INSIDE = 1e-6


def example(name: str) -> ModuleType:
    """An example as a module, under a name that no other module has."""
    spec = importlib.util.spec_from_file_location(f"foreign_trainers_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _bytes(model: nn.Module) -> int:
    parameters = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(parameter.nbytes for parameter in parameters)


# A bare loop


def bare_loop(sequence_parallel: bool) -> tuple[list[str], list[float], list[float]]:
    """Faults in the gradients of the first step, and the losses of a few steps: of one process, and split."""
    loop = example("bare_loop")
    torch.manual_seed(0)
    whole = loop.small_model().double()
    jitter(whole)
    split = loop.split(copy.deepcopy(whole), tp_mesh(), sequence_parallel=sequence_parallel)
    data = list(loop.batches(4, "cpu"))
    for model in (whole, split):
        loop.next_token_loss(model, data[0]).backward()
    faults = list(gradient_mismatches(whole, split, bound=FLOAT32_INSIDE))
    return faults, *(loop.train(model, data, lr=1e-3) for model in (whole, split))


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_bare_loop_trains_as_in_one_process(two_ranks: RankPool, sequence_parallel: bool) -> None:
    for faults, whole, split in two_ranks.run(bare_loop, sequence_parallel):
        assert faults == []
        assert split == pytest.approx(whole, rel=FLOAT32_INSIDE)
        assert whole[-1] != whole[0]


@pytest.mark.parametrize(("script", "least"), [("bare_loop", 2), ("own_model", 1.8)])
def test_main_of_an_example_learns_on_two_ranks(script: str, least: float) -> None:
    job = launch(FOLDER / f"{script}.py", ranks=2, cwd=FOLDER)
    assert job.returncode == 0, job.stderr
    words = job.stdout.split()
    assert float(words[1]) > least * float(words[3])  # false for nan
    assert job.stdout.endswith("on 2 ranks\n")


# A model class of one's own


def own_model(sequence_parallel: bool) -> tuple[list[str], list[float], list[float], float]:
    """As :func:`bare_loop`, and the share of the bytes that a rank holds."""
    module = example("own_model")
    torch.manual_seed(0)
    whole = module.Trainer().double()
    jitter(whole)
    split = copy.deepcopy(whole).split(tp_mesh(), sequence_parallel=sequence_parallel)
    data = list(torch.randint(0, module.VOCABULARY, (4, 2, 7)))
    for model in (whole, split):
        model.loss(data[0]).backward()
    faults = list(gradient_mismatches(whole, split))
    losses = [model.train_on(data, lr=0.1) for model in (whole, split)]
    return faults, *losses, _bytes(split) / _bytes(whole)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_custom_model_trains_as_in_one_process(two_ranks: RankPool, sequence_parallel: bool) -> None:
    for faults, whole, split, share in two_ranks.run(own_model, sequence_parallel):
        assert faults == []
        assert split == pytest.approx(whole, rel=1e-12)
        assert whole[-1] != whole[0]
        assert share < 0.52  # the vocabulary of 131 does not divide, and norms and the value head's bias stay whole


# A planner without torch


def planner(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the planner where importing torch, transformers or safetensors fails."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors')))"
    script = f"{blocked}; import runpy; runpy.run_path({str(FOLDER / 'planner.py')!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_planner_prints_what_its_page_shows_without_torch() -> None:
    done = planner(*PLANNED, "--tp=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout in (FOLDER / "README.md").read_text()


def test_the_planner_refuses_sizes_that_do_not_divide_and_invalid_plans(tmp_path: Path) -> None:
    done = planner(*PLANNED, "--tp=3")
    assert done.returncode == 1
    assert "32 heads of 128 (4096 features) cannot be split over tp=3" in done.stderr
    assert "valid tp sizes for this plan: 1, 2, 4, 8, 16, 32" in done.stderr
    (tmp_path / "plan.json").write_text("{}")
    done = planner(tmp_path / "plan.json", PLANNED[1], "--tp=2")
    assert (done.returncode, done.stderr) == (
        1,
        "a plan in JSON is an object with an object 'rules' of pattern to style\n",
    )


def test_the_shipped_plan_equals_the_plan_of_the_registry() -> None:
    assert Plan.from_json(PLANNED[0].read_text()) == plan_for("LlamaForCausalLM")


def rank_bytes() -> int:
    """What this rank really holds of the bare loop's model."""
    loop = example("bare_loop")
    return _bytes(loop.split(loop.small_model(), tp_mesh(), sequence_parallel=False))


def test_the_planner_predicts_the_bytes_of_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    model = example("bare_loop").small_model()
    numbers = {"head_dim": 16, "num_key_value_groups": 2, "num_key_value_heads": 2}
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    (tmp_path / "plan.json").write_text(plan_for(model).to_json())
    (tmp_path / "model.json").write_text(json.dumps({"numbers": numbers, "parameters": parameters}))
    done = planner(tmp_path / "plan.json", tmp_path / "model.json", "--tp=2", "--itemsize=4")
    told = [int(line.split()[2].replace(",", "")) for line in done.stdout.splitlines()[1:]]
    assert told == two_ranks.run(rank_bytes)
    assert told[0] > told[1]  # 131 entries do not divide
