"""The GPU check on the CPU: what it finds, what it says without a device, and that a wrong gradient is a failure."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

import rl_logprobs
from fsdp_runtime.gpu_check import bench, kernels, parity, ranks, step_settings
from fsdp_runtime.gpu_check.__main__ import main
from fsdp_runtime.gpu_check.bench_peers import Contender
from fsdp_runtime.gpu_check.check_result import CheckResult, markdown, within
from fsdp_runtime.gpu_check.machine import World, accelerator
from fsdp_runtime.gpu_check.memory import StepCost, compared, expected_cost, summary
from harness.processes import preloaded_context
from harness.ranks import RankPool


def test_one_rank_on_the_cpu_passes_and_writes_a_page(tmp_path, capsys, monkeypatch):
    preloaded_context()
    monkeypatch.setattr(ranks.mp, "spawn", partial(ranks.mp.start_processes, start_method="forkserver"))
    page = tmp_path / "report.md"
    assert main(["--device", "cpu", "--max-ranks", "1", "--output", str(page)]) == 0
    text = page.read_text()
    assert "0 failed" in text
    assert "| LlamaForCausalLM, dp_shard=1, float32 (1 rank on cpu, gloo) |" in text
    assert "| log-probabilities, triton | Triton needs an accelerator |  | not run |" in text


def test_a_bench_on_the_cpu_writes_its_figures_as_a_page_and_as_json(tmp_path, capsys):
    page = tmp_path / "bench.md"
    assert main(["--device", "cpu", "--bench", "--output", str(page)]) == 0
    text, data = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    sections = ["Ceilings", "From logits", "From hidden states", "Norm and clipping"]
    assert list(dict.fromkeys(row["section"] for row in data["rows"])) == sections
    assert all(f"## {section}" in text for section in sections)
    ours = [row for row in data["rows"] if row["what"] == "rl-logprobs"]
    assert [row["error"] < 1e-5 for row in ours] == [True, True]
    assert all(row["forward_ms"] > 0 and row["both_rate"] > 0 and not row["note"] for row in ours)


def test_a_bench_names_contenders_that_fail_or_come_after_its_time():
    short = bench.Bench(torch.device("cpu"), bench.SMALL, budget=60.0)

    def fails(*inputs):
        raise RuntimeError("no kernel\nfor this | device")

    contenders = [Contender("broken", fails), Contender("whole", lambda x: x.sum(-1))]
    inputs, exact = [torch.ones(3, 4, dtype=torch.float64, requires_grad=True)], torch.full((3,), 4.5)
    broken, whole = short._contend("From logits", "3 x 4", contenders, inputs, exact)
    assert broken.note.startswith("RuntimeError: no kernel")
    assert whole.error == 0.5
    assert "no kernel for this \\| device" in bench.page([broken, whole], [])
    late = bench.Bench(torch.device("cpu"), bench.SMALL, budget=-1.0)
    (row,) = late._contend("From logits", "3 x 4", contenders[1:], inputs, exact)
    assert row.note.startswith("not run")


def test_calls_of_the_kernel_check_give_the_same_twice_on_the_cpu(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    for what, call in kernels.calls(rl_logprobs, torch.device("cpu")).items():
        assert kernels.largest_difference(call, ("torch", "torch")) == 0.0, what
    assert os.environ[kernels.VARIABLE] == "torch"


@pytest.mark.skipif(accelerator() is not None, reason="this machine has an accelerator")
def test_a_machine_without_a_device_is_told_so(capsys):
    assert main([]) == 0
    assert "nothing was checked" in capsys.readouterr().out
    assert main(["--device", "cuda"]) == 2
    assert "this machine has no accelerator; use cpu" in capsys.readouterr().err


def _parity(setting: parity.Setting, factor: float) -> float:
    """The largest difference, with the gradient of one norm multiplied after ``parallelize``."""
    parallelize = parity.parallelize

    def _scale(parameter):
        parameter.grad.mul_(factor)

    def planted(*args, **options):
        model = parallelize(*args, **options)
        model.model.norm.weight.register_post_accumulate_grad_hook(_scale)
        return model

    parity.parallelize = planted
    try:
        return parity.largest_difference(parity.build(setting.experts).float(), setting, torch.device("cpu"))
    finally:
        parity.parallelize = parallelize


@pytest.mark.parametrize("setting", parity.settings(2), ids=str)
def test_two_ranks_equal_one_process(two_ranks: RankPool, setting):
    assert max(two_ranks.run(_parity, setting, 1.0)) <= parity.BOUNDS[torch.float32]


def test_a_wrong_gradient_is_found(two_ranks: RankPool):
    assert min(two_ranks.run(_parity, parity.settings(2)[1], 1.5)) > parity.BOUNDS[torch.bfloat16]


def test_bounds_decide():
    assert within("Parity", "a", 0.1, 0.2).state == "passed"
    assert within("Parity", "a", float("nan"), 0.2).state == "failed"
    assert within("Parity", "a", 0.3, 0.2).state == "failed"


@pytest.fixture
def tiny_steps(monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
    for name, size in {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}.items():
        monkeypatch.setitem(step_settings.SIZES, name, size)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    monkeypatch.setattr(step_settings, "EXPERTS", experts)
    return [replace(each, tokens=(1, 8)) for each in step_settings.SETTINGS if not each.compiled]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_every_setting_of_memory_takes_steps(tiny_steps, monkeypatch):
    stepped = []
    real = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (real(self), stepped.append(len(self.state))))
    for setting in tiny_steps:
        step = setting.step_on(torch.device("cpu"))
        step()
        step()
    assert len(stepped) == 2 * len(tiny_steps)
    assert all(stepped)


def test_the_dry_run_of_a_setting_has_its_bytes_and_seconds(tiny_steps):
    for name in ("float32 masters", "LoRA", "mixture"):
        cost = expected_cost(next(each for each in tiny_steps if each.name == name), "NVIDIA H200")
        assert cost.reserved >= cost.allocated > 64 * 2**20
        assert cost.seconds > 0


def test_bytes_far_from_the_dry_run_fail():
    expected = StepCost(2**30, 2**30, 0.1)
    costs = [StepCost(int(2**30 * a), int(2**30 * r), 0.15) for a, r in ((1.01, 1.02), (1.2, 1.0), (1.0, 1.2))]
    assert [compared("a step", cost, expected).state for cost in costs] == ["passed", "failed", "failed"]
    assert "estimate -1.0%" in compared("a step", costs[0], expected).figure
    assert "1.50 of the expected time" in compared("a step", costs[0], expected).figure


def test_summary_predicts_a_step_by_the_factor_of_the_others():
    measured = [StepCost(100, 110, seconds) for seconds in (0.2, 0.2, 0.4)]
    bytes_, times = summary(measured, [StepCost(101, 110, 0.1)] * 3)
    assert bytes_.figure == "allocated 1.0%, reserved 0.0%"
    assert times.figure.startswith("2.00 (2.00 to 4.00)")
    assert times.figure.endswith("within 50% in the median")


def test_worlds_name_their_backend():
    assert World("cuda", 2, 2).backend == "nccl"
    assert World("cuda", 2, 1).backend == "gloo"
    assert World("cuda", 2, 1).name == "2 ranks on cuda, gloo, sharing a device"


def test_cells_of_the_page_hold_their_text():
    assert "| a \\| b | two lines |" in markdown([CheckResult("S", "a | b", "two\nlines")])
