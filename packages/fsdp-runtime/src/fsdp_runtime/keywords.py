"""The keywords of ``parallelize``: each takes a step or its short form."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The keywords of :func:`fsdp_runtime.parallelize`, and of functions that pass them on."""

    plan: PlanSource | TensorParallel
    sequence_parallel: bool
    context_parallel: Method | ContextParallel | None
    packed_sequences: bool | PackedSequences
    logits: Logits
    activation_checkpointing: CheckpointMode | ActivationCheckpointing
    compile: bool | Compile
    fsdp: FSDP2 | None
    steps: Sequence[Step[Any]]


#: The steps with a keyword; ``steps`` does not take them.
_BY_KEYWORD = (PackedSequences, TensorParallel, ContextParallel, ActivationCheckpointing, Compile, FSDP2)


def steps_of(**options: Unpack[Options]) -> tuple[Step[Any], ...]:
    """Return the steps that the keywords select, and the ``steps``."""
    for name in options:
        require_one_of("keyword", name, Options.__annotations__, or_else="; other options are fields of the steps")
    context, fsdp, compiled = (options.get(name) for name in ("context_parallel", "fsdp", "compile"))
    layers = _step(TensorParallel, options.get("plan", "auto"))
    # A keyword with its default does not change the step's field.
    defaults = {"sequence_parallel": False, "logits": "sharded"}
    changes = {name: options[name] for name in defaults if options.get(name, defaults[name]) != defaults[name]}  # type: ignore[literal-required]
    require_instance("fsdp", fsdp, FSDP2, "FSDP2(...)")
    if not isinstance(compiled, bool | Compile | None):
        raise OptionError(f"compile={compiled!r}: write True or False, or give a Compile with these options")
    return (
        _step(PackedSequences, options.get("packed_sequences", False)),
        replace(layers, **changes),
        ContextParallel() if context is None else _step(ContextParallel, context),
        _step(ActivationCheckpointing, options.get("activation_checkpointing", "none")),
        *([Compile() if compiled is True else compiled] if compiled else []),
        FSDP2() if fsdp is None else fsdp,
        *_other_steps(options.get("steps", ())),
    )


def _step(kind: type[Step[Any]], value: Any) -> Any:
    """Return a keyword's value as a step; a short form is the step's first field."""
    return value if isinstance(value, kind) else kind(value)  # type: ignore[call-arg]


def _other_steps(steps: Sequence[Step[Any]]) -> tuple[Step[Any], ...]:
    """Return the checked steps without a keyword; experts are always parallelized over ``ep``."""
    for step in steps:
        if not isinstance(step, Step):
            raise OptionError(f"steps has {step!r} of type {type(step).__name__}: give steps, such as ExpertParallel()")
        if isinstance(step, _BY_KEYWORD):
            name = type(step).__name__
            raise OptionError(f"steps has a {name}: use its keyword, as in context_parallel=ContextParallel('ring')")
    experts = [step for step in steps if isinstance(step, ExpertParallel)]
    if len(experts) > 1:
        raise OptionError(f"steps has {len(experts)} times ExpertParallel: give one")
    return (*steps, *([] if experts else [ExpertParallel()]))
