"""Infer a plan and verify it: a run of a small copy of the model decides each doubt."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tp_plans.checks import check
from tp_plans.errors import CapabilityError, CheckFailedError, ModelError, PlanError, UnknownArchitectureError
from tp_plans.infer.encoder_decoder import token_blocks
from tp_plans.infer.sequence_parallel import with_sequence_parallelism
from tp_plans.infer.stored_parameters import large_patterns
from tp_plans.infer.suggest import Suggestion, suggestion
from tp_plans.infer.towers import with_towers
from tp_plans.model_tree import ModelTree, is_at_or_below
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.styles import ExpertsParallel, RowwiseParallel
from tp_plans.verification.parts import parts_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tp_plans.verification.report import VerificationReport
    from tp_plans.verification.tiny import TinyModel

logger = logging.getLogger(__name__)

#: How often parts that were found wrong are gathered, before an inference is given up.
_ROUNDS = 4
#: Without a mesh, the ranks that a small copy is run on.
_RANKS = 2
_logged: set[str] = set()


@dataclass(frozen=True)
class _Attempt:
    """A model, and the requested form of its plan."""

    tree: ModelTree
    sequence_parallel: bool
    towers_tp: int | None  # the size of the axis where rules for towers are wanted too
    large: Collection[str]  # patterns of parameters that are worth a gather; the small copy uses the model's

    def suggestion(self, gathered: Sequence[str], *, sequence_parallel: bool) -> Suggestion:
        return suggestion(self.tree, sequence_parallel=sequence_parallel, gathered=gathered, large=self.large)

    def plan(self, gathered: Sequence[str], *, gather_blocks: bool | None = None) -> Plan:
        """Return the plan, sequence-parallel if the attempt asks for it and ``gather_blocks`` is given."""
        plan = self.suggestion(gathered, sequence_parallel=False).plan
        if not self.sequence_parallel or gather_blocks is None:
            return plan
        return with_sequence_parallelism(plan, self.tree, gather_blocks=gather_blocks)

    def with_towers(self, plan: Plan, *, among: Sequence[str] | None = None) -> tuple[Plan, tuple[str, ...]]:
        """Return a plan with rules for towers, if the attempt asks for them, and their parts that are split inside."""
        if self.towers_tp is None:
            return plan, ()
        return with_towers(plan, self.tree, tp=self.towers_tp, among=among, large=self.large)


@dataclass(frozen=True)
class _Copy(_Attempt):
    """A small copy of a model, and the ranks that run it: a mesh's ranks, or as many new processes."""

    tiny: TinyModel
    tp: int
    mesh: DeviceMesh | None

    def report(self, plan: Plan) -> VerificationReport:
        from tp_plans.verification.verify import verify_tiny

        return verify_tiny(self.tiny, plan, tp=self.tp, mesh=self.mesh)


def inferred_plan(
    model: Any, *, sequence_parallel: bool, mesh: DeviceMesh | None, towers_tp: int | None = None
) -> Plan:
    """Return an inferred plan that is certain: without doubts, or verified by a run."""
    # Parts that are split wrongly are stored sharded and gathered for their code instead, and the plan is run again. A
    # sequence-parallel plan is always run. All ranks of ``mesh`` call this; ``None`` starts new processes. With
    # ``towers_tp`` verified parts of towers are split inside, and their other layers are stored sharded.
    tree = ModelTree.of(model)
    attempt = _Attempt(tree, sequence_parallel, towers_tp, large_patterns(tree))
    name = type(attempt.tree.model).__name__
    try:
        proposed = attempt.suggestion((), sequence_parallel=sequence_parallel)
    except PlanError as error:
        raise UnknownArchitectureError(f"None can be inferred: {error}") from error
    without_doubts = not proposed.doubts and not sequence_parallel
    if without_doubts:
        plan, split = attempt.with_towers(proposed.plan)
        if not split:
            _log_once(name, "without doubts")
            return plan
    if mesh is not None and not _is_real(mesh):
        _log_once(name, "and not verified, since nothing is computed on a simulated mesh")
        return attempt.with_towers(proposed.plan)[0]
    try:
        plan, how = _verified(attempt, mesh)
    except (CheckFailedError, ModelError, PlanError, ImportError, _NotVerifiedError) as error:
        if without_doubts:
            _log_once(name, "without doubts; the layers of its towers are stored sharded, since it could not be run")
            return attempt.with_towers(proposed.plan, among=())[0]
        doubts = "; ".join(map(str, proposed.doubts)) or "the sequence-parallel form is derived"
        raise UnknownArchitectureError(
            f"A plan can be inferred, and is not certain. Doubts: {doubts}. They could not be decided by running it: "
            f'{error}. Accept them with plan="inferred", or correct plan_for(model, "inferred") and give it'
        ) from error
    _log_once(name, how)
    return plan


class _NotVerifiedError(Exception):
    """A plan stayed wrong."""


