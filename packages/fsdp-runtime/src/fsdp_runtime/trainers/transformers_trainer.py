"""``transformers.Trainer`` on a mesh."""

from __future__ import annotations

import transformers

from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin


class Trainer(MeshTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` for a model that ``parallelize`` has sharded.

    It takes the same arguments, by keyword, and ``mesh``; see :class:`MeshTrainerMixin` for what differs.

    Example:
        Under ``torchrun --nproc-per-node=4``::

            mesh = MeshSpec(dp_shard=2, tp=2).build()
            with meta_device():
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
            parallelize(model, mesh)
            load_weights(model, path)
            trainer = Trainer(model=model, mesh=mesh, args=TrainingArguments(...), train_dataset=dataset)
            trainer.train()
            trainer.save_model("out")
    """
