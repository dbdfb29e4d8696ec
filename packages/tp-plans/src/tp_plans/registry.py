"""Finding the plan of an architecture by class, qualified name, bare name, model or config."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from tp_plans.errors import UnknownArchitectureError
from tp_plans.families import ARCHITECTURES, Architecture
from tp_plans.plan import Plan

_BY_NAME: dict[str, Architecture] = {
    key: entry for entry in ARCHITECTURES for key in (entry.class_name, entry.model_type)
}


def architectures() -> tuple[Architecture, ...]:
    """Every architecture that has a plan of its own."""
    return ARCHITECTURES


def plan_for(target: object, *, sequence_parallel: bool = False) -> Plan:
    """The plan of an architecture.

    Args:
        target: a class name (``"Qwen3ForCausalLM"``), a qualified one, a ``model_type`` (``"qwen3"``), a model
            class, a model, or a config.  Wrapped and re-created classes are found by the names of their bases,
            then by the config's ``architectures`` and ``model_type``.
        sequence_parallel: also keep the activations between blocks cut on the sequence.

    Raises:
        UnknownArchitectureError: none of the target's names is known; the message lists those tried and the
            nearest known ones.
    """
    names = list(dict.fromkeys(_names(target)))
    for name in names:
        if (entry := _BY_NAME.get(name)) is not None:
            return entry.plan(sequence_parallel=sequence_parallel)
    near = [match for name in names for match in difflib.get_close_matches(name, _BY_NAME, n=2)]
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else "."
    raise UnknownArchitectureError(
        f"no plan is known for {' / '.join(names) or repr(target)}{hint} "
        f"Known: {', '.join(entry.class_name for entry in ARCHITECTURES)}. "
        "Give a plan of your own (a dict of pattern to style), or tp_plans.from_hugging_face(model)."
    )


def _names(target: object) -> Iterator[str]:
    if isinstance(target, str):
        yield target.rpartition(".")[2]
        return
    cls = target if isinstance(target, type) else type(target)
    for base in cls.__mro__[:-1]:
        yield base.__name__
    config: Any = getattr(target, "config", target)
    if isinstance(names := getattr(config, "architectures", None), (list, tuple)):
        yield from (str(name) for name in names)
    if isinstance(model_type := getattr(config, "model_type", None), str):
        yield model_type
