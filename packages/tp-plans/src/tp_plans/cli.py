"""The command line: ``tp-plans list | show | check | diff``.

``list``, ``show`` and ``diff`` of our own plans need no torch; ``check`` and ``hf:NAME`` need torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tp_plans.checks import check
from tp_plans.errors import PlanError, TpPlansError
from tp_plans.hugging_face import from_hugging_face
from tp_plans.meta_models import meta_model_from_config, meta_model_of_class
from tp_plans.plan import Plan
from tp_plans.registry import architectures, plan_for
from tp_plans.resolve import resolve_plan

#: Exit codes: nothing found; something found (errors of a check, a difference); the command could not be carried out.
OK, FOUND, FAILED = 0, 1, 2

_COLOURS = {"error": "31", "warning": "33", "-": "31", "+": "32", "head": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 where nothing was found, 1 where a check found errors or two plans differ, 2 where the command failed.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except TpPlansError as error:
        message = str(error)
    except ImportError as error:
        message = f"{error}: this command needs torch and transformers, pip install 'tp-plans[torch]' transformers"
    print(f"tp-plans {options.command}: {message}", file=sys.stderr)
    return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tp-plans", description="Tensor-parallel plans as pure data.")
    commands = parser.add_subparsers(dest="command", required=True)

    listing = commands.add_parser("list", help="the architectures that have a plan of their own")
    listing.add_argument("filter", nargs="?", default="", help="show those whose name or notes contain this")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(run=_list)

    show = commands.add_parser("show", help="the plan of an architecture")
    show.add_argument("plan", metavar="PLAN", help="a class name, a model_type, hf:CLASS, or a plan in a .json file")
    show.add_argument("--sequence-parallel", action="store_true", help="with sequence parallelism")
    show.add_argument("--json", action="store_true", help="as JSON, which Plan.from_json reads")
    show.set_defaults(run=_show)

    checking = commands.add_parser("check", help="whether a plan fits a model, without weights; exit code 1 if not")
    checking.add_argument("model", metavar="CONFIG_OR_DIR", help="a config.json, or the folder of a checkpoint")
    checking.add_argument("--tp", type=int, required=True, help="size of the tensor-parallel axis")
    checking.add_argument("--plan", default="auto", help="a plan in a .json file, or a dotted path; default: auto")
    checking.add_argument("--sequence-parallel", action="store_true", help="with sequence parallelism")
    checking.set_defaults(run=_check)

    difference = commands.add_parser("diff", help="where two plans differ; exit code 1 if they do")
    difference.add_argument("before", metavar="A", help="as for show")
    difference.add_argument("after", metavar="B", help="as for show; hf:CLASS is the plan that transformers ships")
    difference.add_argument("--sequence-parallel", action="store_true", help="of our own plans, with it")
    difference.set_defaults(run=_diff)
    return parser


def _list(options: argparse.Namespace) -> int:
    wanted = options.filter.lower()
    rows = [
        {"architecture": entry.class_name, "model_type": entry.model_type, "notes": entry.notes}
        for entry in architectures()
    ]
    rows = [row for row in rows if wanted in " ".join(row.values()).lower()]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table([["architecture", "model type", "notes"], *(list(row.values()) for row in rows)])
    return OK


def _show(options: argparse.Namespace) -> int:
    plan = _plan(options.plan, sequence_parallel=options.sequence_parallel)
    if options.json:
        print(plan.to_json())
        return OK
    print(_coloured("head", repr(plan)))
    _print_table([[pattern or "(top)", str(style)] for pattern, style in plan.items()], header=False)
    return OK


def _check(options: argparse.Namespace) -> int:
    model = meta_model_from_config(options.model)
    chosen: object = _from_file(options.plan) if options.plan.endswith(".json") else options.plan
    plan = resolve_plan(chosen, model, sequence_parallel=options.sequence_parallel)
    report = check(plan, model, tp=options.tp)
    for finding in report.findings:
        print(_coloured(finding.severity, str(finding)))
    if not report.findings:
        print(report)
    return FOUND if report.errors else OK


def _diff(options: argparse.Namespace) -> int:
    before = _plan(options.before, sequence_parallel=options.sequence_parallel)
    after = _plan(options.after, sequence_parallel=options.sequence_parallel)
    difference = before.diff(after)
    for line in str(difference).splitlines():
        print(_coloured(line[0], line))
    return FOUND if difference else OK


def _plan(name: str, *, sequence_parallel: bool) -> Plan:
    if name.endswith(".json"):
        return _from_file(name)
    if name.startswith("hf:"):
        return from_hugging_face(meta_model_of_class(name.removeprefix("hf:")))
    return plan_for(name, sequence_parallel=sequence_parallel)


def _from_file(name: str) -> Plan:
    try:
        text = Path(name).read_text()
    except OSError as error:
        raise PlanError(f"cannot read the plan {name}: {error.strerror}") from error
    return Plan.from_json(text)


def _print_table(rows: list[list[str]], *, header: bool = True) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(_coloured("head", line) if header and number == 0 else line)


def _coloured(kind: str, text: str) -> str:
    colour = _COLOURS.get(kind)
    return f"\x1b[{colour}m{text}\x1b[0m" if colour and sys.stdout.isatty() else text


if __name__ == "__main__":
    sys.exit(main())
