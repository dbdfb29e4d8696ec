"""Ranks that were given different models or options all say so, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_runtime import FSDPOptions, MeshSpec, ModelError, OptionError, SelectiveCheckpoint, agreement, parallelize
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.step import Step
from harness.collectives import RecordCollectives
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool


class _OwnStep(Step):
    """A step of a user's, which may hold what is a rank's alone."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()


def _llama(**config: Any) -> nn.Module:
    return tiny_model("LlamaForCausalLM", **config)


def _frozen() -> nn.Module:
    model = _llama()
    model.model.norm.weight.requires_grad_(False)
    return model


def _untied() -> nn.Module:
    model = _llama(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def _drops(probability: float) -> nn.Module:
    model = _llama()
    model.model.layers[0].mlp.act_fn = nn.Dropout(probability)
    return model


#: What the last rank is given in the place of a llama and no options, and what all ranks say.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "an option": (_llama, {"sequence_parallel": True}, "OptionError", "option TensorParallel.sequence_parallel: False"),
    "a value in an option": (
        _llama,
        {"activation_checkpointing": SelectiveCheckpoint(save=("aten.mm",))},
        "OptionError",
        "option ActivationCheckpointing.mode: 'none' on ranks 0, 1, 2, fsdp_runtime.steps.checkpointing.Selective",
    ),
    "another class": (
        lambda: tiny_model("Qwen3ForCausalLM"),
        {},
        "ModelError",
        "model class: transformers.models.llama",
    ),
    "a vocabulary": (lambda: _llama(vocab_size=133), {}, "ModelError", "config vocab_size: 131 on ranks 0, 1, 2, 133 "),
    "more layers": (lambda: _llama(num_hidden_layers=3), {}, "ModelError", "num_hidden_layers: 2 on ranks 0, 1, 2, 3"),
    "a frozen parameter": (_frozen, {}, "ModelError", "parameter model.norm.weight: float64 [64] on ranks 0, 1, 2"),
    "dropout": (lambda: _drops(0.2), {}, "ModelError", "module model.layers.0.mlp.act_fn"),
}


def _said(case: str) -> tuple[str, str, bool]:
    """What a rank says, and whether its model has changed."""
    mesh = mesh_for({"dp_shard": 2, "tp": 2})
    build, options = CASES[case][:2] if dist.get_rank() == 3 else (_llama, {})
    model = build()
    before = [(type(module), len(module._forward_hooks)) for module in model.modules()]
    try:
        parallelize(model, mesh, **options)
    except (ModelError, OptionError) as error:
        after = [(type(module), len(module._forward_hooks)) for module in model.modules()]
        return type(error).__name__, str(error), before != after
    return "", "accepted", True


@pytest.mark.parametrize("case", CASES)
def test_every_rank_names_what_one_rank_was_given(four_ranks: RankPool, case: str) -> None:
    _, _, kind, part = CASES[case]
    for name, message, changed in four_ranks.run(_said, case):
        assert (name, changed) == (kind, False), message
        assert part in message
        assert "on rank 3" in message


def _versions() -> str:
    real = agreement._version
    agreement._version = lambda package: f"{real(package)}+{dist.get_rank()}"
    try:
        parallelize(_llama(), mesh_for({"tp": 2}))
    except OptionError as error:
        return str(error)
    finally:
        agreement._version = real
    return "accepted"


def test_versions_of_packages_are_compared(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_versions):
        assert f"version torch: {torch.__version__}+0 on rank 0, {torch.__version__}+1 on rank 1" in message


def _ties() -> str:
    try:
        parallelize(_llama(tied=True) if dist.get_rank() else _untied(), mesh_for({"tp": 2}))
    except ModelError as error:
        return str(error)
    return "accepted"


def test_ties_are_compared(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_ties):
        assert "lm_head.weight: float64 [131, 64] on rank 0, float64 [131, 64] tied to model.embed_tokens" in message


def _own_steps() -> bool:
    parallelize(_llama(), mesh_for({"tp": 2}), steps=(_OwnStep(),))
    return True


def test_fields_of_a_users_step_may_be_those_of_a_rank(two_ranks: RankPool) -> None:
    assert all(two_ranks.run(_own_steps))


def _devices() -> bool:
    """One rank has data, the others wait for it on the meta device."""
    model = _llama() if dist.get_rank() == 0 else _llama().to("meta")
    groups = [MeshSpec(tp=2).build(device_type="cpu")["tp"].get_group()]
    own = agreement._describe(model, agreement.Meshes(), ())
    return len({str(each) for each in all_gather_objects(ModelRanks(groups), own).values()}) == 1


def test_a_rank_may_have_its_model_on_the_meta_device(two_ranks: RankPool) -> None:
    assert all(two_ranks.run(_devices))


def test_one_process_compares_nothing() -> None:
    with RecordCollectives() as recorded:
        parallelize(_llama(), MeshSpec().build(device_type="cpu"))
    assert not recorded.calls


def test_values_of_options_are_described_alike_in_all_processes() -> None:
    def shard(parameter: nn.Parameter) -> None:
        return None

    assert agreement._text({"b", "a"}) == "{'a', 'b'}"
    assert agreement._text(shard).endswith("shard")
    assert agreement._text(object()) == "builtins.object()"
    assert "mp_policy=None" in agreement._text(FSDPOptions(mp_policy=None))
