"""``fsdp-runtime estimate``: arguments, output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp_runtime
from fsdp_runtime import MeshSpec, ModelError, cli
from fsdp_runtime.dry_run import Estimate, Sweep
from fsdp_runtime.dry_run.compare import rank_candidates
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from fsdp_runtime.dry_run.sweep_types import Candidate
from fsdp_runtime.steps import TensorParallel
from fsdp_runtime.trainers.verl import check
from harness.estimates import GIB, made_estimate
from harness.interpreter import environment
from harness.models import tiny_config
from tp_plans import Plan, UnknownArchitectureError, plan_for

ONE = ["estimate", "config.json", "--seq-len", "64", "--mesh", "dp_shard=4,tp=2"]
MANY = ["estimate", "config.json", "--seq-len", "64", "--sweep", "--world-size", "8"]


class Asked:
    """Stands for ``estimate`` or ``sweep`` and keeps how it was called."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.arguments, self.options = arguments, options
        return self.answer()


def _answer(monkeypatch: pytest.MonkeyPatch, estimate: Estimate | Exception) -> Asked:
    def answer() -> Estimate:
        if isinstance(estimate, Exception):
            raise estimate
        return estimate

    asked = Asked(answer)
    monkeypatch.setattr(cli, "estimate", asked)
    return asked


def _sweep_of(*estimates: Estimate) -> Sweep:
    plain = Candidate(mesh=MeshSpec(dp_shard=8), sequence_parallel=False, activation_checkpointing="none")
    return rank_candidates(8, [plain.with_estimate(estimate, device_flops=None) for estimate in estimates])


def test_given_options_are_passed_to_the_dry_run_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _answer(monkeypatch, made_estimate())
    rest = "--micro-batch 2 --sequence-parallel --activation-checkpointing block --dtype fp16 --master-dtype fp32"
    more = (
        "--optimizer sgd --logprobs linear --offload --no-clip --exact --rank 3 --routing worst --device-memory 80GiB "
        "--towers replicated"
    )
    assert cli.main([*ONE, *rest.split(), *more.split(), "--bandwidth", "tp=450GB/s,dp_shard=400Gb/s"]) == 0
    assert asked.arguments == ("config.json", MeshSpec(dp_shard=4, tp=2))
    progress = asked.options.pop("progress")
    assert callable(progress)
    assert asked.options == {
        "seq_len": 64,
        "micro_batch": 2,
        "plan": TensorParallel(towers="replicated"),
        "sequence_parallel": True,
        "activation_checkpointing": "block",
        "dtype": "fp16",
        "optimizer": "sgd",
        "logprobs": "linear",
        "clip": False,
        "fsdp": parse_fsdp("fp16", master_dtype="fp32", offload=True),
        "exact": True,
        "rank": 3,
        "routing": "worst",
        "device_memory": "80GiB",
        "bandwidth": {"tp": "450GB/s", "dp_shard": "400Gb/s"},
    }


def test_a_plan_is_a_name_a_file_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = _answer(monkeypatch, made_estimate())
    (tmp_path / "plan.json").write_text(plan_for("llama").to_json())
    wanted: dict[str, Plan | str | None] = {
        "my.plan": "my.plan",
        str(tmp_path / "plan.json"): plan_for("llama"),
        "none": None,
    }
    for told, plan in wanted.items():
        assert cli.main([*ONE, "--plan", told]) == 0
        assert asked.options["plan"] == plan


def test_a_size_of_minus_1_is_inferred_from_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _answer(monkeypatch, made_estimate())
    assert cli.main([*ONE[:-1], "dp_shard=-1,tp=2", "--world-size", "16"]) == 0
    assert asked.arguments[1] == MeshSpec(dp_shard=8, tp=2)


def test_exit_codes_show_whether_the_peak_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _answer(monkeypatch, made_estimate(device_memory=80 * GIB))
    assert cli.main(ONE) == 0
    _answer(monkeypatch, made_estimate(device_memory=30 * GIB))
    assert cli.main(ONE) == 1
    assert "Does not fit" in capsys.readouterr().out


