"""The table of verl's flags is what the engine does: it refuses each refused one, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from verl.trainer.config import CheckpointConfig  # after the check
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.engine import EngineRouterReplayConfig

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl import engine, flags
from fsdp_runtime.trainers.verl.config import (
    FsdpRuntimeActorConfig,
    FsdpRuntimeEngineConfig,
    check_optimizer,
    engine_config,
)

#: The classes whose flags reach the engine or the actor, by the class that has them here.
CLASSES = {
    "EngineConfig": FsdpRuntimeEngineConfig,
    "FSDPEngineConfig": FsdpRuntimeEngineConfig,
    "HFModelConfig": HFModelConfig,
    "ActorConfig": FsdpRuntimeActorConfig,
    "FSDPActorConfig": FsdpRuntimeActorConfig,
    "CheckpointConfig": CheckpointConfig,
    "EngineRouterReplayConfig": EngineRouterReplayConfig,
}
#: Without those that a later verl adds to its actor.
REFUSED = [
    (kind, name)
    for kind, known in flags.FLAGS.items()
    for name in known
    if known[name].state == "refused"
    and (kind != "ActorConfig" or name in {each.name for each in fields(FsdpRuntimeActorConfig)})
]
#: Flags that are not set alone, and what is to have one value.
LEFT = {"_target_", "strategy", "fsdp_config", "wrap_policy"}
TAKEN = [
    (kind, name)
    for kind in CLASSES
    for name, flag in flags.FLAGS[kind].items()
    if flag.state != "refused" and name not in LEFT
]


class Passed(Exception):
    """The checks were passed."""


def defaults(kind: type) -> dict[str, Any]:
    """The defaults that are written as values."""
    return {each.name: each.default for each in fields(kind) if not callable(each.default_factory)}


def numeric(value: object) -> bool:
    return isinstance(value, bool | int | float)


def start(kind: str, settings: Mapping[str, Any]) -> None:
    """Start an engine, or make the actor's config, with flags set."""
    if CLASSES[kind] is FsdpRuntimeActorConfig:
        FsdpRuntimeActorConfig(**{"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, **settings})
        raise Passed
    given: dict[str, Any] = {"HFModelConfig": {}, "CheckpointConfig": {}, "EngineConfig": {}, kind: settings}
    config = engine_config(**given["EngineConfig"], **given.get("FSDPEngineConfig", {}))
    object.__setattr__(config, "router_replay", EngineRouterReplayConfig(**given.get("EngineRouterReplayConfig", {})))
    model = SimpleNamespace(**defaults(HFModelConfig) | {**given["HFModelConfig"]})
    engine.FsdpRuntimeEngine(model, config, None, CheckpointConfig(**given["CheckpointConfig"]))


@pytest.fixture(autouse=True)
def _ends_at_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(config: object) -> None:
        raise Passed

    monkeypatch.setattr(FsdpRuntimeEngineConfig, "axes", property(reached))
    monkeypatch.setattr(engine.verl_api, "enable_full_determinism", lambda seed: None)


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_each_refused_flag_is_refused_by_name(kind: str, name: str) -> None:
    flag = flags.FLAGS[kind][name]
    value: Any = {flag.entry: "set"} if flag.entry else {"min_num_params": 1} if name == "wrap_policy" else True
    with pytest.raises(OptionError, match=flag.path(name)):
        start(kind, {name: value} | ({flag.only_with: True} if flag.only_with else {}))


@pytest.mark.parametrize(("kind", "name"), TAKEN)
def test_no_other_flag_is_refused(kind: str, name: str) -> None:
    default = defaults(CLASSES[kind]).get(name)
    assert name in {each.name for each in fields(CLASSES[kind])}
    if is_dataclass(default) or not isinstance(default, bool | int):
        given: dict[str, Any] = {}  # a value of any other kind means something to verl
    else:
        given = {name: not default if isinstance(default, bool) else default + 1}
    with pytest.raises(Passed):
        start(kind, given)


@pytest.mark.parametrize("name", [name for name, value in defaults(FsdpRuntimeEngineConfig).items() if numeric(value)])
def test_text_for_a_flag_or_a_number_is_refused(name: str) -> None:
    """YAML makes text of what is quoted, and "False" is true to Python."""
    with pytest.raises(OptionError, match=f"^{name}='.*': give .*, without quotes"):
        start("EngineConfig", {name: str(defaults(FsdpRuntimeEngineConfig)[name])})


@pytest.mark.parametrize("name", [name for name, value in defaults(FSDPOptimizerConfig).items() if numeric(value)])
def test_text_for_a_number_of_the_optimizer_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"^optim.{name}='.*': give .*, without quotes"):
        check_optimizer(FSDPOptimizerConfig(**{name: str(defaults(FSDPOptimizerConfig)[name])}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_grad": -1.0}, "clip_grad=-1.0: give a positive norm, or null"),
        ({"clip_grad": 0}, "clip_grad=0: give a positive norm"),
        ({"clip_grad": float("nan")}, "clip_grad=nan"),
        ({"betas": ("0.9", "0.95")}, "betas=.*: give numbers"),
        ({"lr_warmup_steps_ratio": -0.5}, "lr_warmup_steps_ratio=-0.5: give a part"),
        ({"lr_warmup_steps_ratio": 0.1}, "total_training_steps=-1: lr_warmup_steps_ratio needs the number of steps"),
        ({"lr_scheduler_type": "cosine"}, "total_training_steps=-1: lr_scheduler_type=cosine needs"),
    ],
    ids=str,
)
def test_numbers_that_the_optimizer_cannot_mean_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"^optim.{message}"):
        check_optimizer(FSDPOptimizerConfig(**settings))
    check_optimizer(FSDPOptimizerConfig(clip_grad=None, lr_warmup_steps=None))  # type: ignore[arg-type]


