"""Ranks that were given different models or options all say so, before anything changes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import nn

from fsdp_runtime import (
    FSDP2,
    MeshSpec,
    ModelError,
    OptionError,
    agreement,
    load_weights,
    parallelize,
    save_weights,
)
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.step import Step
from fsdp_runtime.steps import SelectiveCheckpoint
from harness.collectives import RecordCollectives
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool


class _OwnStep(Step[None]):
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
    installed = version("torch")  # without the build, as "+cu130"
    for message in two_ranks.run(_versions):
        assert f"version torch: {installed}+0 on rank 0, {installed}+1 on rank 1" in message


def _ties() -> str:
    try:
        parallelize(_llama(tied=True) if dist.get_rank() else _untied(), mesh_for({"tp": 2}))
    except ModelError as error:
        return str(error)
    return "accepted"


def test_ties_are_compared(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_ties):
        assert "lm_head.weight: float64 [131, 64] on rank 0, float64 [131, 64] tied to model.embed_tokens" in message


def _rank_dependent(name: str) -> str:
    """One rank's model differs in entries of its config, or in the order of its modules."""
    model: Any = _llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "type": "default"})
    config, is_last = model.config, dist.get_rank() == 1
    match name:
        case "order of entries" if is_last:
            config.rope_parameters = dict(reversed(config.rope_parameters.items()))
        case "a set":
            config.kinds = {"b", "a"} if is_last else {"a", "b"}
        case "a save" if is_last:
            config.architectures, config.dtype, config._name_or_path = ["LlamaForCausalLM"], "float64", "here"
        case "a forward with labels" if is_last:
            config.problem_type = "single_label_classification"
        case "another problem type":
            config.problem_type = "regression" if is_last else "single_label_classification"
        case "a dtype that a forward reads":
            config.router_dtype = "float32" if is_last else "float64"
        case "the end of a long list":
            config.layer_types = ["full_attention"] * 20 + ["sliding_attention" if is_last else "full_attention"]
        case "order of modules":
            kinds = ("b", "a") if is_last else ("a", "b")
            model.extra = nn.ModuleDict({kind: nn.Linear(2, 2) for kind in kinds})
    try:
        parallelize(model, mesh_for({"dp_shard": 2}))
    except (ModelError, OptionError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("name", ["order of entries", "a set", "a save", "a forward with labels"])
def test_entries_that_no_forward_reads_may_differ(two_ranks: RankPool, name: str) -> None:
    assert two_ranks.run(_rank_dependent, name) == ["accepted", "accepted"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "another problem type",
            "config problem_type: 'single_label_classification' on rank 0, 'regression' on rank 1",
        ),
        ("a dtype that a forward reads", "config router_dtype: 'float64' on rank 0, 'float32' on rank 1"),
        ("the end of a long list", "'full_attention', 'sliding_attention'] on rank 1"),
        ("order of modules", "modules in another order: number"),
    ],
)
def test_a_message_names_the_first_difference(two_ranks: RankPool, name: str, said: str) -> None:
    for outcome in two_ranks.run(_rank_dependent, name):
        assert outcome.startswith("ModelError: ranks were given different models: ")
        assert said in outcome


#: Prints descriptions of models that code of transformers builds out of sets.
_DESCRIBES = """
import json, sys, transformers
from fsdp_runtime import agreement
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2)
kinds = ["sliding_attention", "full_attention"] * 4
rope = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in kinds}
compass = {"layer_types": kinds, "rope_parameters": rope, "logit_scale": 0.5}
for name, more in {"dory": {}, "cohere_compass_text": compass}.items():
    config = transformers.AutoConfig.for_model(name, **sizes, **more, head_dim=16, vocab_size=131)
    model = transformers.AutoModel.from_config(config)
    print(json.dumps(agreement._describe(model, agreement.Meshes(), ())))
"""


@pytest.mark.slow  # imports torch and transformers twice
def test_descriptions_are_equal_in_processes_that_order_sets_by_other_hashes() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DESCRIBES],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for seed in "12"
    ]
    first, second = (process.communicate()[0] for process in processes)
    assert [json.loads(line)["model"]["class"].rsplit(".")[-1] for line in first.splitlines()] == [
        "DoryModel",
        "CohereCompassTextModel",
    ]
    assert first == second


@contextmanager
def _heard() -> Iterator[list[str]]:
    """The warnings that this rank logs inside the ``with``."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_runtime").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("fsdp_runtime").removeHandler(handler)


def _warnings() -> list[str]:
    with _heard() as heard:
        parallelize(_llama(), mesh_for({"tp": 2}), plan=None)
    return [*heard, str(logging.getLogger("fsdp_runtime.steps.tensor.step").isEnabledFor(logging.WARNING))]


def test_one_rank_logs_a_warning_of_all_ranks(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_warnings)
    assert first == ["plan=None on a mesh with tp=2: every rank of tp computes the same", "True"]
    assert second == ["True"]


class _Unbuildable(transformers.LlamaForCausalLM):
    """A class that its config alone does not build."""

    def __init__(self, config: Any, vocabulary: Any = None) -> None:
        if vocabulary is None:
            raise TypeError("no vocabulary")
        super().__init__(config)


def _warnings_of_loads_and_saves(folder: Path) -> list[str]:
    """Load a checkpoint with a tensor too many and without a head's; then save."""
    torch.manual_seed(0)
    mesh = mesh_for({"dp_shard": 2})
    model = _Unbuildable(_llama().config, vocabulary=())
    model.extra = nn.Linear(4, 2)
    parallelize(model, mesh)
    with _heard() as heard:
        load_weights(model, folder / "weights", new_modules={"extra": 0.02})
        save_weights(model, folder / "saved", dtype=torch.bfloat16, names="model")
    return heard


def test_one_rank_logs_the_warnings_of_loads_and_saves(two_ranks: RankPool, tmp_path: Path) -> None:
    state = {**_llama().state_dict(), "surplus": torch.zeros(2)}
    (tmp_path / "weights").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "weights/model.safetensors")
    first, second = two_ranks.run(_warnings_of_loads_and_saves, tmp_path)
    found = [message.partition(":")[0].partition(" (")[0] for message in first]
    assert found == [
        "the checkpoint lacks extra.weight, extra.bias",
        "the checkpoint has 1 tensors that the model lacks",
        "_Unbuildable cannot be built from its config",
    ]
    assert second == []


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
    assert "mp_policy=None" in agreement._text(FSDP2(mp_policy=None))
