"""Trainers of transformers and TRL on a model that ``parallelize`` has sharded.

Install what they need with ``pip install fsdp-runtime[trainer]`` (transformers, accelerate and rl-logprobs) or
``fsdp-runtime[trl]`` (TRL and datasets in addition).  Importing ``fsdp_runtime`` imports none of them.

``Trainer``            ``transformers.Trainer``
``SFTTrainer``         ``trl.SFTTrainer``
``GRPOTrainer``        ``trl.GRPOTrainer``
``MeshTrainerMixin``   the part that they share, for trainers of your own
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_runtime.errors import BackendError

if TYPE_CHECKING:
    from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin
    from fsdp_runtime.trainers.transformers_trainer import Trainer
    from fsdp_runtime.trainers.trl_trainers import GRPOTrainer, SFTTrainer

__all__ = ["GRPOTrainer", "MeshTrainerMixin", "SFTTrainer", "Trainer"]

_MODULES = {
    "GRPOTrainer": "trl_trainers",
    "MeshTrainerMixin": "mesh_trainer",
    "SFTTrainer": "trl_trainers",
    "Trainer": "transformers_trainer",
}
_EXTRAS = {"trl_trainers": "trl"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fsdp_runtime"):
            raise
        extra = _EXTRAS.get(module, "trainer")
        raise BackendError(f"{name} needs the package {error.name}: pip install 'fsdp-runtime[{extra}]'") from error
