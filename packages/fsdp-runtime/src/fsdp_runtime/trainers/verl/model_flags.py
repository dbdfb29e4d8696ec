"""Checks of the kind of config and of verl's checkpoint config, at start."""

from __future__ import annotations

from typing import Any

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl.config import ELSEWHERE, FsdpRuntimeEngineConfig
from fsdp_runtime.trainers.verl.flags import refuse

_CONTENTS = ("model", "optimizer", "extra", "hf_model")


def require_own_config(config: object) -> None:
    """Check that a config is this engine's."""
    if not isinstance(config, FsdpRuntimeEngineConfig):
        names = ", ".join(f"{theirs} is {ours}" for theirs, ours in ELSEWHERE.items())
        raise OptionError(
            f"the engine's config is a {type(config).__name__}: choose engine=fsdp_runtime (SFT) or "
            f"model_engine=fsdp_runtime (PPO), whose fields have other names: {names}"
        )


def check_checkpoint_flags(config: Any) -> None:
    """Refuse contents of checkpoints that cannot be written."""
    if config is None:
        return
    for name in ("save_contents", "load_contents"):
        contents = list(config.get(name, None) or ())
        if unknown := [each for each in contents if each not in _CONTENTS]:
            raise OptionError(f"checkpoint.{name} has {unknown[0]!r}: write some of {', '.join(_CONTENTS)}")
        if {"optimizer", "extra"} & {*contents} and "model" not in contents:
            raise OptionError(f"checkpoint.{name}={contents} has states of training without 'model': add it")
    refuse("checkpoint.", "CheckpointConfig", config)
