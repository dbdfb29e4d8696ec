"""The GPU check on the CPU: what it finds, what it says without a device, and that a wrong gradient is a failure."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import replace
from functools import partial
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen
from torch.optim.optimizer import register_optimizer_step_post_hook

import rl_logprobs
from fsdp_runtime.gpu_check import __main__ as command
from fsdp_runtime.gpu_check import bench, bench_peers, kernels, parity, step_costs
from fsdp_runtime.gpu_check import float8 as gpu_float8
from fsdp_runtime.gpu_check.__main__ import checks_of, main
from fsdp_runtime.gpu_check.bench_peers import Contender
from fsdp_runtime.gpu_check.check_result import CheckResult, largest, markdown, within
from fsdp_runtime.gpu_check.float8 import check_float8
from fsdp_runtime.gpu_check.machine import World, accelerator, worlds
from fsdp_runtime.gpu_check.models import build
from fsdp_runtime.gpu_check.parity import Setting, settings
from fsdp_runtime.gpu_check.ranks import Check
from fsdp_runtime.gpu_check.step_costs import (
    StepCost,
    check_memory,
    compared,
    expected_cost,
    lever,
    summary,
)
from fsdp_runtime.steps import Compile, PackedSequences
from harness.processes import preloaded_context
from harness.ranks import RankPool


def test_chosen_checks_on_the_cpu_pass_and_write_a_page(tmp_path, capsys):
    preloaded_context()
    page = tmp_path / "report.md"
    arguments = ["--device", "cpu", "--max-ranks", "2", "--output", str(page)]
    assert main([*arguments, "--only", "parity: dense, dp_shard=2, float32"]) == 0
    text = page.read_text()
    assert text.splitlines()[2].startswith("1 checks passed, 0 failed, 0 were not run. It took ")
    assert "| dense, dp_shard=2, float32 (2 ranks on cpu, staged) |" in text
    assert "2 ranks on cpu, staged: 1 checks" in capsys.readouterr().err
    assert main([*arguments, "--only", "weights"]) == 0
    assert page.read_text().splitlines()[2].startswith("2 checks passed, 0 failed")
    assert "| sent from dp_shard to tp (2 ranks on cpu, staged) | every block arrived" in page.read_text()
    assert main([*arguments, "--only", "offload", "--max-minutes", "1e-9"]) == 0
    assert "| bytes (1 rank on cpu, gloo) | the time is over |  | not run |" in page.read_text()


def test_worlds_that_share_a_device_run_at_a_time_and_memory_alone(monkeypatch):
    running: list[str] = []
    most: dict[str, int] = {}
    together = Barrier(2)

    def run_checks(world, checks, deadline):
        running.append(world.name)
        if checks[0].section != "Memory":
            together.wait(timeout=30)
        most[checks[0].section] = max(most.get(checks[0].section, 0), len(running))
        together.reset() if checks[0].section == "Memory" else together.wait(timeout=30)
        running.remove(world.name)
        return [within(checks[0].section, world.name, 0.0, 1.0)]

    monkeypatch.setattr(command, "run_checks", run_checks)
    parity_check, memory_check = (Check(section, "", iter) for section in ("Parity", "Memory"))
    one, two = World("cuda", 1, 1), World("cuda", 2, 1)
    findings = command._run([(one, [parity_check]), (one, [memory_check]), (two, [parity_check])], 0.0)
    assert [finding.section for finding in findings] == ["Parity", "Parity", "Memory"]
    assert most == {"Parity": 2, "Memory": 1}


def test_options_that_choose_no_check_are_refused(capsys, tmp_path):
    assert main(["--device", "cpu", "--output", str(tmp_path / "missing" / "page.md")]) == 2
    assert "missing is no directory" in capsys.readouterr().err
    assert main(["--device", "cpu", "--only", "parity: no such axis"]) == 2
    assert "no check for --only 'parity: no such axis', --max-ranks 8" in capsys.readouterr().err
    assert main(["--device", "cpu", "--max-ranks", "0"]) == 2


def test_the_page_begins_with_its_failures_and_counts():
    findings = [
        CheckResult("A", "x", "3", "at most 2", "failed"),
        CheckResult("A", "y", "1"),
        within("B", "z", 0.0, 1.0),
    ]
    lines = markdown(findings, 7.0).splitlines()
    assert lines[2] == "1 checks passed, 1 failed, 0 were not run. It took 7 s."
    assert lines[4] == "- **failed**: A: x: 3, at most 2"
    assert lines[8:10] == ["| A | 0 | 1 | 1 | 0 |", "| B | 1 | 0 | 0 | 0 |"]


def test_every_world_has_its_checks():
    alone = {f"{check.section}: {check.what}" for checks in checks_of(World("cuda", 1, 1)) for check in checks}
    assert {name.partition(":")[0] for name in alone} == {
        *("Parity", "Training", "Host waits", "Offload", "Kernels", "Memory", "Float8")
    }
    numbers = [len(checks_of(World("cuda", size, 1))[0]) for size in (2, 4, 8)]
    own_devices = [len(checks_of(World("cuda", size, 8))[0]) for size in (2, 4, 8)]
    assert numbers[0] == own_devices[0] > 30
    assert [own - shared for own, shared in zip(own_devices, numbers, strict=True)] == [0, 21, 23]


def test_a_bench_on_the_cpu_writes_its_figures_as_a_page_and_as_json(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SECONDS", 0.01)
    page = tmp_path / "bench.md"
    assert main(["--device", "cpu", "--bench", "--output", str(page)]) == 0
    text, data = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    sections = ["Ceilings", "From logits", "From hidden states", "Norm and clipping", "Packed rows", "Steps"]
    assert list(dict.fromkeys(row["section"] for row in data["rows"])) == sections
    assert all(f"## {section}" in text for section in sections)
    ours = [row for row in data["rows"] if row["what"] == "rl-logprobs"]
    assert [row["error"] < 1e-5 for row in ours] == [True, True]
    assert all(row["forward_ms"] > 0 and row["both_rate"] > 0 and not row["note"] for row in ours)
    attention = [row for row in data["rows"] if row["section"] == "Packed rows"]
    assert len(attention) == 2
    assert all(row["error"] < 2**-6 for row in attention)  # of bfloat16
    steps = [row for row in data["rows"] if row["section"] == "Steps"]
    assert [row["what"] for row in steps] == ["ours", "transformers"] * 3
    assert all(row["both_ms"] > 0 and row["note"].endswith("k tokens a second") for row in steps)


def test_check_float8_measures_each_recipe_beside_bfloat16(monkeypatch):
    monkeypatch.setattr(bench, "SECONDS", 0.01)
    plain, *others = check_float8(World("cpu", 1, 1), torch.device("cpu"))
    assert plain.figure.endswith("1.00 of bfloat16's speed, 0 MiB, error 0")
    recipes = {result.what.partition(",")[0]: result for result in others}
    assert "no multiple of 128" in recipes.pop("blockwise").figure
    assert [result.state for result in recipes.values()] == ["passed"] * 4
    assert all(0 < float(result.figure.rpartition(" ")[2]) < 0.25 for result in recipes.values())
    monkeypatch.setattr(gpu_float8, "ERROR", 0.0)
    assert [result.state for result in check_float8(World("cpu", 1, 1), torch.device("cpu"))].count("failed") == 4


def test_a_bench_names_contenders_that_fail_or_come_after_its_time():
    short = bench.Bench(torch.device("cpu"), bench.SMALL, budget=60.0)

    def fails(*inputs):
        raise RuntimeError("no kernel\nfor this | device")

    contenders = [Contender("broken", fails), Contender("whole", lambda x: x.sum(-1))]
    inputs, exact = [torch.ones(3, 4, dtype=torch.float64, requires_grad=True)], torch.full((3,), 4.5)
    measure = partial(short.scored, inputs=inputs, exact=exact, floors=(1.0, 1.0))
    broken, whole = short._contend("From logits", "3 x 4", contenders, measure)
    assert broken.note.startswith("RuntimeError: no kernel")
    assert (whole.section, whole.shape, whole.error) == ("From logits", "3 x 4", 0.5)
    assert "no kernel for this \\| device" in bench.page([broken, whole], [])
    late = bench.Bench(torch.device("cpu"), bench.SMALL, budget=-1.0)
    (row,) = late._contend("From logits", "3 x 4", contenders[1:], measure)
    assert row.note.startswith("not run")


def _attend_flat(query, key, value, *, cu_seqlens):
    """Causal attention of documents as ``[tokens, heads, size]``, each alone."""
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(row.transpose(0, 1).split(lengths, 1) for row in (query, key, value)), strict=True)
    attended = [torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    return torch.cat(attended, 1).transpose(0, 1)


def _varlen_attn(*args, **options):
    bound = inspect.signature(torch.nn.attention.varlen.varlen_attn).bind(*args, **options).arguments
    assert bound["window_size"] == (-1, 0)
    assert bound["max_q"] == bound["max_k"] == int(bound["cu_seq_q"].diff().max())
    return _attend_flat(bound["query"], bound["key"], bound["value"], cu_seqlens=bound["cu_seq_q"])


def _flash(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal):
    assert causal
    return _attend_flat(query, key, value, cu_seqlens=cu_seqlens_k)


def test_kernels_of_packed_rows_compute_each_document_alone(monkeypatch):
    modules = {
        "torch.nn.attention.varlen": SimpleNamespace(varlen_attn=_varlen_attn),
        "flash_attn": SimpleNamespace(flash_attn_varlen_func=_flash),
        "torch.nn.attention.flex_attention": torch.nn.attention.flex_attention,
    }
    monkeypatch.setattr(bench_peers, "optional", modules.get)
    compiled = torch.compile  # of flex attention's own code in Python
    monkeypatch.setattr(torch, "compile", lambda call, **how: compiled(call, **how) if "backend" in how else call)
    rows = [torch.randn(1, 2, 3 * 8, 16) for _ in range(3)]
    exact = bench_peers.exact_attention(3, rows)
    contenders = bench_peers.kernels(3, 8, torch.device("cpu"))
    assert [contender.name for contender in contenders] == [
        "compiled flex, block mask", "torch.nn.attention.varlen.varlen_attn", "flash_attn.flash_attn_varlen_func",
    ]  # fmt: skip
    for contender in contenders:
        assert (contender.call(*rows) - exact).abs().max() < 1e-5, contender.name


def test_steps_of_ours_and_of_transformers_have_one_loss():
    cpu, setting = torch.device("cpu"), step_costs.TINY_BENCH[1]
    ours, theirs = (setting.step_on(cpu, plain=plain)() for plain in (False, True))
    assert abs(float(ours) * 16 / 15 - float(theirs)) < 1e-2  # our mean counts the last token of a row
    packed = replace(setting, options={"packed_sequences": True}, documents=2)
    alone = packed.step_on(cpu)()
    assert alone != ours  # documents begin at position 0


def test_a_cpu_traces_blocks_and_generates_no_code():
    options = {"compile": True, "sequence_parallel": True}
    assert parity.on_device(options, torch.device("cuda")) == options
    traced = Compile({"backend": "aot_eager"})
    assert parity.on_device(options, torch.device("cpu")) == {"compile": traced, "sequence_parallel": True}


def test_calls_of_the_kernel_check_give_the_same_twice_on_the_cpu(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    logits = {"logits": partial(kernels.from_logits, rl_logprobs, torch.randn(64, 130))}
    for what, call in (logits | kernels.calls(rl_logprobs, torch.device("cpu"))).items():
        assert kernels.largest_difference(call, ("torch", "torch")) == 0.0, what
    assert os.environ[kernels.VARIABLE] == "torch"


@pytest.mark.skipif(accelerator() is not None, reason="this machine has an accelerator")
def test_a_machine_without_a_device_is_told_so(capsys):
    assert main([]) == 0
    assert "nothing was checked" in capsys.readouterr().out
    assert main(["--device", "cuda"]) == 2
    assert "this machine has no accelerator; use cpu" in capsys.readouterr().err


def _parity(setting: Setting, factor: float) -> float:
    """The largest difference, with the gradient of one norm multiplied after ``parallelize``."""
    parallelize = parity.parallelize

    def _scale(parameter):
        parameter.grad.mul_(factor)

    def planted(*args, **options):
        model = parallelize(*args, **options)
        norm = next(module for name, module in model.named_modules() if name.endswith("model.norm"))
        norm.weight.register_post_accumulate_grad_hook(_scale)
        return model

    parity.parallelize = planted if factor != 1.0 else parallelize
    try:
        return parity.largest_difference(build(setting.kind).float(), setting, torch.device("cpu"))
    finally:
        parity.parallelize = parallelize


#: Each axis and each kind of model once; the command runs all.
SETTINGS = [
    setting
    for setting in settings(2)
    if (setting.kind == "mixture" and "ep" in setting.sizes)
    or (setting.kind not in ("dense", "mixture") and "tp" in setting.sizes)
    or setting.packed
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_two_ranks_equal_one_process(two_ranks: RankPool, setting):
    assert max(two_ranks.run(_parity, setting, 1.0)) <= parity.BOUNDS[torch.float32]


@pytest.mark.parametrize("setting", [Setting({"tp": 2}), next(s for s in SETTINGS if s.packed)], ids=str)
def test_a_wrong_gradient_is_found(two_ranks: RankPool, setting):
    assert min(two_ranks.run(_parity, setting, 1.5)) > parity.BOUNDS[torch.bfloat16]


def test_documents_that_read_one_another_are_found(two_ranks: RankPool):
    leaking = Setting({"dp_shard": 2}, {"packed_sequences": PackedSequences(isolate=False)}, "hybrid", packed="sdpa")
    assert min(two_ranks.run(_parity, leaking, 1.0)) > parity.BOUNDS[torch.bfloat16]


def test_largest_keeps_a_nan():
    assert largest([0.5, float("nan"), 1.0]) == largest([float("nan"), 1.0]) == float("inf")
    assert largest([0.5, 1.0]) == 1.0


def test_bounds_decide():
    assert within("Parity", "a", 0.1, 0.2).state == "passed"
    assert within("Parity", "a", float("nan"), 0.2).state == "failed"
    assert within("Parity", "a", 0.3, 0.2).state == "failed"


@pytest.fixture
def tiny_steps(monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
    for name, size in {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}.items():
        monkeypatch.setitem(step_costs.SIZES, name, size)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    monkeypatch.setattr(step_costs, "EXPERTS", experts)
    return [replace(each, tokens=(1, 8)) for each in step_costs.SETTINGS if "compile" not in each.options]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_every_setting_of_memory_takes_steps(tiny_steps):
    stepped = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(len(optimizer.state)))
    for setting in tiny_steps:
        step = setting.step_on(torch.device("cpu"))
        assert step().isfinite()
        step()
    hook.remove()
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


def test_a_lever_that_saves_no_bytes_fails():
    costs = [StepCost(nbytes, nbytes, 0.1) for nbytes in (2**30, 2**31)]
    assert lever("nf4", costs[0], "LoRA", costs[1]).state == "passed"
    assert lever("nf4", costs[1], "LoRA", costs[1]).state == "failed"
    assert lever("nf4", costs[0], "LoRA", costs[1]).figure == "1.00 GiB, 100 ms; LoRA: 2.00 GiB, 100 ms"


@pytest.mark.usefixtures("one_rank")
def test_levers_on_a_cpu_have_the_losses_of_steps_without_them(monkeypatch):
    cpu = torch.device("cpu")
    first, *findings = check_memory(World("cpu", 1, 1), cpu)
    names = [setting.name for setting in step_costs.SETTINGS if setting.without]
    assert [finding.what.partition(":")[0] for finding in findings] == names
    assert {finding.state for finding in findings} == {"passed"}
    assert first.state == "not run"
    setting = next(each for each in step_costs.SETTINGS if each.name == "LoRA on int8")
    monkeypatch.setattr(step_costs, "SMALL_BOUND", -1.0)
    assert step_costs.small_steps(setting).state == "failed"


def test_summary_predicts_a_step_by_the_factor_of_the_others():
    measured = [StepCost(100, 110, seconds) for seconds in (0.2, 0.2, 0.4)]
    bytes_, times = summary(measured, [StepCost(101, 110, 0.1)] * 3)
    assert bytes_.figure == "allocated 1.0%, reserved 0.0%"
    assert times.figure.startswith("2.00 (2.00 to 4.00)")
    assert times.figure.endswith("within 50% in the median")


def test_worlds_name_their_backend():
    assert World("cuda", 2, 2).backend == "nccl"
    assert World("cuda", 2, 1).name == "2 ranks on cuda, staged, sharing a device"
    assert [world.backend for world in worlds("cpu", 4)] == ["gloo", "staged", "staged"]


def test_cells_of_the_page_hold_their_text():
    assert "| a \\| b | two lines |" in markdown([CheckResult("S", "a | b", "two\nlines")])
