"""The command ``fsdp-runtime``: dry runs (``estimate``, ``recipe``); ``verl-check``, what verl finds of the engine."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, TextIO, cast

import fsdp_runtime
from fsdp_runtime.dry_run import Estimate, Sweep, estimate, sweep
from fsdp_runtime.dry_run.parse_args import parse_fsdp, parse_mesh, split_bandwidths
from fsdp_runtime.dry_run.recipe import recipe_sections, recipes
from fsdp_runtime.dry_run.report.charts import chart_picture
from fsdp_runtime.dry_run.report.html import html_report
from fsdp_runtime.dry_run.report.sections import Section, estimate_sections, markdown_lines, sweep_sections, text_lines
from fsdp_runtime.dry_run.step_time import step_time
from fsdp_runtime.errors import EstimateError, FsdpRuntimeError
from tp_plans import Plan, TpPlansError

#: Exit codes: the estimate was made and fits (or no device memory was given); it does not fit; the command failed.
OK, TOO_LARGE, FAILED = 0, 1, 2

#: The given options of a command.  An absent option has the default of the call that takes it.
Given = Mapping[str, Any]
_FSDP = {"master_dtype", "offload", "reshard_after_forward"}
_STEPS = {"sequence_parallel", "activation_checkpointing", "context_parallel"}
_SWEEP = {*signature(sweep).parameters} - {"model", "world_size"}
#: Options that the command itself reads; the others are arguments of ``estimate``.
_COMMAND = {"command", "model", "mesh", "world_size", "sweep", "towers", "lora", "adapters", "json", "html", "png"}
_COMMAND |= {"schedule"} | _FSDP | (_SWEEP - _STEPS)
_RECIPES = {*signature(recipes).parameters}

_DEVICE_MEMORY = "bytes of a GPU: 79GiB for an H100 or A100 of 80 GB; 80GB is 80,000,000,000 bytes, or 74.5 GiB"

#: Candidates of a sweep that are printed.
_MAX_SHOWN = 40
#: Seconds below which the expected time of a command is not shown.
_SHORT = 90.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if an estimate does not fit or ``verl-check`` finds an error, 2 if it failed."""
    given: Given = vars(parser().parse_args(arguments))
    command = given["command"]
    if command == "verl-check":
        return _verl_check()
    progress = ProgressLine()
    try:
        run = _recipe if command == "recipe" else _sweep if "sweep" in given else _estimate
        return run(given, progress)
    except (FsdpRuntimeError, TpPlansError, OSError) as error:
        message = str(error)
    except ImportError as error:
        message = f"{error}: this command needs transformers, pip install 'fsdp-runtime[transformers]'"
    except Exception as error:  # noqa: BLE001  # of a user's function or model; estimate() itself shows its traceback
        last = traceback.extract_tb(error.__traceback__)[-1]
        told = (str(error).splitlines() or [""])[0]
        message = f"{type(error).__name__}: {told} ({last.filename}, line {last.lineno}, in {last.name})"
    progress.close()
    print(f"fsdp-runtime {command}: {message}", file=sys.stderr)
    return FAILED


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    program = argparse.ArgumentParser(prog="fsdp-runtime", description="Train a model on a device mesh.")
    program.add_argument("--version", action="version", version=f"%(prog)s {fsdp_runtime.__version__}")
    commands = program.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "estimate",
        help="memory and traffic of a training step on each rank of a mesh, without a device or weights",
        description="Run a training step on fake tensors and report memory, traffic and work of one rank. "
        "Exit code: 0, 1 if it does not fit --device-memory, 2 for errors.",
        argument_default=argparse.SUPPRESS,
    )
    command.add_argument("model", metavar="CONFIG_OR_DIR", help="a config.json, or a checkpoint's directory")
    command.add_argument("--seq-len", type=int, required=True, metavar="TOKENS", help="tokens per sequence")
    command.add_argument("--micro-batch", type=int, metavar="N", help="sequences per data-parallel rank (default: 1)")
    _add_layout(command)
    _add_training(command)
    _add_machine(command)
    _add_sweep(command)
    output = command.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write JSON; - for standard output instead of the text")
    output.add_argument("--html", metavar="FILE", help="write a page; its charts need fsdp-runtime[charts]")
    output.add_argument("--png", metavar="FILE", help="write the charts; needs fsdp-runtime[charts]")
    _add_recipe(commands)
    commands.add_parser(
        "verl-check",
        help="whether verl finds the engine fsdp_runtime",
        description="Report what verl finds, one line a finding. Exit code: 0, or 1 if there is an error.",
    )
    return program


