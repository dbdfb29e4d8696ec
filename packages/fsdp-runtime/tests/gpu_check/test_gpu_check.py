"""The GPU check on the CPU: what it finds, what it says without a device, and that a wrong gradient is a failure."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch

import rl_logprobs
from fsdp_runtime.gpu_check import bench, kernels, parity, ranks
from fsdp_runtime.gpu_check.__main__ import main
from fsdp_runtime.gpu_check.bench_peers import Contender
from fsdp_runtime.gpu_check.check_result import CheckResult, markdown, within
from fsdp_runtime.gpu_check.machine import World, accelerator
from fsdp_runtime.gpu_check.memory import compared
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


def test_a_peak_far_from_the_dry_run_fails():
    near, far = (compared("peak of a step", int(2**30 * f), 2**30) for f in (1.01, 1.2))
    assert [f.state for f in (near, far)] == ["passed", "failed"]


def test_worlds_name_their_backend():
    assert World("cuda", 2, 2).backend == "nccl"
    assert World("cuda", 2, 1).backend == "gloo"
    assert World("cuda", 2, 1).name == "2 ranks on cuda, gloo, sharing a device"


def test_cells_of_the_page_hold_their_text():
    assert "| a \\| b | two lines |" in markdown([CheckResult("S", "a | b", "two\nlines")])
