"""Trainers of transformers and TRL on a model that ``parallelize`` has sharded.

Install what they need with ``pip install fsdp-runtime[trainer]`` (transformers, accelerate and rl-logprobs) or
``fsdp-runtime[trl]`` (TRL and datasets in addition).  Importing this package imports none of them; the first use of a
name does, and raises ``BackendError`` where one is not installed.

transformers:      ``Trainer``
TRL:               ``SFTTrainer``, ``GRPOTrainer``
Others, your own:  ``MeshTrainerMixin``, the part that the three share
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_runtime._lazy import lazy_names

if TYPE_CHECKING:
    from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin
    from fsdp_runtime.trainers.transformers_trainer import Trainer
    from fsdp_runtime.trainers.trl_trainers import GRPOTrainer, SFTTrainer

__all__ = ["GRPOTrainer", "MeshTrainerMixin", "SFTTrainer", "Trainer"]

_FILES = ("mesh_trainer", "transformers_trainer", "trl_trainers")
_MIXIN, _TRANSFORMERS, _TRL = (
    f"{__name__}.{file}" for file in ("mesh_trainer", "transformers_trainer", "trl_trainers")
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {"GRPOTrainer": _TRL, "MeshTrainerMixin": _MIXIN, "SFTTrainer": _TRL, "Trainer": _TRANSFORMERS},
    extras={_MIXIN: "trainer", _TRANSFORMERS: "trainer", _TRL: "trl"},
)