def test_settings_of_a_role_and_nested_ones_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"^actor.grad_clip='1.0': give a number"):
        FsdpRuntimeActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, grad_clip="1.0")  # type: ignore[arg-type]
    for given, message in (
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16': give a mapping"),
        ({"mixed_precision": {"parm_dtype": "bf16"}}, "mixed_precision has 'parm_dtype'"),
        ({"sync_dtype": "x"}, "sync_dtype='x' is no dtype"),
    ):
        with pytest.raises(OptionError, match=f"^{message}"):
            start("EngineConfig", given)
    with pytest.raises(OptionError, match=r"^model.lora_rank='4': give a whole number"):
        start("HFModelConfig", {"lora_rank": "4"})


def test_a_flag_of_a_later_verl_is_refused_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(flags.FLAGS["EngineConfig"])
    del known["seed"]
    monkeypatch.setitem(flags.FLAGS, "EngineConfig", known)
    assert "EngineConfig.seed" in flags.unknown_fields()
    with pytest.raises(Passed):
        start("EngineConfig", {"seed": 42})
    with pytest.raises(OptionError, match=r"seed=7 is a flag of this verl that fsdp_runtime does not know.*at 42"):
        start("EngineConfig", {"seed": 7})


def test_every_key_of_verls_commands_is_in_the_table() -> None:
    """The files of verl's own engine; what its trainer moves from one key to another begins with ``log_prob_``."""
    from hydra import compose, initialize_config_module

    known = {name for each in flags.FLAGS.values() for name in each}
    with initialize_config_module("verl.trainer.config", version_base=None):
        ppo, sft = compose("ppo_trainer"), compose("sft_trainer_engine")
    actor, critic = ppo.actor_rollout_ref.actor, ppo.critic
    nodes = [actor, actor.fsdp_config, actor.optim, actor.checkpoint, critic, critic.fsdp, critic.model]
    nodes += [ppo.actor_rollout_ref.ref, ppo.actor_rollout_ref.model, sft.engine, sft.model, sft.optim, sft.checkpoint]
    missing = {name for node in nodes for name in node if name not in known and not name.startswith("log_prob_")}
    assert missing == set()
