"""A trainer's class, made to train on a mesh."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers import _trl_compat as of_trl
from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin

_DOC = """``{module}.{name}`` on a mesh.

It takes the same arguments, by keyword, ``mesh`` and ``parallelize_kwargs``; see ``MeshTrainerMixin``.
"""


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
    mixin: type = MeshTrainerMixin
    if of_trl.is_trl(trainer_class):
        from fsdp_runtime.trainers.distillation import DistillationMixin
        from fsdp_runtime.trainers.trl_trainers import GeneratingMixin, TrlMixin

        mixin = GeneratingMixin if of_trl.generates(trainer_class) else TrlMixin
        if of_trl.reads_head_weights(trainer_class):
            mixin = DistillationMixin
        if of_trl.is_async_grpo(trainer_class):
            from fsdp_runtime.trainers.async_grpo import AsyncGRPOMixin

            mixin = AsyncGRPOMixin
        elif of_trl.is_gkd(trainer_class):
            from fsdp_runtime.trainers.distillation import GKDMixin

            mixin = GKDMixin
    name = trainer_class.__name__
    doc = _DOC.format(module=trainer_class.__module__.partition(".")[0], name=name)
    return type(name, (mixin, trainer_class), {"__doc__": doc, "__module__": trainer_class.__module__})
