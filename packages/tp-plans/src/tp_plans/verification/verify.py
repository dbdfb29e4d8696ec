"""Decide whether a plan is right by running it: in full and split, on tiny weights, outputs and all gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tp_plans.checks import check
from tp_plans.model_tree import ModelTree, parent
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.verification.compare import Differences, Reference, compare, first_reference_run
from tp_plans.verification.parts import part_of, parts_of
from tp_plans.verification.ranks import on_new_ranks, on_ranks_of
from tp_plans.verification.report import GRADIENT_BOUND, OUTPUT_BOUND, VerificationReport, WrongPart, differences
from tp_plans.verification.tiny import TinyModel


def verify_tiny(
    tiny: TinyModel, plan: Plan, *, tp: int, inputs: Mapping[str, Any] | None = None, mesh: DeviceMesh | None = None
) -> VerificationReport:
    """Verify a plan on a model that is small enough to run: see :func:`tp_plans.verify_plan`."""
    check(plan, tiny.model, tp=tp).raise_on_error()
    device = "cpu" if mesh is None else mesh.device_type
    tiny.model.to(device)
    reference = first_reference_run(tiny.model, inputs, device=device)

    def attempt(plans: Sequence[Plan]) -> list[Differences]:
        def work(ranks: DeviceMesh) -> list[Differences]:
            results: list[Differences] = []
            for candidate in tried:
                if results and results[-1].error:
                    break
                results.append(compare(reference, candidate, ranks))
            return results

        outcomes: list[Differences] = []
        while tried := plans[len(outcomes) :]:  # after an error ranks may be out of step: go on with new ones
            ranks = on_new_ranks(work, tp) if mesh is None else on_ranks_of(mesh, work)
            outcomes += map(_worst, zip(*ranks, strict=False))
        return outcomes

    (result,) = attempt([plan])
    wrong = () if _is_right(result) else tuple(_wrong_parts(plan, reference, result, attempt))
    ran = f"{type(tiny.model).__name__} {tiny.ran}"
    return VerificationReport(plan.name, tp, ran, result.output_error, result.gradient_errors, wrong, result.error)


def _worst(ranks: Sequence[Differences]) -> Differences:
    """Join the ranks' results: the first error, and the largest of every number."""
    errors: dict[str, float] = defaultdict(float)
    for result in ranks:
        for path, error in result.gradient_errors.items():
            errors[path] = max(errors[path], error)
    raised = [result.error for result in ranks if result.error]
    raised.sort(key=lambda error: "gloo" in error)  # of a rank that lost its peer: a consequence
    return Differences(max(result.output_error for result in ranks), dict(errors), raised[0] if raised else "")


def _is_right(result: Differences) -> bool:
    errors = result.gradient_errors.values()
    return not result.error and result.output_error <= OUTPUT_BOUND and all(error <= GRADIENT_BOUND for error in errors)


def _wrong_parts(
    plan: Plan, reference: Reference, result: Differences, attempt: Callable[[Sequence[Plan]], list[Differences]]
) -> list[WrongPart]:
    """Return the parts that are wrong if split alone; if there is none, the parts with wrong gradients."""
    tree = ModelTree.of(reference.model)
    parts = parts_of(plan, tree)
    if not plan.sequence_parallel:
        alone = dict(zip(parts, attempt(list(parts.values())), strict=True))
        wrong = [_wrong_part(place, parts[place], tree, each) for place, each in alone.items() if not _is_right(each)]
        if wrong:
            return wrong
    if result.error:
        return []
    places: dict[str, dict[str, float]] = defaultdict(dict)
    for path, error in result.gradient_errors.items():
        if not error <= GRADIENT_BOUND:
            places[part_of(path, tree)][path] = error
    return [
        WrongPart(place, tuple(parts.get(place, ())), differences(0.0, errors)) for place, errors in places.items()
    ] or [WrongPart("", tuple(plan), differences(result.output_error, {}))]


def _wrong_part(place: str, rules: Plan, tree: ModelTree, result: Differences) -> WrongPart:
    if result.error:
        return WrongPart(place, tuple(rules), f"raised {result.error}")
    own = {path: error for path, error in result.gradient_errors.items() if part_of(path, tree) == place}
    beyond = [path for path, error in own.items() if not error <= GRADIENT_BOUND]
    if result.output_error <= OUTPUT_BOUND and beyond:
        planned = PlannedTree(tree, rules)
        named = (planned.rule(path) or planned.rule(parent(path)) for path in beyond)
        return WrongPart(place, tuple(dict.fromkeys(rule for rule in named if rule)), differences(0.0, own))
    return WrongPart(place, tuple(rules), differences(result.output_error, own if beyond else result.gradient_errors))
