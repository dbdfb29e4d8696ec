"""Finding the plan of an architecture by class, qualified name, bare name, model or config."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tp_plans.errors import PlanError, UnknownArchitectureError, type_name
from tp_plans.infer.complete import with_learned_activations
from tp_plans.infer.full_output import is_read_in_full, with_full_output
from tp_plans.layouts import Replicate
from tp_plans.model_tree import ModelTree
from tp_plans.models import ARCHITECTURES, Architecture
from tp_plans.naming import leaf
from tp_plans.plan import Plan
from tp_plans.styles import RowwiseParallel, Style

_BY_NAME: dict[str, Architecture] = {name: entry for entry in ARCHITECTURES for name in entry.names}
#: By task: the head's name, and its style.  Row-wise, since labels are few; it reads activations in any layout, full
#: or sharded on the sequence, and outputs full plain scores.
_TASK_HEADS: dict[str, tuple[str, Style]] = {
    "ForSequenceClassification": ("score", RowwiseParallel(input_layouts=Replicate())),
    "ForTokenClassification": ("score", RowwiseParallel(input_layouts=Replicate())),
}
_TASK = re.compile(r"(.+?)(For[A-Z]\w+)")


@dataclass(frozen=True)
class _Names:
    """The names of a target: its classes, nearest first, and the names in its config."""

    classes: tuple[str, ...]
    config: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self.classes, *self.config))

    @property
    def task(self) -> tuple[str, str] | None:
        """The model and the task that its nearest class of transformers' naming is for."""
        match_of_class = next((match for name in self.classes if (match := _TASK.fullmatch(name))), None)
        return None if match_of_class is None else (match_of_class[1], match_of_class[2])


def architectures() -> tuple[Architecture, ...]:
    """Every architecture with a plan in this package, then the registered ones.

    Returns:
        The registered architectures, in the order of registration.

    Example:
        >>> import tp_plans
        >>> tp_plans.architectures()[0].class_name
        'LlamaForCausalLM'
    """
    return tuple({id(entry): entry for entry in _BY_NAME.values()}.values())


def register(entry: Architecture) -> None:
    """Make an architecture known in this process, wherever a plan is asked for by name, class, model or config.

    Args:
        entry: its names and capabilities; an entry equal to a known one changes nothing.

    Raises:
        PlanError: it is no :class:`Architecture`, or another one goes by one of its names.

    Example:
        >>> import tp_plans
        >>> tp_plans.register(tp_plans.architectures()[0])  # an equal entry changes nothing
    """
    if not isinstance(entry, Architecture):
        raise PlanError(f"register takes an Architecture, not an object of type {type_name(entry)}")
    for name in entry.names:
        if _BY_NAME.get(name, entry) != entry:
            raise PlanError(
                f"the name {name!r} of {entry.class_name} belongs to {_BY_NAME[name].class_name} already: give the new "
                f"architecture another, or change the known plan with plan_for({name!r}).override(...)"
            )
    for name in entry.names:
        _BY_NAME.setdefault(name, entry)


def architecture_plan(target: object, *, sequence_parallel: bool = False) -> Plan:
    """Return this package's plan of an architecture; for a model, adapted to its config."""
    names = _names(target.model if isinstance(target, ModelTree) else target)
    entry = next((_BY_NAME[name] for name in names if name in _BY_NAME), None) or _of_same_model(names)
    if entry is None:
        raise _unknown(names, target)
    plan = entry.plan(sequence_parallel=sequence_parallel)
    if isinstance(target, ModelTree) or (hasattr(target, "named_modules") and not isinstance(target, type)):
        tree = ModelTree.of(target)
        if not _in_same_place(entry, tree):
            raise UnknownArchitectureError(
                f"{type(tree.model).__name__} keeps its blocks at {tree.decoder}, and the plan of {entry.class_name} "
                f"is for {_blocks(entry)}: give plan_for({entry.class_name!r}) with other names, or "
                "plan_for(model, 'transformers')."
            )
        plan = with_learned_activations(entry.for_model(plan, tree), tree)
        if sequence_parallel and tree.lm_head is not None and is_read_in_full(tree):
            plan = with_full_output(plan, tree)
    if names.task is not None and not entry.class_name.endswith(names.task[1]):
        plan = _for_task(plan, entry, *names.task)
    return plan


def known_by_class(tree: ModelTree) -> bool:
    """Return whether a plan is known for a model's class, or one that it is derived from, and its blocks are there."""
    entries = [_BY_NAME[name] for name in _names(tree.model).classes if name in _BY_NAME]
    return bool(entries) and _in_same_place(entries[0], tree)


def _in_same_place(entry: Architecture, tree: ModelTree) -> bool:
    return not tree.decoder_blocks or any(tree.match([_blocks(entry)])[0])


def _blocks(entry: Architecture) -> str:
    return f"{entry.decoder.root}.{entry.decoder.blocks}"


def _of_same_model(names: _Names) -> Architecture | None:
    """The architecture of the same model for text generation, for a class that is known by its task only."""
    model, task = names.task or ("", "")
    if task not in _TASK_HEADS:
        return None
    return _BY_NAME.get(f"{model}ForConditionalGeneration") or _BY_NAME.get(f"{model}ForCausalLM")


def _for_task(plan: Plan, entry: Architecture, model: str, task: str) -> Plan:
    if task not in _TASK_HEADS:
        raise UnknownArchitectureError(
            f"{model}{task} is {entry.class_name} with another head, which no plan describes: give "
            f"plan_for({entry.class_name!r}).override({{{entry.decoder.lm_head!r}: None, HEAD: STYLE}})"
        )
    head, (path, style) = entry.decoder.lm_head, _TASK_HEADS[task]
    removed: dict[str, Style | None] = {head: None} if head in plan else {}
    rules = plan.override({**removed, path: style})
    return Plan(rules, name=f"{model}{task}", sequence_parallel=plan.sequence_parallel)


def _unknown(names: _Names, target: object) -> UnknownArchitectureError:
    near = [match for name in names for match in difflib.get_close_matches(name, _BY_NAME, n=2)]
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else "."
    return UnknownArchitectureError(
        f"no plan is known for {' / '.join(names) or repr(target)}{hint} "
        f"Known: {', '.join(entry.class_name for entry in architectures())}. "
        "Give a dict of pattern to style, or a model: plan_for(model) takes the plan that transformers ships, else an "
        "inferred and verified one."
    )


def _names(target: object) -> _Names:
    if isinstance(target, str):
        return _Names((leaf(target),), ())
    cls = target if isinstance(target, type) else type(target)
    config: Any = getattr(target, "config", target)
    listed = getattr(config, "architectures", None)
    of_config = [str(name) for name in listed] if isinstance(listed, (list, tuple)) else []
    if isinstance(model_type := getattr(config, "model_type", None), str):
        of_config.append(model_type)
    return _Names(tuple(base.__name__ for base in cls.__mro__[:-1]), tuple(of_config))
