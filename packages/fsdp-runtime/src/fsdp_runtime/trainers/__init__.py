"""Trainers of transformers and TRL on a model that ``parallelize`` has sharded.

Install their requirements with ``pip install fsdp-runtime[trainer]`` (transformers, accelerate and rl-logprobs) or
``fsdp-runtime[trl]`` (TRL and datasets in addition).  Importing this package imports none of them; the first use of a
name does, and raises ``BackendError`` where a package is missing.

Your own loop:     ``MeshAccelerator``, the Accelerator of accelerate on a mesh
Any trainer:       ``on_mesh``, as in ``on_mesh(trl.DPOTrainer)``; ``MeshTrainerMixin``, their shared part
For short:         ``Trainer``, ``SFTTrainer``, ``GRPOTrainer``: the classes of transformers and TRL
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_runtime._lazy import lazy_names

if TYPE_CHECKING:
    from fsdp_runtime.trainers.factory import on_mesh
    from fsdp_runtime.trainers.mesh_accelerator import MeshAccelerator
    from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin

    GRPOTrainer: Any
    SFTTrainer: Any
    Trainer: Any

__all__ = ["GRPOTrainer", "MeshAccelerator", "MeshTrainerMixin", "SFTTrainer", "Trainer", "on_mesh"]

_FILES = {
    "GRPOTrainer": "trl_classes",
    "MeshAccelerator": "mesh_accelerator",
    "MeshTrainerMixin": "mesh_trainer",
    "SFTTrainer": "trl_classes",
    "Trainer": "transformers_trainer",
    "on_mesh": "factory",
}
_HOMES = {name: f"{__name__}.{file}" for name, file in _FILES.items()}
_EXTRAS = {home: "trl" if home.endswith("trl_classes") else "trainer" for home in _HOMES.values()}
__getattr__, __dir__ = lazy_names(__name__, _HOMES, extras=_EXTRAS)