def _add_recipe(commands: Any) -> None:
    command = commands.add_parser(
        "recipe",
        help="meshes of a number of GPUs that a model fits, with a program that parallelizes it",
        description="Compare the meshes of some GPUs by dry runs. Exit code: 0, 1 if nothing fits, 2 for errors.",
        argument_default=argparse.SUPPRESS,
    )
    command.add_argument("model", metavar="CONFIG_OR_DIR", help="a config.json, or a checkpoint's directory")
    command.add_argument("--gpus", type=int, required=True, metavar="N", help="number of GPUs")
    command.add_argument("--device-memory", "--memory", required=True, metavar="SIZE", help=_DEVICE_MEMORY)
    command.add_argument("--lengths", type=_integers, metavar="TOKENS,...", help="(default: 8192,32768,131072)")
    command.add_argument("--trainings", type=_words, metavar="KIND,...", help="full, lora, qlora (default: full,lora)")
    command.add_argument("--ep", type=_integers, metavar="N,...", help="sizes of ep (default: 8 and 1 for a mixture)")
    command.add_argument("--hardware", help="rates that order meshes by time: A100, H100 (default), H200, B200")
    command.add_argument("--every", action="store_true", help="try every mesh, not up to the first that fits")
    command.add_argument("--workers", type=int, metavar="N", help="parallel dry runs (default: 2)")
    command.add_argument("--markdown", action="store_true", help="print Markdown")


def _recipe(given: Given, progress: ProgressLine) -> int:
    _require_unit(given["device_memory"], "--device-memory")
    answers = recipes(progress=progress, **{name: value for name, value in given.items() if name in _RECIPES})
    progress.close()
    print(*(markdown_lines if "markdown" in given else text_lines)(recipe_sections(answers)), sep="\n")
    return TOO_LARGE if all(each.found.best is None for each in answers) else OK


