"""Checks of verl's model config and checkpoint config, at start."""

from __future__ import annotations

from typing import Any

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.verl.config import ELSEWHERE, FsdpRuntimeEngineConfig

_CONTENTS = ("model", "optimizer", "extra", "hf_model")


def require_own_config(config: object) -> None:
    """Check that a config is this engine's.

    Raises:
        OptionError: it is that of another engine of verl.
    """
    if not isinstance(config, FsdpRuntimeEngineConfig):
        names = ", ".join(f"{theirs} is {ours}" for theirs, ours in ELSEWHERE.items())
        raise OptionError(
            f"the engine's config is a {type(config).__name__}: choose engine=fsdp_runtime (SFT) or "
            f"model_engine=fsdp_runtime (PPO), whose fields have other names: {names}"
        )


def check_model_flags(model_config: Any) -> None:
    """Refuse the flags of verl's model config that have no counterpart.

    Raises:
        OptionError: one is set; the message has the way out.
    """
    get = model_config.get
    refused = {
        "use_liger": "replaces modules by Liger's kernels: set it to False; losses need no logits here",
        "enable_activation_offload": "is written for verl's own FSDP engine: set it to False, and "
        "enable_gradient_checkpointing=True",
    }
    for name, way in refused.items():
        if get(name, False):
            raise OptionError(f"model.{name}=True {way}")
    if (get("tiled_mlp", None) or {}).get("enabled", False):
        raise OptionError("model.tiled_mlp.enabled=True replaces MLPs: set it to False, and activation_checkpointing")
    if getattr(get("mtp", None), "enable", False):
        raise OptionError("model.mtp.enable=True is Megatron's: set it to False; layers of MTP are not trained here")
    backend = (get("fused_kernel_options", None) or {}).get("impl_backend", "torch")
    if get("use_fused_kernels", False) and backend != "torch":
        raise OptionError(
            f"model.fused_kernel_options.impl_backend={backend!r}: losses come from hidden states by this package's "
            "tiles; write torch"
        )
    if (get("lora", None) or {}).get("rank", 0):
        raise OptionError("model.lora.rank is Megatron's: set model.lora_rank, lora_alpha and target_modules")


def check_checkpoint_flags(config: Any) -> None:
    """Refuse contents of checkpoints that cannot be written.

    Raises:
        OptionError: an entry is unknown, or needs another.
    """
    if config is None:
        return
    for name in ("save_contents", "load_contents"):
        contents = list(config.get(name, None) or ())
        if unknown := [each for each in contents if each not in _CONTENTS]:
            raise OptionError(f"checkpoint.{name} has {unknown[0]!r}: write some of {', '.join(_CONTENTS)}")
        if {"optimizer", "extra"} & {*contents} and "model" not in contents:
            raise OptionError(f"checkpoint.{name}={contents} has states of training without 'model': add it")
    if config.get("async_save", False):
        raise OptionError("checkpoint.async_save=True: states are written before training goes on; set it to False")
    if config.get("save_lora_only", False):
        raise OptionError(
            "checkpoint.save_lora_only=True: lora_adapter/ is written with every checkpoint; for that alone set "
            "checkpoint.save_contents=[]"
        )
