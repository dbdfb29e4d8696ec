"""Config groups of Hydra: ``engine=fsdp_runtime`` and ``model_engine=fsdp_runtime`` need no file.

verl is imported before ``@hydra.main`` runs, so that Hydra finds groups of its ``ConfigStore`` beside verl's files.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from hydra.core.config_store import ConfigStore

from fsdp_runtime.trainers.verl.config import STRATEGY, FsdpRuntimeEngineConfig
from fsdp_runtime.trainers.verl.flags import FLAGS

_HERE = "fsdp_runtime.trainers.verl.config"
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


def engine_node() -> dict[str, Any]:
    """The engine's fields with their defaults."""
    node: dict[str, Any] = {}
    for each in fields(FsdpRuntimeEngineConfig):
        node[each.name] = each.default if each.default is not MISSING else {}
    return node | {"_target_": f"{_HERE}.engine_config", "router_replay": dict(_REPLAY)}


def store_groups() -> None:
    """Put the groups into Hydra's store."""
    store = ConfigStore.instance()
    node = engine_node()
    store.store(group="engine", name=STRATEGY, node=node, provider=STRATEGY)
    choice = {"model_engine": STRATEGY}
    store.store(group="model_engine", name=STRATEGY, package="_global_", node=choice, provider=STRATEGY)
    theirs = {name: None for kind in ("EngineConfig", "FSDPEngineConfig") for name in FLAGS[kind]}
    theirs = {name: value for name, value in theirs.items() if name not in _NOT_THEIRS} | _NESTED
    padding = "${oc.select:actor_rollout_ref.model.use_remove_padding,false}"
    actor = {"use_remove_padding": padding, "grad_clip": None, "ulysses_sequence_parallel_size": 1}
    chunks = {
        "entropy_from_logits_with_chunking": False,
        "entropy_from_logits_chunk_size": 2048,
        "entropy_checkpointing": False,
        "pad_to_length": False,
        "fsdp_config": theirs,
    }
    of_actor = f"actor_rollout_ref.actor.{STRATEGY}"
    own = {"forward_only": True, **{name: f"${{oc.select:{of_actor}.{name}}}" for name in node if _is_copied(name)}}
    _store_role(store, "actor", "Actor", {**actor, **chunks}, ["/optim@optim: fsdp"])
    ulysses = "${oc.select:actor_rollout_ref.actor.ulysses_sequence_parallel_size,1}"
    ref = {**actor, **chunks, "ulysses_sequence_parallel_size": ulysses, STRATEGY: own}
    _store_role(store, "ref", "Actor", ref, [])
    forward = {
        "fsdp": theirs,
        "grad_clip": None,
        "ulysses_sequence_parallel_size": 1,
        "forward_micro_batch_size": "${oc.select:.ppo_micro_batch_size,null}",
        "forward_micro_batch_size_per_gpu": "${oc.select:.ppo_micro_batch_size_per_gpu,null}",
    }
    _store_role(store, "critic", "Critic", forward, ["/optim@optim: fsdp"])


def _is_copied(name: str) -> bool:
    """Whether a reference takes a field from its actor: fields of mesh and options, not fields of training."""
    default = engine_node()[name]
    return name not in _OF_TRAINING and not isinstance(default, dict) and not name.endswith("_per_gpu")


def _store_role(store: ConfigStore, group: str, kind: str, own: dict[str, Any], optim: list[str]) -> None:
    defaults = [dict([each.split(": ")]) for each in (*optim, f"/engine@{STRATEGY}: {STRATEGY}")]
    node = {
        "defaults": [*defaults, group, "_self_"],
        "_target_": f"{_HERE}.FsdpRuntime{kind}Config",
        "strategy": STRATEGY,
        **own,
    }
    store.store(group=group, name=f"{STRATEGY}_{group}", node=node, provider=STRATEGY)