def _verl_check() -> int:
    from fsdp_runtime.trainers.verl.check import check

    failed = False
    for line in check():
        print(line, flush=True)
        failed |= line.level == "error"
    return TOO_LARGE if failed else OK


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    group.add_argument("--mesh", metavar="AXIS=N,...", help="such as dp_replicate=4,dp_shard=32,tp=8; also cp, ep, pp")
    group.add_argument("--schedule", help="of pp: 1F1B, GPipe, Interleaved1F1B, ...; with --micro-batches")
    group.add_argument("--plan", help="auto, none, hf, a plan in a .json file, or a dotted path")
    group.add_argument("--sequence-parallel", action="store_true", help="shard activations between blocks over tp")
    group.add_argument("--towers", help="vision and audio towers over tp: sharded (default), replicated")
    group.add_argument(
        "--context-parallel", metavar="METHOD", help="allgather (default), ulysses, ring: attention over cp"
    )
    group.add_argument("--rank", type=int, help="the rank to simulate (default: 0, which holds the largest shards)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training step")
    group.add_argument("--activation-checkpointing", metavar="MODE", help="none (default), mlp, selective, block")
    group.add_argument("--dtype", help="dtype of computation: bf16 (default), fp16, fp32, fp64")
    group.add_argument(
        "--master-dtype", help="dtype of parameters, gradients and optimizer state, if different, such as fp32"
    )
    group.add_argument("--frozen-dtype", help="dtype of stored parameters without gradients (default: --dtype)")
    group.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, all else frozen")
    group.add_argument(
        "--keep-gathered",
        dest="reshard_after_forward",
        action="store_false",
        help="keep gathered parameters from forward to backward",
    )
    group.add_argument(
        "--optimizer", help="adamw (default), adamw-fused, -single, -8bit, -bf16, -cpu-offload, sgd, none"
    )
    group.add_argument(
        "--logprobs",
        help="the loss: logits (default), linear, or the dotted path of a function (model, inputs)",
    )
    group.add_argument("--micro-batches", type=int, help="forward and backward passes of a step (default: 1)")
    group.add_argument("--compile", action="store_true", help="leave out results that compiled blocks fuse")
    group.add_argument(
        "--offload-activations", action="store_true", help="keep activations (with block: blocks' inputs) on the host"
    )
    group.add_argument("--no-clip", dest="clip", action="store_false", help="do not clip the gradient norm")
    group.add_argument(
        "--assume-gradients",
        action="store_true",
        help="count gradients and optimizer state of trainable parameters that a text step does not reach, such as a "
        "vision tower's",
    )
    group.add_argument("--routing", help="where the tokens of a mixture go over ep: balanced (default), worst")
    group.add_argument("--offload", action="store_true", help="keep shards and optimizer state on the host")
    group.add_argument("--exact", action="store_true", help="trace every block instead of a few representative ones")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hardware")
    group.add_argument(
        "--device-memory",
        metavar="SIZE",
        help=f"{_DEVICE_MEMORY}: report whether the step fits, and changes that would help",
    )
    group.add_argument("--attention-kernels", help="workspaces of: flash2 (default), flash3, none")
    group.add_argument("--allocator", metavar="OPTIONS", help="as PYTORCH_ALLOC_CONF, such as expandable_segments:True")
    group.add_argument("--hardware", help="A100, H100, H200 or B200: its published rates give the time of a step")
    group.add_argument("--bandwidth", metavar="AXIS=RATE,...", help="per rank, such as tp=450GB/s,dp_shard=400Gb/s")


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "comparison of meshes; --sequence-parallel, --context-parallel and --activation-checkpointing fix these options"
    )
    group.add_argument("--sweep", action="store_true", help="estimate and rank every mesh of this number of ranks")
    group.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: the ranks of --mesh)")
    group.add_argument("--max-tp", type=int, metavar="N", help="ranks per node, the largest tp (default: 8)")
    group.add_argument("--cp", type=_integers, metavar="N,...", help="sizes of cp (default: 1)")
    group.add_argument(
        "--dp-replicate", type=_integers, metavar="N,...", help="numbers of replicas (default: 1, and one per node)"
    )
    group.add_argument("--ep", type=_integers, metavar="N,...", help="sizes of ep (default: 1)")
    group.add_argument("--device-flops", metavar="RATE", help="such as 400TFLOP/s: rank by work as well as traffic")
    group.add_argument("--workers", type=int, metavar="N", help="parallel dry runs (default: 2)")


def _estimate(given: Given, progress: ProgressLine) -> int:
    if "mesh" not in given:
        raise EstimateError(
            "no mesh was given: use --mesh, such as --mesh dp_shard=16,tp=8, or --sweep with --world-size"
        )
    spec = parse_mesh(given["mesh"])
    if "world_size" in given:
        spec = spec.resolve(given["world_size"])
    result = estimate(_model(given), spec, progress=progress, **_options(given))
    progress.close()
    _write(result, [*estimate_sections(result), *_time_sections(result, given.get("hardware"))], given)
    return TOO_LARGE if result.fits is False else OK


def _sweep(given: Given, progress: ProgressLine) -> int:
    if not {"world_size", "mesh"} & given.keys():
        raise EstimateError("the number of ranks is not known: give --world-size, or --mesh")
    ranks = given["world_size"] if "world_size" in given else math.prod(parse_mesh(given["mesh"]).sizes.values())
    options = _options(given) | {name: value for name, value in given.items() if name in _SWEEP}
    if "sequence_parallel" in given:
        options["sequence_parallel"] = (True,)
    for name in {"activation_checkpointing", "context_parallel"} & given.keys():
        options[name] = given[name].split(",")
    result = sweep(_model(given), ranks, progress=progress, **options)
    progress.close()
    _write(result, sweep_sections(result, shown=_MAX_SHOWN), given)
    if not result.estimated:
        return FAILED
    return TOO_LARGE if result.best is None else OK


