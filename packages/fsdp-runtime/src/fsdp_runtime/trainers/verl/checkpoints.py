"""verl's checkpoints: training states that load on any mesh, Hugging Face weights, and the newest few kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from torch import nn

from fsdp_runtime import load_training_state, load_weights, save_adapter, save_training_state, save_weights
from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded import raise_on_all, world_ranks
from fsdp_runtime.trainers.verl.data_state import deal_anew

_STATE, _HUGGING_FACE, _ADAPTER = "training_state", "huggingface", "lora_adapter"
_DEFAULT = ("model", "optimizer", "extra")


def contents_of(config: Any, name: str) -> list[str]:
    """Return the contents to save or load in verl's checkpoint config."""
    return list((config or {}).get(name, None) or ()) if config is not None else list(_DEFAULT)


class Checkpoints:
    """Saves and loads one engine's state; ``config`` is verl's, or ``None`` for its default."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scheduler: Any, model_config: Any, config: Any, *, dp: int
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._model_config, self._config, self._dp = model_config, config, dp
        self._saved: list[Path] = []

    def save(self, folder: Path, *, step: int, keep: int | None) -> None:
        """Save to a folder; then remove older folders that this process saved.  Collective."""
        contents = contents_of(self._config, "save_contents")
        if "model" in contents:
            save_training_state(
                folder / _STATE,
                self._model,
                self._optimizer if "optimizer" in contents else None,
                step=step,
                scheduler=self._scheduler if "extra" in contents else None,
                extra={"dp": self._dp},
                keep=0,
            )
        if dist.get_rank() == 0:  # first, so that the config has the dtype of the weights that are saved
            target = folder / _HUGGING_FACE
            target.mkdir(parents=True, exist_ok=True)
            generation = self._model_config.get("generation_config", None)
            for part in (self._model_config.get_processor(), self._model_config.hf_config, generation):
                if part is not None:
                    part.save_pretrained(target)
        if "hf_model" in contents:
            save_weights(self._model, folder / _HUGGING_FACE)
        if hasattr(self._model, "peft_config"):
            save_adapter(self._model, folder / _ADAPTER)
        if dist.get_rank() == 0:
            self._saved = [*(saved for saved in self._saved if saved != folder), folder]
            while keep and len(self._saved) > keep:
                shutil.rmtree(self._saved.pop(0), ignore_errors=True)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Load a checkpoint of this engine, saved on any mesh, or the Hugging Face weights of a verl checkpoint."""
        # verl loads its SFT data state later: if it was saved with another number of dp ranks, its files are
        # rewritten.
        contents = contents_of(self._config, "load_contents")
        dp = len(list(folder.glob("data_*.pt")))
        if not (folder / _STATE).is_dir() or "model" not in contents:
            if contents:  # with none, weights, optimizer and schedule stay as they are, as with verl's engine
                self._load_foreign(folder, contents)
        else:
            state = load_training_state(
                folder / _STATE,
                self._model,
                self._optimizer if "optimizer" in contents else None,
                scheduler=self._scheduler if "extra" in contents else None,
            )
            dp = state.extra.get("dp", self._dp)
        if not ray.is_initialized():  # under Ray one process reads all data: no rank has their state
            ranks = world_ranks()
            with raise_on_all(ranks):
                if ranks.is_first:
                    deal_anew(folder, dp, self._dp)

    def _load_foreign(self, folder: Path, contents: list[str]) -> None:
        weights = folder / _HUGGING_FACE
        theirs = sorted(each.name for each in folder.glob("*_world_size_*_rank_*.pt"))
        content = f"{theirs[0]} and others of verl's FSDP engine" if theirs else f"no {_STATE}/ that is to be loaded"
        if not any(weights.glob("*.safetensors")):
            raise CheckpointError(
                f"{folder} has {content}, and no weights in {_HUGGING_FACE}/: save it with "
                "checkpoint.save_contents=[...,hf_model], or merge it by verl.model_merger, and give its "
                f"{_HUGGING_FACE}/ as model.path"
            )
        if {"optimizer", "extra"} & {*contents}:
            raise CheckpointError(
                f"{folder} has {content}: optimizer and schedule cannot be read from it. Load its weights alone by "
                "checkpoint.load_contents=[model], which restarts both"
            )
        if hasattr(self._model, "peft_config"):
            raise CheckpointError(
                f"{folder} has {content}, and {_HUGGING_FACE}/ has an adapter merged into the weights, which would "
                f"count twice: start from model.path with {_ADAPTER}/ as model.lora_adapter_path, or save "
                "checkpoint.save_contents=[model]"
            )
        load_weights(self._model, weights)
