"""A trainer's class, made to train on a mesh."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers import _trl_compat as of_trl
from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin

_DOC = "It takes the same arguments, by keyword, ``mesh`` and ``parallelize_kwargs``; see ``MeshTrainerMixin``.\n"


@cache
def on_mesh(trainer_class: type) -> Any:
    """Return the class of a transformers or TRL trainer, or of a subclass, for training on a mesh.

    Its instances take the arguments of ``trainer_class`` by keyword, and ``mesh`` and ``parallelize_kwargs`` of
    :class:`MeshTrainerMixin`.  Losses, gradient norms and weights are the same as with the trainer of one process and
    the same samples a step.

    Args:
        trainer_class: a class that derives from ``transformers.Trainer``.

    Raises:
        OptionError: it does not, or TRL's experimental trainer has its own code for the loss or the
            batches.

    Example:
        Under ``torchrun --nproc-per-node=4``::

            mesh = MeshSpec(dp_shard=2, tp=2).build()
            trainer = on_mesh(trl.DPOTrainer)(
                model="Qwen/Qwen3-0.6B", mesh=mesh, args=trl.DPOConfig(...), train_dataset=dataset
            )
            trainer.train()
    """
    if not issubclass(trainer_class, transformers.Trainer):
        raise OptionError(f"{trainer_class!r} does not derive from transformers.Trainer")
    if issubclass(trainer_class, MeshTrainerMixin):
        return trainer_class
    if own := of_trl.own_methods(trainer_class):
        raise OptionError(
            f"{trainer_class.__name__} cannot train on a mesh: {', '.join(own)} would take sharded logits or weights "
            "for full ones, or count every rank of tp as a data-parallel one; use a trainer of trl itself, such as "
            f"trl.{of_trl.nearest(trainer_class)}, or a subclass that leaves these methods as they are there"
        )
    name = trainer_class.__name__
    doc = f"``{trainer_class.__module__.partition('.')[0]}.{name}`` on a mesh.\n\n{_DOC}"
    return type(name, (_mixin(trainer_class), trainer_class), {"__doc__": doc, "__module__": trainer_class.__module__})


def _mixin(trainer_class: type) -> type:
    if not of_trl.modules_of(trainer_class):
        return MeshTrainerMixin
    from fsdp_runtime.trainers.distillation import DistillationMixin, GKDMixin
    from fsdp_runtime.trainers.trl_trainers import GeneratingMixin, TrlMixin

    if of_trl.derives(trainer_class, *of_trl.ASYNC_GRPO):
        from fsdp_runtime.trainers.async_grpo import AsyncGRPOMixin

        return AsyncGRPOMixin
    if of_trl.derives(trainer_class, *of_trl.GKD):
        return GKDMixin
    if of_trl.reads_head_weights(trainer_class):
        return DistillationMixin
    return GeneratingMixin if of_trl.generates(trainer_class) else TrlMixin