def _time_sections(result: Estimate, hardware: str | None) -> list[Section]:
    if hardware is None:
        return []
    time = step_time(result, hardware)
    traffic = "".join(f", {axis} {seconds:.3g} s" for axis, seconds in time.traffic.items())
    lines = [
        f"matrix products {time.matmul:.3g} s, attention {time.attention:.3g} s, memory {time.memory:.3g} s{traffic}",
        f"{time.tokens_per_second:,.0f} tokens a second and rank; see step_time for the assumptions",
    ]
    heading = f"Time on {hardware}: at least {time.lower_bound:.3g} s, expected {time.expected:.3g} s"
    return [Section(heading=heading, lines=lines)]


def _model(given: Given) -> Any:
    if "lora" not in given:
        return given["model"]
    from fsdp_runtime.dry_run.build_model import WithAdapters  # torch, where an option needs it

    return WithAdapters(given["model"], given["lora"])


def _options(given: Given) -> dict[str, Any]:
    """Return the arguments of ``estimate`` but for model and mesh."""
    _require_unit(given.get("device_memory"), "--device-memory")
    options = {name: value for name, value in given.items() if name not in _COMMAND}
    if fsdp := {name: given[name] for name in _FSDP & given.keys()}:
        options["fsdp"] = parse_fsdp(given.get("dtype", "bf16"), **fsdp)
    if "optimizer" in given:
        options["optimizer"] = given["optimizer"].replace("-", "_")
    if "schedule" in given:
        from fsdp_runtime.steps import Pipeline  # torch, where an option needs it

        options["steps"] = (Pipeline(given["schedule"], microbatches=options.pop("micro_batches", 1)),)
    if "bandwidth" in given:
        options["bandwidth"] = split_bandwidths(given["bandwidth"])
    return options | {"plan": _plan(given.get("plan", "auto"), given.get("towers", "sharded"))}


def _require_unit(size: str | None, option: str) -> None:
    if size is not None and re.fullmatch(r"[\d.]+", size.strip()):
        raise EstimateError(
            f"{option} {size} has no unit: write {size}GiB, or another size with its unit, such as 80GB"
        )


def _plan(name: str, towers: str) -> Any:
    plan = None if name == "none" else Plan.from_json(Path(name).read_text()) if name.endswith(".json") else name
    if towers == "sharded":
        return plan
    from fsdp_runtime.steps import TensorParallel  # torch, where an option needs it

    return TensorParallel(plan, towers=cast("Any", towers))  # checked by its use


def _words(text: str) -> list[str]:
    return text.split(",")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _write(result: Estimate | Sweep, sections: list[Section], given: Given) -> None:
    if given.get("json") == "-":
        print(result.to_json())
    else:
        print(*text_lines(sections), sep="\n")
        if "json" in given:
            Path(given["json"]).write_text(result.to_json() + "\n")
    if "html" in given:
        Path(given["html"]).write_text(html_report(result), encoding="utf-8")
    if "png" in given:
        Path(given["png"]).write_bytes(chart_picture(result, "png"))


class ProgressLine:
    """Show finished steps on a stream (standard error); called as ``progress(name, done, steps)``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._rewrites = self._stream.isatty()
        self._started = time.monotonic()

    def __call__(self, name: str, done: int, steps: int) -> None:
        """Show that ``done`` of ``steps`` are finished, ``name`` as the last, and the expected time of the rest."""
        # Finished steps give the time, so it is shown from the first step on, for more than a minute.
        rest = (time.monotonic() - self._started) / done * (steps - done) if done else 0.0
        left = f" (about {round(rest / 60)} min left)" if rest >= _SHORT else ""
        line = f"{done}/{steps} {name}{left}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}" if self._rewrites else f"{line}\n", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self._rewrites:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


if __name__ == "__main__":
    sys.exit(main())
