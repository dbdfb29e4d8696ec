"""Turn a user's ``plan=`` (``"auto"``, a plan, a dict, a dotted path) into a plan."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from tp_plans._validate import require_size
from tp_plans.errors import (
    CapabilityError,
    CustomPlanError,
    PlanError,
    TpPlansError,
    UnknownArchitectureError,
    type_name,
)
from tp_plans.hugging_face import from_hugging_face, style_from_name
from tp_plans.hugging_face.translate import ships_plan_of_blocks
from tp_plans.infer.suggest import suggest
from tp_plans.infer.towers import split_towers
from tp_plans.inner_models import inner_models, plan_around
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.registry import known_by_class, plan_for
from tp_plans.verification.run import inferred_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

_KINDS = "a Plan, a dict of pattern to style, or a dotted path to a dict or to a function that returns one"


def resolve_plan(
    plan: object,
    model: Any,
    *,
    sequence_parallel: bool = False,
    mesh: DeviceMesh | None = None,
    towers_tp: int | None = None,
) -> Plan:
    """The plan that a user's ``plan`` argument means for a model.

    Args:
        plan: ``"auto"`` (the architecture's own plan, else the one that transformers ships for it, else one that is
            inferred, and verified by a run where it has doubts), ``"inferred"`` (the proposal of ``suggest``, with its
            doubts), the name of an architecture, a :class:`Plan`, a dict of pattern to style or style word, or a dotted
            path (``"package.module.name"``) to one of these or to a function that returns one.
        model: the model that the plan is for.
        sequence_parallel: wanted of ``"auto"``; a plan of the user's must then be a sequence-parallel one.
        mesh: the axis whose ranks run a small copy of the model where an inferred plan has doubts, all of which have
            to call this; by default new processes of this machine's CPU do.
        towers_tp: the size of the axis where ``"auto"`` is to shard vision and audio towers too, as
            :func:`tp_plans.split_towers` does; next to an inferred plan they are split inside where that is verified.

    Returns:
        The plan.

    Raises:
        CustomPlanError: the user's plan cannot be used; the message gives the reason.
        UnknownStyleError: it holds a word that names no style.
        UnknownArchitectureError: ``"auto"`` found no plan that is certain or verified.
        CapabilityError: sequence parallelism was asked of a model that has no such form, or the architecture cannot be
            split over as many ranks as ``mesh`` has.
        PlanError: ``towers_tp`` is not a positive number.

    Example:
        >>> import tp_plans
        >>> tp_plans.resolve_plan({"up": "colwise", "down": "rowwise"}, model=None)
        <Plan the custom plan: TP, 2 rules>
    """
    if towers_tp is not None:
        require_size(towers_tp)
    if plan == "auto":
        return _automatic(model, sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
    if plan == "inferred":
        return _with_doubts(model, sequence_parallel=sequence_parallel)
    named = _registered(plan, sequence_parallel=sequence_parallel, tp=_size(mesh))
    custom = _from_value(_imported(plan) if isinstance(plan, str) else plan, plan) if named is None else named
    if sequence_parallel and not custom.sequence_parallel:
        raise CustomPlanError(
            f"sequence_parallel=True was asked, but the plan {custom.name} is not a sequence-parallel one: "
            "build it as Plan(rules, sequence_parallel=True), or leave sequence_parallel off"
        )
    return custom


def _automatic(model: Any, *, sequence_parallel: bool, mesh: DeviceMesh | None, towers_tp: int | None) -> Plan:
    tree = ModelTree.of(model) if hasattr(model, "named_modules") and not isinstance(model, type) else None
    if tree is not None and not known_by_class(tree) and (inner := inner_models(tree)):
        plans = {
            path: _automatic(tree.modules[path], sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
            for path in inner
        }
        return plan_around(plans, tree)
    source = model if tree is None else tree  # which is read once
    try:
        plan = plan_for(source, sequence_parallel=sequence_parallel, tp=_size(mesh))
    except UnknownArchitectureError as unknown:
        try:
            if not ships_plan_of_blocks(source):
                raise PlanError(f"it has no rules for the blocks of {type_name(model)}.")
            plan = from_hugging_face(source, sequence_parallel=sequence_parallel)
        except CapabilityError:
            raise
        except TpPlansError as error:
            try:
                return inferred_plan(source, sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
            except UnknownArchitectureError as uncertain:
                raise UnknownArchitectureError(
                    f"{unknown} Its Hugging Face plan does not serve either: {error} {uncertain}"
                ) from error
        logger.warning("no plan of our own for %s: using the one that transformers ships", type(model).__name__)
    logger.info("tensor-parallel plan: %r", plan)
    return plan if towers_tp is None else split_towers(plan, source, tp=towers_tp)


def _with_doubts(model: Any, *, sequence_parallel: bool) -> Plan:
    suggestion = suggest(model, sequence_parallel=sequence_parallel)
    for doubt in suggestion.doubts:
        logger.warning("the inferred plan was not run, and may be wrong: %s", doubt)
    return suggestion.plan


def _registered(plan: object, *, sequence_parallel: bool, tp: int | None) -> Plan | None:
    """The plan of an architecture that is named by a plain word."""
    if not isinstance(plan, str) or not plan.isidentifier():
        return None
    try:
        return plan_for(plan, sequence_parallel=sequence_parallel, tp=tp)
    except UnknownArchitectureError:
        return None


def _size(mesh: DeviceMesh | None) -> int | None:
    """Return how many ranks a plan is for, where that is known."""
    return None if mesh is None else mesh.size()


def _imported(path: str) -> object:
    """The object at a dotted path, called when it is a function."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise CustomPlanError(f"{path!r} is neither 'auto' nor a dotted path like 'package.module.name'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 (the code of a user may raise anything)
        _fail(path, f"module {module_name!r} cannot be imported:", error)
    try:
        value = getattr(module, attribute)
    except AttributeError as error:
        _fail(path, f"module {module_name!r} has no {attribute!r}:", error)
    if not callable(value):
        return value
    try:
        return value()
    except Exception as error:  # noqa: BLE001
        _fail(path, "calling it without arguments raised", error)


def _fail(path: str, problem: str, error: Exception) -> NoReturn:
    raise CustomPlanError(f"custom plan {path!r}: {problem} {type(error).__name__}: {error}") from error


def _from_value(value: object, given: object) -> Plan:
    name = given if isinstance(given, str) else "the custom plan"
    if isinstance(value, Plan):
        return value
    if not isinstance(value, Mapping):
        raise CustomPlanError(f"{name} is of type {type_name(value)}, not {_KINDS}")
    if not value:
        raise CustomPlanError(f"{name} is an empty dict: it would split nothing")
    rules = {
        pattern: style_from_name(style, where=pattern) if isinstance(style, str) else style
        for pattern, style in value.items()
    }
    try:
        return Plan(rules, name=name)
    except PlanError as error:
        raise CustomPlanError(f"{name}: {error}") from error
