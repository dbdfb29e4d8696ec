"""The keywords of ``parallelize`` stand for steps, whose classes own all options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from inspect import signature
from typing import Any, get_type_hints

import pytest
from torch import nn

from fsdp_runtime import OptionError, parallelize
from fsdp_runtime.dry_run import estimate
from fsdp_runtime.keywords import Options, steps_of
from fsdp_runtime.steps import (
    FSDP2,
    ActivationCheckpointing,
    CheckInputs,
    Compile,
    ContextParallel,
    ExpertParallel,
    PackedSequences,
    SharedPrefixes,
    Step,
    TensorParallel,
)
from harness.models import tiny_config

MOST_KEYWORDS = 9


def test_parallelize_documents_its_keywords() -> None:
    section = (parallelize.__doc__ or "").partition("Args:")[2].partition("Returns:")[0]
    names = list(signature(parallelize).parameters)
    assert re.findall(r"^ {8}(\w+): ", section, re.MULTILINE) == names
    assert names[2:] == list(get_type_hints(Options))
    assert len(get_type_hints(Options)) <= MOST_KEYWORDS


@pytest.mark.parametrize(
    ("keywords", "step"),
    [
        ({"plan": None}, TensorParallel(None)),
        ({"sequence_parallel": True, "logits": "full"}, TensorParallel(sequence_parallel=True, logits="full")),
        ({"plan": TensorParallel(towers="replicated")}, TensorParallel(towers="replicated")),
        (
            {"plan": TensorParallel(towers="replicated"), "sequence_parallel": True},
            TensorParallel(towers="replicated", sequence_parallel=True),
        ),
        ({"plan": (kept := TensorParallel(sequence_parallel=True)), "sequence_parallel": False}, kept),
        ({"context_parallel": "ring"}, ContextParallel("ring")),
        ({"context_parallel": ContextParallel("ring", None)}, ContextParallel("ring", None)),
        ({"context_parallel": None}, ContextParallel()),
        ({"packed_sequences": True}, PackedSequences()),
        ({}, PackedSequences(isolate=False)),
        ({"activation_checkpointing": "block"}, ActivationCheckpointing("block")),
        ({"activation_checkpointing": ActivationCheckpointing("mlp")}, ActivationCheckpointing("mlp")),
        ({"compile": True}, Compile()),
        ({"compile": Compile(async_tensor_parallel=True)}, Compile(async_tensor_parallel=True)),
        ({"fsdp": FSDP2(prefetch_forward=1)}, FSDP2(prefetch_forward=1)),
        ({"fsdp": None}, FSDP2()),
        ({"steps": (ExpertParallel("other"),)}, ExpertParallel("other")),
        ({"steps": (CheckInputs(), SharedPrefixes())}, SharedPrefixes()),
    ],
)
def test_steps_of_a_keyword_are_those_of_its_step(keywords: Any, step: Step[Any]) -> None:
    steps = steps_of(**keywords)
    assert [each for each in steps if type(each) is type(step)] == [step]


def test_steps_of_compile_false_have_no_compile() -> None:
    assert not any(isinstance(step, Compile) for step in steps_of(compile=False))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"steps": (ContextParallel(),)}, "steps has a ContextParallel: use its keyword"),
        ({"steps": (ExpertParallel(), ExpertParallel())}, "steps has 2 times ExpertParallel: give one"),
        ({"compile": {"backend": "eager"}}, "compile=.*eager.*: write True or False, or give a Compile"),
        ({"master_dtype": "fp32"}, "keyword='master_dtype': write one of 'plan'"),
        ({"fsdp": "bf16"}, "fsdp='bf16' is of type str: give FSDP2"),
        ({"steps": "fsdp"}, "steps has 'f' of type str: give steps, such as ExpertParallel()"),
        ({"steps": (None,)}, "steps has None of type NoneType: give steps"),
        ({"steps": (ExpertParallel,)}, "steps has .*ExpertParallel.* of type type: give steps"),
    ],
)
def test_steps_of_refuses(keywords: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        steps_of(**keywords)


@dataclass(frozen=True)
class _Freeze(Step[None]):
    """A step from outside with an option: nothing but this class names it."""

    blocks: int = 1

    def apply(self, model: nn.Module, setup: Any, checked: None) -> None:
        for path in setup.structure.decoder[: self.blocks]:
            model.get_submodule(path).requires_grad_(False)


def test_step_alone_names_its_new_option() -> None:
    config = tiny_config("LlamaForCausalLM")
    assert any("blocks=2" in step.describe() for step in steps_of(steps=(_Freeze(blocks=2),)))
    trained, frozen = (
        estimate(config, {"dp_shard": 2}, seq_len=8, steps=steps).memory.resident.optimizer_state
        for steps in ((), (_Freeze(),))
    )
    assert frozen < trained


@pytest.mark.parametrize("name", ["master_dtype", "offload", "reshard_after_forward"])
def test_estimate_refuses_fields_of_fsdp(name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name} is an option of FSDP2: give it in fsdp="):
        estimate("config.json", {"dp_shard": 2}, seq_len=8, **{name: True})  # type: ignore[arg-type]


def test_estimate_takes_the_options_of_fsdp() -> None:
    config = tiny_config("LlamaForCausalLM")
    sharded, kept = (
        estimate(config, {"dp_shard": 2}, seq_len=8, attention_kernels="none", fsdp=FSDP2(reshard_after_forward=each))
        for each in (True, False)
    )
    assert kept.memory.peak.total > sharded.memory.peak.total
