"""The command line: ``tp-plans list | show | check | explain | suggest | verify``.

``list`` and ``show`` of our own plans need no torch.  Other commands and ``hf:NAME`` need torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import tp_plans
from tp_plans.checks import check
from tp_plans.errors import PlanError, TpPlansError, UnknownArchitectureError
from tp_plans.explanation import explain
from tp_plans.infer.experts import with_expert_parallelism
from tp_plans.infer.suggest import suggest
from tp_plans.meta_models import class_of_model_type, meta_model_from_config, meta_model_of_class, model_of
from tp_plans.models import Architecture
from tp_plans.plan import Plan
from tp_plans.registry import architectures
from tp_plans.resolve import plan_for
from tp_plans.text import colorize, short_repr, table
from tp_plans.verification import verify_plan

#: Exit codes: nothing found; something found (errors of a check, a difference); the command could not be carried out.
OK, FOUND, FAILED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
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
    version = f"tp-plans {tp_plans.__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)

    listing = commands.add_parser("list", help="architectures with a plan in this package")
    listing.add_argument("filter", nargs="?", default="", help="show architectures with this in the name or the notes")
    _add_json(listing, "as JSON")
    listing.set_defaults(run=_list)

    show = commands.add_parser("show", help="the plan of an architecture")
    show.add_argument("plan", metavar="PLAN", help="a class name, a model_type, hf:CLASS, or a plan in a .json file")
    _add_sequence_parallel(show)
    _add_json(show, "as JSON, which Plan.from_json reads")
    show.set_defaults(run=_show)

    checking = commands.add_parser(
        "check", help="check a plan against a model, without weights; exit code 1 if it does not fit"
    )
    _add_model(checking)
    _add_plan(checking)
    checking.set_defaults(run=_check)

    explaining = commands.add_parser("explain", help="show the placements and collectives of a plan on a model")
    _add_model(explaining)
    _add_plan(explaining)
    _add_json(explaining, "as JSON")
    explaining.set_defaults(run=_explain)

    suggesting = commands.add_parser("suggest", help="propose a plan from a model's modules, with the doubts about it")
    _add_model(suggesting)
    _add_sequence_parallel(suggesting)
    _add_json(suggesting, "as JSON, which Plan.from_json reads; doubts go to standard error")
    suggesting.set_defaults(run=_suggest)

    verifying = commands.add_parser(
        "verify", help="run a small copy of a model in full and split by a plan; exit code 1 if they differ"
    )
    verifying.add_argument(
        "model",
        metavar="MODEL",
        help="a config.json, the folder of a checkpoint, a class of transformers, or a dotted path to a model or to a "
        "function that returns one",
    )
    verifying.add_argument("--tp", type=int, default=2, help="ranks to split over (default 2)")
    verifying.add_argument(
        "--plan", default="auto", help="a plan in a .json file, a dotted path, or inferred; default: auto"
    )
    _add_sequence_parallel(verifying)
    verifying.set_defaults(run=_verify)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CONFIG_OR_DIR", help="a config.json, or the folder of a checkpoint")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tp", type=int, required=True, help="size of the tensor-parallel axis")
    parser.add_argument("--ep", type=int, default=1, help="size of the expert-parallel axis (default 1)")
    parser.add_argument("--plan", default="auto", help="a plan in a .json file, or a dotted path; default: auto")
    _add_sequence_parallel(parser)


def _add_sequence_parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequence-parallel", action="store_true", help="with sequence parallelism")


def _add_json(parser: argparse.ArgumentParser, how: str) -> None:
    parser.add_argument("--json", action="store_true", help=how)


def _list(options: argparse.Namespace) -> int:
    words = options.filter.lower()
    listed = [each for each in architectures() if words in f"{each.class_name} {each.model_type} {each.notes}".lower()]
    if options.json:
        data = [
            {
                "architecture": entry.class_name,
                "model_type": entry.model_type,
                "sequence_parallel": entry.sequence_parallel,
                "experts": entry.has_experts,
                "notes": entry.notes,
            }
            for entry in listed
        ]
        print(json.dumps(data, indent=2))
    else:
        header = ("architecture", "model type", "TP", "SP", "MoE", "notes")
        _print_lines(table([header, *map(_as_row, listed)]))
        print("\nFor other architectures the plan that transformers ships is used: tp-plans show hf:CLASS")
    return OK


def _as_row(entry: Architecture) -> tuple[str, ...]:
    sp, experts = ("yes" if flag else "no" for flag in (entry.sequence_parallel, entry.has_experts))
    return entry.class_name, entry.model_type, "yes", sp, experts, entry.notes


def _show(options: argparse.Namespace) -> int:
    plan = _plan(options.plan, sequence_parallel=options.sequence_parallel)
    _print_plan(plan, as_json=options.json)
    return OK


def _check(options: argparse.Namespace) -> int:
    model = meta_model_from_config(options.model)
    report = check(_plan_of(model, options), model, tp=options.tp, ep=options.ep)
    kinds = [finding.severity for finding in report.findings]
    lines = str(report).splitlines()
    _print_lines(colorize(kind, line) for kind, line in zip(kinds, lines, strict=False))
    _print_lines(lines[len(kinds) :])
    return FOUND if report.errors else OK


def _explain(options: argparse.Namespace) -> int:
    model = meta_model_from_config(options.model)
    explanation = explain(_plan_of(model, options), model, tp=options.tp, ep=options.ep)
    if options.json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        _print_lines(colorize("" if line.startswith(" ") else "head", line) for line in str(explanation).splitlines())
    return OK


def _suggest(options: argparse.Namespace) -> int:
    suggestion = suggest(meta_model_from_config(options.model), sequence_parallel=options.sequence_parallel)
    _print_plan(suggestion.plan, as_json=options.json)
    for doubt in suggestion.doubts:
        print(f"doubts: {doubt}", file=sys.stderr if options.json else sys.stdout)
    return OK


def _verify(options: argparse.Namespace) -> int:
    model = model_of(options.model)
    plan = plan_for(model, _chosen(options), sequence_parallel=options.sequence_parallel)
    report = verify_plan(model, plan, tp=options.tp)
    print(report)
    return OK if report.right else FOUND


def _plan(name: str, *, sequence_parallel: bool) -> Plan:
    """Return the plan with a name that ``show`` takes."""
    if name.endswith(".json"):
        return _from_file(name)
    if name.startswith("hf:"):
        name = name.removeprefix("hf:")
        return plan_for(meta_model_of_class(name), "transformers", sequence_parallel=sequence_parallel)
    try:
        return plan_for(name, sequence_parallel=sequence_parallel)
    except UnknownArchitectureError as error:
        raise UnknownArchitectureError(f"{error} {_other_command(name, sequence_parallel=sequence_parallel)}") from None


def _other_command(name: str, *, sequence_parallel: bool) -> str:
    """Return a sentence with a command that shows a plan of an architecture that has none here."""
    try:
        name = class_of_model_type(name)
        plan_for(meta_model_of_class(name), "transformers", sequence_parallel=sequence_parallel)
    except ImportError:
        return f"With torch and transformers, tp-plans show hf:{name} looks for a plan that transformers ships."
    except TpPlansError:
        return "transformers ships none either: tp-plans suggest CONFIG_OR_DIR proposes one."
    return f"transformers ships one: tp-plans show hf:{name}."


def _plan_of(model: object, options: argparse.Namespace) -> Plan:
    """Return the plan that ``--plan`` means for a model."""
    if options.ep != 1 and options.tp == 1 and options.plan == "auto":
        return with_expert_parallelism(None, model)
    plan = plan_for(model, _chosen(options), sequence_parallel=options.sequence_parallel)
    return plan if options.ep == 1 else with_expert_parallelism(plan, model)


def _chosen(options: argparse.Namespace) -> Plan | str:
    return _from_file(options.plan) if options.plan.endswith(".json") else str(options.plan)


def _from_file(name: str) -> Plan:
    try:
        text = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the plan {name}: {getattr(error, 'strerror', None) or error}") from error
    return Plan.from_json(text)


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print(plan.to_json())
        return
    print(colorize("head", repr(plan)))
    _print_lines(table([[pattern or "(top)", short_repr(style)] for pattern, style in plan.items()], header=False))


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