def _verified(attempt: _Attempt, mesh: DeviceMesh | None) -> tuple[Plan, str]:
    from tp_plans.verification.ranks import why_no_new_ranks
    from tp_plans.verification.tiny import tiny_model

    if mesh is None and (reason := why_no_new_ranks()) is not None:
        raise _NotVerifiedError(reason)
    tp = _RANKS if mesh is None else mesh.size()
    tiny = tiny_model(attempt.tree.model, tp=tp)
    towers_tp = None if attempt.towers_tp is None else tp
    tree = replace(ModelTree.of(tiny.model), known_decoder=attempt.tree.decoder)  # towers may be larger at small sizes
    small = _Copy(tree, attempt.sequence_parallel, towers_tp, attempt.large, tiny, tp, mesh)
    gathered = _gathered_until_right(attempt, small)
    towers = _right_towers(small, gathered)
    gather_blocks = attempt.sequence_parallel and _must_gather_blocks(small, gathered, towers)
    plan, run = (model.plan(gathered, gather_blocks=gather_blocks) for model in (attempt, small))
    if {p: type(style) for p, style in plan.items()} != {p: type(style) for p, style in run.items()}:
        raise _NotVerifiedError("the small copy gets other rules than the model")
    if towers is not None:
        plan, _ = attempt.with_towers(plan, among=towers)
    how = f"and verified on {tp} ranks by running {type(tiny.model).__name__} {tiny.ran}"
    if gathered:
        how += f"; stored sharded and gathered for use: {', '.join(gathered)}"
    return plan, f"{how}; the sequence is gathered for each entire block" if gather_blocks else how


def _gathered_until_right(attempt: _Attempt, small: _Copy) -> tuple[str, ...]:
    """Return the parts that have to be gathered for the plan without sequence parallelism to be right."""
    gathered: dict[str, None] = {}
    for _ in range(_ROUNDS):
        plan = small.plan((*gathered,))
        unfit = _unfit_parts(attempt.plan((*gathered,)), attempt.tree, small.tp)
        wrong = [*unfit, *_unfit_parts(plan, small.tree, small.tp)]
        why = "its sizes do not fit"
        if not wrong:
            report = small.report(plan)
            wrong, why = [part.where for part in report.wrong], str(report)
            if report.right and not (wrong := _unreached(plan, small.tree, gathered, report)):
                return (*gathered,)
        candidates = (place for place in wrong if place not in gathered)
        newly_gathered = {place: None for place in candidates if _may_be_gathered(place, small.tree)}
        if not newly_gathered:
            raise _NotVerifiedError(why)
        gathered |= newly_gathered
    raise _NotVerifiedError(f"parts stayed wrong after {', '.join(gathered)} were gathered")


def _unreached(plan: Plan, tree: ModelTree, gathered: Collection[str], report: VerificationReport) -> list[str]:
    """Return the parts of blocks that are split and that the loss of the run did not depend on."""
    return [
        place
        for place, rules in parts_of(plan, tree).items()
        if any(isinstance(style, (RowwiseParallel, ExpertsParallel)) for style in rules.values())
        and place not in gathered
        and _may_be_gathered(place, tree)
        and not _is_reached(place, report)
    ]


def _right_towers(small: _Copy, gathered: Sequence[str]) -> tuple[str, ...] | None:
    """Return the parts of towers that are right when split inside, without the parts that no input reaches."""
    # The layers of the others are right when they are stored sharded; ``None`` where they are not.
    plan = small.plan(gathered)
    _, towers = small.with_towers(plan)
    while True:
        tried, _ = small.with_towers(plan, among=towers)
        if tried == plan:
            return None
        report = small.report(tried)
        wrong = [part.where for part in report.wrong]
        right = tuple(
            part
            for part in towers
            if _is_reached(part, report)
            and not any(is_at_or_below(part, place) or is_at_or_below(place, part) for place in wrong)
        )
        if report.right and right == towers:
            return towers
        if not towers:
            return None
        towers = right if len(right) < len(towers) else ()


def _is_reached(part: str, report: VerificationReport) -> bool:
    """Return whether the loss of a run depends on a part, so that the run decides whether the part is right."""
    return any(is_at_or_below(wildcard(path), part) for path in report.gradient_errors)


def _unfit_parts(plan: Plan, tree: ModelTree, tp: int) -> list[str]:
    """Return the parts that do not fit: their sizes do not divide, or a check failed."""
    where = [wildcard(finding.where) for finding in check(plan, tree, tp=tp).errors]
    return [place for place in parts_of(plan, tree) if place and any(is_at_or_below(p, place) for p in where)]


def _may_be_gathered(place: str, tree: ModelTree) -> bool:
    return place == tree.lm_head or any(is_at_or_below(place, wildcard(block)) for block in token_blocks(tree))


def _must_gather_blocks(small: _Copy, gathered: Sequence[str], towers: Sequence[str] | None) -> bool:
    """Return whether the sequence-parallel form has to gather the sequence for entire blocks to be right."""
    name = type(small.tiny.model).__name__
    reports: list[VerificationReport] = []
    for gather_blocks in (False, True):
        try:
            plan = small.plan(gathered, gather_blocks=gather_blocks)
        except (CapabilityError, PlanError) as error:
            if reports:
                break  # this form cannot be derived
            if isinstance(error, CapabilityError):
                raise
            raise CapabilityError(
                f"{name} has no sequence-parallel form: {error}; pass sequence_parallel=False"
            ) from error
        if towers is not None:
            plan, _ = small.with_towers(plan, among=towers)
        reports.append(small.report(plan))
        if reports[-1].right:
            return gather_blocks
    raise CapabilityError(
        f"{name} has no sequence-parallel form that is right. {reports[0]}\nPass sequence_parallel=False: its "
        "tensor-parallel plan is right"
    )


def _is_real(mesh: DeviceMesh) -> bool:
    from tp_plans.verification.ranks import computes, require_axis

    require_axis(mesh)
    return computes(mesh)


def _log_once(name: str, how: str) -> None:
    if name not in _logged:
        _logged.add(name)
        logger.warning("no plan is known for %s: using one that is inferred from its modules, %s", name, how)