def test_results_are_written_to_files_or_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    estimate = made_estimate()
    _answer(monkeypatch, estimate)
    assert cli.main([*ONE, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(estimate.to_json())
    names = {kind: str(tmp_path / kind) for kind in ("json", "html", "png")}
    assert cli.main([*ONE, *(part for kind, name in names.items() for part in (f"--{kind}", name))]) == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM, 70.6 G parameters")
    assert json.loads(Path(names["json"]).read_text())["flops"] == estimate.flops
    assert Path(names["html"]).read_text().startswith("<!doctype html>")
    assert Path(names["png"]).stat().st_size > 1000


@pytest.mark.parametrize(
    "error",
    [
        ModelError("tp=3: 4 heads do not divide"),
        UnknownArchitectureError("remote code is not run"),
        ImportError("No module named 'transformers'"),
    ],
)
def test_errors_are_one_message_and_no_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _answer(monkeypatch, error)
    assert cli.main(ONE) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fsdp-runtime estimate: {error}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (ONE[:-2], "no mesh was given"),
        (MANY[:-2], "number of ranks is not known"),
        ([*ONE[:-1], "dp_shard=4,sp=2"], "an axis 'sp'"),
        ([*ONE, "--plan", "absent.json"], "absent.json"),
        ([*ONE, "--device-memory", "80"], "--device-memory 80 has no unit: write 80GiB"),
    ],
)
def test_invalid_commands_are_refused_before_anything_runs(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _answer(monkeypatch, AssertionError("reached"))
    assert cli.main(arguments) == 2
    assert told in capsys.readouterr().err


def test_main_prints_an_error_of_a_users_function_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _answer(monkeypatch, ValueError("my bug\nand more"))
    assert cli.main(ONE) == 2
    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if "my bug" in line]) == 1
    assert "fsdp-runtime estimate: ValueError: my bug (" in told[-1]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"fsdp-runtime {fsdp_runtime.__version__}\n"


def test_an_optimizer_is_named_with_a_dash_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _answer(monkeypatch, made_estimate())
    assert cli.main([*ONE, "--optimizer", "adamw-fused", "--assume-gradients"]) == 0
    assert (asked.options["optimizer"], asked.options["assume_gradients"]) == ("adamw_fused", True)


def test_a_sequence_without_tokens_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "config.json", "--seq-len", "0", "--mesh", "tp=1"]) == 2
    assert "seq_len=0: give a positive integer" in capsys.readouterr().err


def test_a_sweep_fixes_given_options_and_varies_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(lambda: _sweep_of(made_estimate()))
    monkeypatch.setattr(cli, "sweep", asked)
    assert cli.main(MANY) == 0
    assert asked.arguments == ("config.json", 8)
    assert not {"sequence_parallel", "activation_checkpointing"} & set(asked.options)
    fixed = ["--sequence-parallel", "--activation-checkpointing", "block,mlp", "--cp", "1,2", "--dp-replicate", "2"]
    assert cli.main([*MANY, *fixed]) == 0
    names = ("sequence_parallel", "activation_checkpointing", "cp", "dp_replicate")
    assert [asked.options[name] for name in names] == [(True,), ["block", "mlp"], (1, 2), (2,)]
    assert cli.main([*ONE, "--sweep"]) == 0
    assert asked.arguments == ("config.json", 8)  # as many ranks as the mesh has


def test_exit_codes_of_a_sweep_show_whether_a_candidate_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, too_large = made_estimate(device_memory=80 * GIB), made_estimate(device_memory=GIB)
    for found, code in ((_sweep_of(too_large, fits), 0), (_sweep_of(too_large), 1), (_sweep_of(), 2)):
        monkeypatch.setattr(cli, "sweep", Asked(lambda found=found: found))
        assert cli.main(MANY) == code


def test_a_tiny_model_is_swept_from_its_config(tmp_path: Path) -> None:
    tiny_config("LlamaForCausalLM", architectures=["LlamaForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    fixed = ["--activation-checkpointing", "none", "--max-tp", "2", "--dp-replicate", "1", "--workers", "0"]
    command = ["estimate", str(tmp_path), "--seq-len", "16", "--sweep", "--world-size", "2", *fixed, "--json", "-"]
    done = subprocess.run(
        ["python", "-m", "fsdp_runtime.cli", *command, "--bandwidth", "1GB/s", "--device-memory", "4GiB"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["candidates"]
    assert [each["error"] for each in found] == ["", "", ""]
    assert {(each["mesh"]["tp"], each["sequence_parallel"]) for each in found} == {(1, False), (2, False), (2, True)}
    assert all(each["estimate"]["fits"] and each["seconds_per_million_tokens"] > 0 for each in found)
    assert "3/3 " in done.stderr


def test_wrong_arguments_help_and_version_need_no_torch() -> None:
    calls = {
        "fsdp-runtime 0": ["--version"],
        "--micro-batch": ["estimate", "--help"],
        "has an axis 'dp_shrd'": [*ONE[:-1], "dp_shrd=4"],
        "size 0": [*ONE[:-1], "tp=0"],
        "no unit": [*ONE, "--device-memory", "80"],
        "is not a bandwidth": [*ONE, "--bandwidth", "tp=fast"],
        "invalid _integers value: 'two'": [*MANY, "--cp", "two"],
    }
    program = f"""
import contextlib, sys
from fsdp_runtime.cli import main
for arguments in {list(calls.values())!r}:
    with contextlib.suppress(SystemExit):
        main(arguments)
print("torch" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False", found.stderr
    assert [said for said in calls if said not in found.stdout + found.stderr] == []


def test_verl_check_without_verl_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise check.PackageNotFoundError(name)

    monkeypatch.setattr(check, "version", missing)
    assert cli.main(["verl-check"]) == 1
    assert capsys.readouterr().out == "error   verl is not installed: pip install 'fsdp-runtime[verl]'\n"
