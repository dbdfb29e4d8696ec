"""Save and resume a loop on accelerate: models and optimizers as shards, and the accelerator's other state."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_runtime import load_training_state, save_adapter, save_training_state, save_weights
from fsdp_runtime._peft_compat import is_peft_model
from fsdp_runtime.errors import CheckpointError, MismatchError, OptionError
from fsdp_runtime.model import state_entries
from fsdp_runtime.sharded import full_tensors
from fsdp_runtime.trainers._accelerate_compat import further_state

#: The folder of a model's training state, with the model's index from the second on.
STATE_FOLDER = "training_state"

#: The accelerator that the mixin precedes.
_AnyAccelerator: Any = object


class StateMixin(_AnyAccelerator):
    """The methods of ``Accelerator`` that save and load, for models that are sharded; all are collective."""

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save models, optimizers, schedulers, random states and registered objects, to resume on this mesh or another.

        One ``save_training_state`` per model, with the optimizers of its parameters.  The returned folder is
        the same on every rank; ``automatic_checkpoint_naming`` gives it a name.
        """
        if kwargs or not safe_serialization:
            raise OptionError(f"save_state writes safetensors, and takes no {sorted(kwargs) or 'safe_serialization'}")
        if not self.sync_gradients:
            raise OptionError("save_state between micro-batches would lose their gradients: call it after a step")
        parts = self._parts()
        if any(getattr(loader, "use_stateful_dataloader", False) for loader in self._dataloaders):
            raise OptionError("use_stateful_dataloader is not saved on a mesh: resume with skip_first_batches")
        settings = self.project_configuration
        if settings.automatic_checkpoint_naming:
            folder = self._next_folder()
        elif output_dir is None:
            raise OptionError("save_state needs output_dir, or automatic_checkpoint_naming=True")
        else:
            folder = Path(output_dir)
        for name, model, optimizers, rest in parts:
            save_training_state(folder / name, model, optimizers, step=settings.iteration, scheduler=rest, keep=0)
        settings.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load a ``save_state`` folder into prepared objects; random states on the same mesh only.

        Without a folder the newest folder of ``automatic_checkpoint_naming`` is loaded.
        """
        if load_kwargs or kwargs:
            raise OptionError(f"load_state takes no {', '.join(sorted(kwargs)) or 'load_kwargs'} on a mesh")
        parts = self._parts()
        folder = Path(input_dir) if input_dir is not None else self._newest_folder()
        saved = next(index for index in count() if not (folder / _name(index)).is_dir())
        if saved not in (0, len(parts)):
            raise MismatchError(
                f"{len(parts)} models are prepared, and {folder} has the states of {saved}: prepare the models "
                "that were saved, in the same order"
            )
        iterations = [
            load_training_state(folder / name, model, optimizers, scheduler=rest).step
            for name, model, optimizers, rest in parts
        ]
        if len(set(iterations)) > 1:
            raise CheckpointError(f"{folder} has the models' states of saves {iterations}: load another folder")
        self.project_configuration.iteration = iterations[0] + 1

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write files for ``from_pretrained``: weights and config, or the adapters of a ``PeftModel``."""
        if not safe_serialization:
            raise OptionError("safe_serialization=False: weights are written as safetensors")
        own = self.unwrap_model(model)
        if not is_peft_model(own):
            save_weights(own, save_directory, max_shard_size=max_shard_size)
            return
        for adapter in own.peft_config:
            save_adapter(own, Path(save_directory, "" if adapter == "default" else adapter), adapter=adapter)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the full state dict, by the model's own names, in host memory of the main process; elsewhere ``{}``.

        For ``save_pretrained(state_dict=...)``; ``save_model`` writes without gathering.
        """
        entries = state_entries(self.unwrap_model(model))
        kept: dict[str, Tensor] = {}
        for entry, tensor in zip(entries, full_tensors([entry.tensor for entry in entries]), strict=True):
            if self.is_main_process:
                own = tensor.to("cpu", copy=True)
                kept |= dict.fromkeys(entry.names, own)
        return kept

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        """Refused: states are written as shards, so there is no state dict to hand to a hook."""
        raise OptionError("hooks of save_state and load_state are not called on a mesh: keep your files beside")

    register_load_state_pre_hook = register_save_state_pre_hook

    def _parts(self) -> list[tuple[str, nn.Module, list[Optimizer], _Rest | None]]:
        """Return each prepared model's folder, the model and its optimizers; with the first the other state."""
        if not self._models:
            raise OptionError("no model is prepared: call prepare first")
        owner = {id(own): index for index, model in enumerate(self._models) for own in model.parameters()}
        optimizers: list[list[Optimizer]] = [[] for _ in self._models]
        for optimizer in self._optimizers:
            models = {owner.get(id(own), -1) for group in optimizer.param_groups for own in group["params"]}
            if len(models) != 1 or -1 in models:
                raise OptionError(
                    f"{type(optimizer.optimizer).__name__} holds parameters of {len(models)} models: use one a model"
                )
            optimizers[models.pop()].append(optimizer.optimizer)
        return [
            (_name(index), model, optimizers[index], _Rest(self) if index == 0 else None)
            for index, model in enumerate(self._models)
        ]

    def _next_folder(self) -> Path:
        """The next folder by ``automatic_checkpoint_naming``; removes the oldest above ``total_limit``."""
        settings = self.project_configuration
        folder = Path(self.project_dir, "checkpoints", f"checkpoint_{settings.iteration}")
        self.wait_for_everyone()
        known = _numbered(folder.parent)
        if folder in known:
            raise OptionError(f"{folder} exists: set project_configuration.iteration to a number that is free")
        self.wait_for_everyone()  # all ranks have looked
        if self.is_main_process and settings.total_limit is not None:
            for old in known[: max(0, len(known) + 1 - settings.total_limit)]:
                shutil.rmtree(old)
        return folder

    def _newest_folder(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise OptionError("load_state needs input_dir, or automatic_checkpoint_naming=True")
        folders = _numbered(Path(self.project_dir, "checkpoints"))
        if not folders:
            raise CheckpointError(f"{self.project_dir} has no checkpoints")
        return folders[-1]


class _Rest:
    """Further state of an accelerator: schedulers, its count of micro-batches, registered objects."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        prepared = further_state(self.accelerator)
        states = {name: [each.state_dict() for each in objects] for name, objects in prepared.items()}
        return {**states, "step": self.accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        prepared = further_state(self.accelerator)
        for name, objects in prepared.items():
            if len(objects) != len(state[name]):
                raise MismatchError(f"{len(objects)} {name} are prepared, and {len(state[name])} were saved")
        for name, objects in prepared.items():
            for target, saved in zip(objects, state[name], strict=True):
                target.load_state_dict(saved)
        self.accelerator.step = state["step"]


def _name(index: int) -> str:
    return STATE_FOLDER if index == 0 else f"{STATE_FOLDER}_{index}"


def _numbered(folder: Path) -> list[Path]:
    """The folders ``checkpoint_N`` below one, by their number."""
    folders = [each for each in folder.glob("checkpoint_*") if each.name.removeprefix("checkpoint_").isdigit()]
    return sorted(folders, key=lambda each: int(each.name.removeprefix("checkpoint_")))
