"""What is used of verl, how verl finds the engine, and its config groups; run by ``nox -s verl``, which has verl."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

SFT = ("engine=fsdp_runtime", "engine.tp=2")
PPO = ("model_engine=fsdp_runtime", "actor_rollout_ref.actor.fsdp_runtime.tp=2")


def found(path: str) -> Any:
    """The object at a dotted path."""
    module, names = path, []
    while True:
        try:
            owner: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        owner = getattr(owner, name)
    return owner


def parameters(function: Any) -> tuple[str, ...]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(function)
    return tuple(stars.get(each.kind, "") + each.name for each in signature.parameters.values())


def test_verl_has_the_signatures_that_are_used() -> None:
    from fsdp_runtime.trainers.verl.verl_api import SIGNATURES

    changed = {path: parameters(found(path)) for path in SIGNATURES}
    assert {path: here for path, here in changed.items() if here != SIGNATURES[path]} == {}


def test_engine_takes_the_parameters_of_verls_methods() -> None:
    from fsdp_runtime.trainers.verl.engine import FsdpRuntimeEngine
    from fsdp_runtime.trainers.verl.verl_api import BaseEngine

    for name, method in inspect.getmembers(BaseEngine, inspect.isfunction):
        theirs, ours = parameters(method), parameters(getattr(FsdpRuntimeEngine, name))
        assert [each for each in ours if each in theirs] == [*theirs], name


@pytest.mark.parametrize(
    ("device", "named", "fused"),
    [
        ("cuda", {}, True),
        ("cuda", {"override_optimizer_config": {"eps": 1e-3}}, True),
        ("cuda", {"override_optimizer_config": {"foreach": True}}, None),
        ("cuda", {"optimizer": "SGD"}, None),
        ("cpu", {}, None),
    ],
)
def test_fused_on_gpus_names_torchs_adam_alone(device: str, named: dict[str, Any], fused: bool | None) -> None:
    from verl.workers.config import FSDPOptimizerConfig

    from fsdp_runtime.trainers.verl.model import fused_on_gpus

    given = FSDPOptimizerConfig(lr=1e-3, **named)
    options = fused_on_gpus(given, {device}).override_optimizer_config or {}
    assert options.get("fused") is fused
    assert {**options, "fused": None} == {**named.get("override_optimizer_config", {}), "fused": None}
    assert "fused" not in (given.override_optimizer_config or {})


def test_every_method_of_verls_engine_is_given() -> None:
    from fsdp_runtime.trainers.verl.engine import FsdpRuntimeEngine
    from fsdp_runtime.trainers.verl.verl_api import BaseEngine

    left_to_verl = {"train_batch", "infer_batch", "delta_pin_snapshots"}
    names = {name for name in vars(BaseEngine) if not name.startswith("_")}
    assert {name for name in names if name not in vars(FsdpRuntimeEngine)} == left_to_verl


def test_verl_finds_the_engine_by_its_entry_point() -> None:
    program = (
        "import verl, json; from verl.workers.engine.base import EngineRegistry as R;"
        "print(json.dumps({kind: list(R._engines[kind].get('fsdp_runtime', ())) for kind in R._engines}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.splitlines()[-1] == '{"language_model": ["cuda", "cpu"], "value_model": ["cuda", "cpu"]}'


def composed(file: str, *overrides: str) -> Any:
    """A config of verl's own file, as its command makes it."""
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    import fsdp_runtime.trainers.verl.plugin  # noqa: F401

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose(file, list(overrides))


def dataclass_of(config: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config)


def test_one_changed_line_of_an_sft_command() -> None:
    engine = dataclass_of(composed("sft_trainer_engine", *SFT).engine)
    assert type(engine).__name__ == "FsdpRuntimeEngineConfig"
    assert (engine.strategy, engine.tp, engine.dp_shard, engine.axes.sizes["tp"]) == ("fsdp_runtime", 2, -1, 2)
    assert engine.router_replay.mode == "disabled"


def test_one_changed_line_of_a_ppo_command() -> None:
    from omegaconf import OmegaConf

    sizes = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1")
    more = ("actor_rollout_ref.actor.grad_clip=0.5", "actor_rollout_ref.actor.freeze_vision_tower=True")
    replay = "actor_rollout_ref.actor.fsdp_runtime.router_replay.mode=R2"
    config = composed("ppo_trainer", *PPO, *sizes, *more, replay, "actor_rollout_ref.ref.fsdp_runtime.cp=2")
    actor = dataclass_of(config.actor_rollout_ref.actor)
    assert (actor.strategy, actor.engine.tp, actor.engine.forward_only) == ("fsdp_runtime", 2, False)
    assert (actor.optim.clip_grad, actor.engine.freeze_vision_tower) == (0.5, True)
    assert actor.engine.router_replay.mode == "R2"
    reference = config.actor_rollout_ref.ref
    OmegaConf.set_struct(reference, False)
    reference.ppo_micro_batch_size_per_gpu = 1  # verl's worker moves it there
    for name in [name for name in reference if name.startswith("log_prob_")]:
        reference.pop(name)
    ref = dataclass_of(reference)
    assert (ref.engine.tp, ref.engine.cp, ref.engine.forward_only) == (2, 2, True)
    assert ref.engine.router_replay.mode == "disabled"
    OmegaConf.set_struct(config.critic, False)
    config.critic.model = None  # its checkpoint is not there
    critic = dataclass_of(config.critic)
    assert (critic.strategy, critic.engine.tp, critic.engine.strategy) == ("fsdp_runtime", 1, "fsdp_runtime")


def test_commands_written_for_verls_own_engine_keep_their_settings() -> None:
    from fsdp_runtime import OptionError

    sizes = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1")
    theirs = ("fsdp_config.param_offload=True", "fsdp_config.model_dtype=bf16", "+fsdp_config.mixed_precision.x=1")
    found = [
        composed("ppo_trainer", *PPO, *sizes, "critic.fsdp.optimizer_offload=True", *more)
        for more in (
            [each.replace("fsdp_config", "actor_rollout_ref.actor.fsdp_config") for each in theirs],
            ["actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "actor_rollout_ref.actor.fsdp_runtime.fsdp_size=4"],
            ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
        )
    ]
    actor = dataclass_of(found[0].actor_rollout_ref.actor).engine
    assert (actor.param_offload, actor.model_dtype, actor.tp) == (True, "bf16", 2)
    assert dict(actor.mixed_precision) == {"x": 1}
    assert not actor.wrap_policy.get("min_num_params")
    with pytest.raises(Exception, match=r"fsdp_config.fsdp_size=2 and fsdp_runtime.fsdp_size=4") as refused:
        dataclass_of(found[1].actor_rollout_ref.actor)
    assert isinstance(refused.value.__cause__, OptionError)
    assert found[2].actor_rollout_ref.ref.ulysses_sequence_parallel_size == 2
    critic = found[0].critic
    from omegaconf import OmegaConf

    OmegaConf.set_struct(critic, False)
    critic.model = None  # its checkpoint is not there
    assert dataclass_of(critic).engine.optimizer_offload


def test_another_engines_config_is_refused_with_the_names_here() -> None:
    from verl.workers.config import FSDPEngineConfig

    from fsdp_runtime import OptionError
    from fsdp_runtime.trainers.verl.config import require_own_config

    with pytest.raises(OptionError, match=r"FSDPEngineConfig: choose engine=fsdp_runtime.*tensor_parallel_size is tp"):
        require_own_config(FSDPEngineConfig())
