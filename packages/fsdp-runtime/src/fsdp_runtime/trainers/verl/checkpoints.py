"""verl's checkpoints: training states that load on any mesh, and Hugging Face weights.

verl's SFT data state is one file per rank of dp.  verl's sampler deals one permutation: rank r of n reads its rows r,
r + n, and so on.  After as many global batches all ranks together have read the same rows for every n; only the number
of rows per rank differs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn

from fsdp_runtime import load_training_state, load_weights, save_adapter, save_training_state, save_weights
from fsdp_runtime.errors import CheckpointError, OptionError
from fsdp_runtime.sharded import raise_on_all, world_ranks

_STATE, _HUGGING_FACE, _ADAPTER = "training_state", "huggingface", "lora_adapter"
_COUNT = "samples_yielded"  # of torchdata's iterator of batches
_DEALT_TO = "fsdp_runtime_dp"  # of a file that was rewritten; StatefulDataLoader reads its own keys only


def save(engine: Any, folder: Path, *, step: int) -> None:
    """Save an engine's state, as its checkpoint config says.  Collective."""
    model, contents = engine.module, _contents(engine, "save_contents")
    if "model" in contents:
        save_training_state(
            folder / _STATE,
            model,
            engine.optimizer if "optimizer" in contents else None,
            step=step,
            scheduler=engine.lr_scheduler if "extra" in contents else None,
            extra={"dp": engine.get_data_parallel_size()},
            keep=0,
        )
    if dist.get_rank() == 0:  # first, so that the config has the dtype of the weights that are saved
        target, config = folder / _HUGGING_FACE, engine.model_config
        target.mkdir(parents=True, exist_ok=True)
        for part in (config.get_processor(), config.hf_config, config.get("generation_config", None)):
            if part is not None:
                part.save_pretrained(target)
    if "hf_model" in contents:
        save_weights(model, folder / _HUGGING_FACE)
    if hasattr(model, "peft_config"):
        save_adapter(model, folder / _ADAPTER)


def load(engine: Any, folder: Path) -> None:
    """Load a checkpoint of this engine, saved on any mesh, or the Hugging Face weights of a verl checkpoint."""
    # verl loads its SFT data state later: if it was saved with another number of dp ranks, its files are
    # rewritten.
    contents, own_dp = _contents(engine, "load_contents"), engine.get_data_parallel_size()
    dp = len(list(folder.glob("data_*.pt")))
    if not (folder / _STATE).is_dir() or "model" not in contents:
        if contents:  # with none, weights, optimizer and schedule stay as they are, as with verl's engine
            _load_foreign(engine.module, folder, contents)
    else:
        state = load_training_state(
            folder / _STATE,
            engine.module,
            engine.optimizer if "optimizer" in contents else None,
            scheduler=engine.lr_scheduler if "extra" in contents else None,
        )
        dp = state.extra.get("dp", own_dp)
    if not ray.is_initialized():  # under Ray one process reads all data: no rank has their state
        ranks = world_ranks()
        with raise_on_all(ranks):
            if ranks.is_first:
                deal_anew(folder, dp, own_dp)


def _contents(engine: Any, name: str) -> Sequence[str]:
    """Return the contents to save or load: of verl's checkpoint config, or its default without one."""
    config = engine.checkpoint_config
    return ("model", "optimizer", "extra") if config is None else tuple(config.get(name, None) or ())


def _load_foreign(model: nn.Module, folder: Path, contents: Sequence[str]) -> None:
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
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{folder} has {content}, and {_HUGGING_FACE}/ has an adapter merged into the weights, which would "
            f"count twice: start from model.path with {_ADAPTER}/ as model.lora_adapter_path, or save "
            "checkpoint.save_contents=[model]"
        )
    load_weights(model, weights)


def deal_anew(folder: Path, saved: int, dp: int) -> None:
    """Rewrite the files of a checkpoint for ``dp`` ranks; nothing if they fit or are missing.  One process."""
    first = folder / "data_0.pt"
    if not first.is_file():
        return
    try:
        state = torch.load(first, weights_only=True)
    except Exception as error:
        if saved == dp:
            return  # verl reads it as it is
        raise _refused(folder, saved, dp, f"cannot be read ({error})") from error
    saved = state.get(_DEALT_TO, saved) if isinstance(state, dict) else saved
    if saved == dp:
        return
    holders = list(_holders(state))
    if not holders or any(len(holder) > 1 for holder in holders):  # a sampler's own state counts too
        raise _refused(folder, saved, dp, "has a state of another sampler than verl's")
    for holder in holders:
        rows = holder[_COUNT] * saved
        if rows % dp:
            raise _refused(folder, saved, dp, f"counts {rows} rows, which do not divide")
        holder[_COUNT] = rows // dp
    state[_DEALT_TO] = dp
    for rank in reversed(range(dp)):  # the first file comes last: it shows that all files are written
        written = folder / f".data_{rank}.pt"
        torch.save(state, written)
        os.replace(written, folder / f"data_{rank}.pt")


def _holders(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the dicts that count samples; their place depends on the number of workers."""
    if isinstance(state, dict):
        if _COUNT in state:
            yield state
        for value in state.values():
            yield from _holders(value)


def _refused(folder: Path, saved: int, dp: int, why: str) -> OptionError:
    return OptionError(
        f"{folder} was saved with {saved} ranks of dp and this run has {dp}: verl's data_0.pt {why}, so that its loop "
        f"would end early or read samples twice. Resume on a mesh with dp={saved} (tp, cp and ep may change), or move "
        "data_*.pt away, which restarts the data"
    )
