"""The module that verl imports at start: it registers the engines and Hydra's config groups.

``engine=fsdp_runtime`` and ``model_engine=fsdp_runtime`` need no file: verl is imported before ``@hydra.main`` runs, so
that Hydra finds groups of its ``ConfigStore`` beside verl's files.

A plug-in that fails is logged by verl at DEBUG and left out, and the user sees only
"Unknown backend: fsdp_runtime"; ``VERL_USE_EXTERNAL_MODULES=fsdp_runtime.trainers.verl.plugin`` shows the error.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore

from fsdp_runtime.trainers.verl.config import STRATEGY, FsdpRuntimeEngineConfig
from fsdp_runtime.trainers.verl.engine import LanguageModelEngine, ValueModelEngine
from fsdp_runtime.trainers.verl.flags import FLAGS
from fsdp_runtime.trainers.verl.verl_api import EngineRegistry

_CONFIG = "fsdp_runtime.trainers.verl.config"
#: Fields that a reference does not take from its actor.
_OF_TRAINING = {"_target_", "strategy", "forward_only", "param_offload", "optimizer_offload", "offload_policy"}
#: Fields of verl's own engine that its commands do not set there, and fields with subfields.
_NOT_THEIRS = {"_target_", "strategy", "forward_only", "router_replay", "turbo_config", "mixed_precision"}
_NESTED: dict[str, Any] = {"wrap_policy": {"min_num_params": None}, "qat": {"enable": None}}
_REPLAY = {
    "_target_": "verl.workers.config.EngineRouterReplayConfig",
    "mode": "disabled",
    "record_file": None,
    "replay_file": None,
}


def store_groups() -> None:
    """Put the config groups of the engine and of each role into Hydra's store."""
    store = partial(ConfigStore.instance().store, provider=STRATEGY)
    engine = {each.name: {} if each.default is MISSING else each.default for each in fields(FsdpRuntimeEngineConfig)}
    engine |= {"_target_": f"{_CONFIG}.engine_config", "router_replay": _REPLAY}
    store(group="engine", name=STRATEGY, node=engine)
    store(group="model_engine", name=STRATEGY, package="_global_", node={"model_engine": STRATEGY})
    kinds = ("EngineConfig", "FSDPEngineConfig")
    theirs = {name: _NESTED.get(name) for kind in kinds for name in FLAGS[kind] if name not in _NOT_THEIRS}
    role = {"strategy": STRATEGY, "grad_clip": None, "ulysses_sequence_parallel_size": 1}
    actor = {
        **role,
        "_target_": f"{_CONFIG}.FsdpRuntimeActorConfig",
        "use_remove_padding": "${oc.select:actor_rollout_ref.model.use_remove_padding,false}",
        "entropy_from_logits_with_chunking": False,
        "entropy_from_logits_chunk_size": 2048,
        "entropy_checkpointing": False,
        "pad_to_length": False,
        "fsdp_config": theirs,
    }
    of_actor = "oc.select:actor_rollout_ref.actor"
    copied = {
        name: f"${{{of_actor}.{STRATEGY}.{name}}}"
        for name, default in engine.items()
        if name not in _OF_TRAINING and not isinstance(default, dict) and not name.endswith("_per_gpu")
    }
    reference = {
        **actor,
        "ulysses_sequence_parallel_size": f"${{{of_actor}.ulysses_sequence_parallel_size,1}}",
        STRATEGY: {"forward_only": True, **copied},
    }
    critic = {
        **role,
        "_target_": f"{_CONFIG}.FsdpRuntimeCriticConfig",
        "fsdp": theirs,
        "forward_micro_batch_size": "${oc.select:.ppo_micro_batch_size,null}",
        "forward_micro_batch_size_per_gpu": "${oc.select:.ppo_micro_batch_size_per_gpu,null}",
    }
    for group, node in {"actor": actor, "ref": reference, "critic": critic}.items():
        optim = [] if group == "ref" else [{"/optim@optim": "fsdp"}]
        defaults = [*optim, {f"/engine@{STRATEGY}": STRATEGY}, group, "_self_"]
        store(group=group, name=f"{STRATEGY}_{group}", node={"defaults": defaults, **node})


for kind, engine in {"language_model": LanguageModelEngine, "value_model": ValueModelEngine}.items():
    EngineRegistry.register(model_type=kind, backend=STRATEGY, device=["cuda", "cpu"])(engine)
store_groups()
