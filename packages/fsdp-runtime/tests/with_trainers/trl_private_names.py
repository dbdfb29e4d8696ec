"""What ``_trl_compat`` relies on is there in this release of TRL: ``replaced`` passes over names that are gone.

Run by ``nox -s trainers``, and on each release by ``nox -s versions``.
"""

from __future__ import annotations

import inspect

import pytest
import trl
import trl.trainer.utils

from fsdp_runtime.trainers import _trl_compat
from fsdp_runtime.trainers.distillation import divergence_loss
from fsdp_runtime.trainers.logits import add_fused_lm_head

SCORING = (trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.GRPOTrainer, trl.RLOOTrainer)
GENERATING = (trl.GRPOTrainer, trl.RLOOTrainer, trl.DistillationTrainer)
EVERY = (*SCORING, trl.RewardTrainer, trl.DistillationTrainer)


def _globals(trainer: type) -> set[str]:
    return {name for module in _trl_compat.modules_of(trainer) for name in vars(module)}


@pytest.mark.parametrize("trainer", EVERY, ids=lambda trainer: trainer.__name__)
def test_trainers_load_and_adapt_models_by_these_names(trainer: type) -> None:
    assert {"create_model_from_path", "get_peft_model"} <= _globals(trainer)


@pytest.mark.parametrize("trainer", GENERATING, ids=lambda trainer: trainer.__name__)
def test_trainers_that_generate_gather_by_these_names(trainer: type) -> None:
    assert {"gather_object", "VLLMGeneration"} <= _globals(trainer)
    for name in ("_generate_single_turn", "_generate_and_score_completions"):
        assert callable(getattr(trainer, name))


def test_add_fused_lm_head_has_the_arguments_of_trl() -> None:
    own = trl.trainer.utils.add_fused_lm_head
    assert list(inspect.signature(own).parameters) == list(inspect.signature(add_fused_lm_head).parameters)
    assert all("add_fused_lm_head" in _globals(trainer) for trainer in SCORING)


def test_the_divergence_takes_these_arguments() -> None:
    own = inspect.signature(_trl_compat.global_of(trl.DistillationTrainer, _trl_compat.DIVERGENCE)).parameters
    first = ["student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight"]
    assert (
        list(own)[:6] == list(inspect.signature(divergence_loss).parameters)[:6] == [*first, "completion_mask", "beta"]
    )
    assert set(own) == {*list(own)[:6], "num_items_in_batch", "temperature"} | {
        f"{model}_{part}"
        for model in ("student", "teacher")
        for part in ("lm_head_bias", "logit_scale", "final_logit_softcapping")
    }


def test_references_are_arguments_of_these_trainers() -> None:
    assert [_trl_compat.takes_reference(trainer) for trainer in SCORING] == [False, True, True, False, False]
