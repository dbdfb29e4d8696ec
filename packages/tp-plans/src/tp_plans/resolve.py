"""The plan of a model, from its source: ours, transformers', inferred, or the user's own."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from contextlib import suppress
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
from tp_plans.hugging_face.translate import from_hugging_face, ships_plan_of_blocks
from tp_plans.infer.inner_models import inner_models, plan_around
from tp_plans.infer.suggest import suggest
from tp_plans.infer.towers import split_towers
from tp_plans.infer.without_rowwise import rowwise_free
from tp_plans.model_tree import ModelTree
from tp_plans.plan import Plan
from tp_plans.registry import architecture_plan, known_by_class
from tp_plans.styles.words import style_from_name
from tp_plans.verification.run import inferred_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

_WORDS = ("auto", "own", "transformers", "inferred")
_KINDS = "a Plan, a dict of pattern to style, or a dotted path to a dict or to a function that returns one"


def plan_for(
    model: Any,
    source: object = "auto",
    *,
    sequence_parallel: bool = False,
    rowwise: bool = True,
    mesh: DeviceMesh | None = None,
    towers_tp: int | None = None,
) -> Plan:
    """Return the plan of a model or an architecture.

    Args:
        model: a ``torch.nn.Module`` on any device (meta is enough).  This package's own plans are also found by a class
            name (``"Qwen3ForCausalLM"``), a qualified one, a ``model_type`` (``"qwen3"``), a model class or a config.
            Wrapped and re-created classes are found by the names of their bases, then by the config's
            ``architectures`` and ``model_type``.  A class of the same model for another task gets the plan with that
            task's head.
        source: the origin of the plan:

            - ``"auto"``: the architecture's own plan, else the one that transformers ships, else an inferred one; a run
              of a small copy decides its doubts
            - ``"own"``: the architecture's own plan, adapted to the model's config
            - ``"transformers"``: the plan that transformers ships, merged from all levels of the model, translated and
              completed: attention is sharded by heads, and logits stay sharded on the vocabulary
            - ``"inferred"``: a proposal from the model's modules that is not run; its doubts are logged
              (:func:`tp_plans.infer.suggest` returns them)
            - the name of an architecture, a :class:`Plan`, a dict of pattern to style or style word, or a dotted path
              (``"package.module.name"``) to one of these or to a function that returns one
        sequence_parallel: also shard the activations between blocks on the sequence (arXiv:2205.05198).  A plan of
            yours must then be a sequence-parallel one.
        rowwise: false for a plan without row-wise layers: no activation is a sum over ranks, so that forward results
            equal one process.  Each rank gathers the layer's input and computes some of its output features; stacked
            experts are replicated; gradients are still sums.
        mesh: the axis; its ranks run the small copy of the model, and all of them have to call this.  By default, new
            processes of this machine's CPU run it.
        towers_tp: the size of the axis over which vision and audio towers and projectors are split too: attention in
            heads, MLPs in features; other linear layers are stored sharded, and their outputs gathered.

    Returns:
        The plan.

    Raises:
        UnknownArchitectureError: no own plan is known (the message lists the names tried and the nearest known ones),
            or ``"auto"`` found no plan that is certain or verified.
        CapabilityError: sequence parallelism was asked of a model that has no such form.
        CustomPlanError: a plan of yours cannot be used; the message gives the reason.
        UnknownStyleError: a plan has a word that names no style.
        PlanError: transformers ships no plan, ``towers_tp`` is not a positive number, or a row-wise layer has no form
            without sums.
        ModelError: ``source`` needs a model, and ``model`` is none.

    Example:
        >>> import tp_plans
        >>> plan = tp_plans.plan_for("Qwen3ForCausalLM", sequence_parallel=True)
        >>> plan["model.norm"]
        SequenceParallel(sequence_dim=1, full_output=False)
        >>> tp_plans.plan_for(None, {"up": "colwise", "down": "rowwise"})
        <Plan the custom plan: TP, 2 rules>
    """
    if towers_tp is not None:
        require_size(towers_tp)
    is_model = isinstance(model, ModelTree) or (hasattr(model, "named_modules") and not isinstance(model, type))
    if source == "auto" and is_model:
        plan = _automatic(model, sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
    else:
        plan = _from_source(model, source, sequence_parallel=sequence_parallel)
        plan = plan if towers_tp is None else split_towers(plan, model, tp=towers_tp)
    return plan if rowwise else rowwise_free(plan)


def _from_source(model: Any, source: object, *, sequence_parallel: bool) -> Plan:
    if source in ("auto", "own"):
        return architecture_plan(model, sequence_parallel=sequence_parallel)
    if source == "transformers":
        return from_hugging_face(model, sequence_parallel=sequence_parallel)
    if source == "inferred":
        suggestion = suggest(model, sequence_parallel=sequence_parallel)
        for doubt in suggestion.doubts:
            logger.warning("the inferred plan was not run, and may be wrong: %s", doubt)
        return suggestion.plan
    if isinstance(source, str) and source.isidentifier():
        with suppress(UnknownArchitectureError):
            return architecture_plan(source, sequence_parallel=sequence_parallel)
    plan = _from_value(_imported(source) if isinstance(source, str) else source, source)
    if sequence_parallel and not plan.sequence_parallel:
        raise CustomPlanError(
            f"sequence_parallel=True was asked, but the plan {plan.name} is not a sequence-parallel one: "
            "build it as Plan(rules, sequence_parallel=True), or leave sequence_parallel off"
        )
    return plan


def _automatic(model: Any, *, sequence_parallel: bool, mesh: DeviceMesh | None, towers_tp: int | None) -> Plan:
    tree = ModelTree.of(model)
    if not known_by_class(tree) and (inner := inner_models(tree)):
        plans = {
            path: _automatic(tree.modules[path], sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
            for path in inner
        }
        return plan_around(plans, tree)
    try:
        plan = architecture_plan(tree, sequence_parallel=sequence_parallel)
    except UnknownArchitectureError as unknown:
        try:
            if not ships_plan_of_blocks(tree):
                raise PlanError(f"it has no rules for the blocks of {type_name(tree.model)}.")
            plan = from_hugging_face(tree, sequence_parallel=sequence_parallel)
        except CapabilityError:
            raise
        except TpPlansError as error:
            try:
                return inferred_plan(tree, sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
            except UnknownArchitectureError as uncertain:
                raise UnknownArchitectureError(
                    f"{unknown} Its Hugging Face plan does not serve either: {error} {uncertain}"
                ) from error
        name = type(tree.model).__name__
        logger.warning("%s: using the plan that transformers ships, corrected and completed", name)
    logger.info("tensor-parallel plan: %r", plan)
    return plan if towers_tp is None else split_towers(plan, tree, tp=towers_tp)


def _imported(path: str) -> object:
    """The object at a dotted path, called when it is a function."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise CustomPlanError(
            f"{path!r} is none of {', '.join(map(repr, _WORDS))}, no known architecture, and no dotted path "
            "like 'package.module.name'"
        )
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


def _from_value(value: object, source: object) -> Plan:
    name = source if isinstance(source, str) else "the custom plan"
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
