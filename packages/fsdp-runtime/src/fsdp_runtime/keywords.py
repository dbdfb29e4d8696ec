"""The keywords of ``parallelize``: each is a step's value, or a short form of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from fsdp_runtime.errors import OptionError
from fsdp_runtime.step import Step
from fsdp_runtime.steps.checkpointing import ActivationCheckpointing, CheckpointMode
from fsdp_runtime.steps.compile import Compile
from fsdp_runtime.steps.context.methods import Method
from fsdp_runtime.steps.context.step import ContextParallel
from fsdp_runtime.steps.documents.step import PackedSequences
from fsdp_runtime.steps.experts.step import ExpertParallel
from fsdp_runtime.steps.fsdp.step import FSDP2
from fsdp_runtime.steps.tensor.step import Logits, PlanSource, TensorParallel
from fsdp_runtime.values import require_instance, require_one_of


class Options(TypedDict, total=False):
    """The keywords of :func:`fsdp_runtime.parallelize`, for functions that pass them on."""

    plan: PlanSource | TensorParallel
    sequence_parallel: bool
    context_parallel: Method | ContextParallel
    packed_sequences: bool | PackedSequences
    logits: Logits
    activation_checkpointing: CheckpointMode | ActivationCheckpointing
    compile: bool | Mapping[str, Any] | Compile
    fsdp: FSDP2 | None
    steps: Sequence[Step[Any]]


#: For each step the keywords that set its fields; the first one takes the step's value too.
_FIELDS: Mapping[type[Step[Any]], Mapping[str, str]] = {
    PackedSequences: {"packed_sequences": "apart"},
    TensorParallel: {"plan": "plan", "sequence_parallel": "sequence_parallel", "logits": "logits"},
    ExpertParallel: {},
    ContextParallel: {"context_parallel": "method"},
    ActivationCheckpointing: {"activation_checkpointing": "mode"},
    Compile: {"compile": "options"},
    FSDP2: {"fsdp": ""},
}
#: The values of keywords that are left out.
_DEFAULTS: Mapping[str, Any] = {
    "packed_sequences": False,
    "plan": "auto",
    "sequence_parallel": False,
    "logits": "sharded",
    "context_parallel": "allgather",
    "activation_checkpointing": "none",
    "compile": False,
    "fsdp": None,
}


def steps_of(**options: Unpack[Options]) -> tuple[Step[Any], ...]:
    """Return the steps that keywords stand for, with those of ``steps``."""
    for name in options:
        steps = "; other options are fields of the classes in fsdp_runtime.steps"
        require_one_of("keyword", name, Options.__annotations__, or_else=steps)
    require_instance("fsdp", options.get("fsdp"), FSDP2, "FSDP2(...)")
    given = tuple(options.pop("steps", ()))
    for step in given:
        if not isinstance(step, Step):
            raise OptionError(f"steps has {step!r} of type {type(step).__name__}: give steps, such as ExpertParallel()")
    found = [_step(kind, fields, options, given) for kind, fields in _FIELDS.items()]
    others = (step for step in given if not isinstance(step, tuple(_FIELDS)))
    return (*(step for step in found if step is not None), *others)


def _step(
    kind: type[Step[Any]], fields: Mapping[str, str], options: Mapping[str, Any], given: Sequence[Step[Any]]
) -> Any:
    values: list[Any] = [step for step in given if isinstance(step, kind)]
    changed = {name: options[name] for name in fields if name in options and options[name] != _DEFAULTS[name]}
    first = next(iter(fields), None)
    if first in changed and (values or isinstance(changed[first], kind)):
        values.append(changed.pop(first))
    if len(values) > 1:
        raise OptionError(f"{kind.__name__} is given {len(values)} times, by {first or 'steps'}= and steps=: give one")
    if values:
        return replace(values[0], **{fields[name]: value for name, value in changed.items()})
    if kind is FSDP2:
        return FSDP2()
    wanted = {fields[name]: changed.get(name, _DEFAULTS[name]) for name in fields}
    if kind is Compile and isinstance(wanted["options"], bool):
        return Compile() if wanted["options"] else None
    return kind(**wanted)
