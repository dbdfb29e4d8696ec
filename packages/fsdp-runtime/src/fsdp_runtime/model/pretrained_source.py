"""The folder that a model's weights came from, and the generation config that it holds."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_runtime._transformers_compat.checkpoints import generation_config, read_generation_settings
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.runtime_state import runtime_state

logger = logging.getLogger(__name__)

#: The files of a checkpoint with generation settings, by name.
GenerationSettings = dict[str, Any]


@dataclass(frozen=True)
class PretrainedSource:
    """The source of a model's weights, recorded by a load."""

    folder: Path | None  # of the checkpoint
    generation: tuple[Any, Any] = (None, None)  # the generation config that the load has set, and the checkpoint's own


def saved_generation(model: Any) -> Any:
    """Return the generation config to save with a transformers model."""
    settings = settings_at_source(model)
    if settings is not None and model.can_generate():
        return generation_config(model, settings, (None, None))[0]
    return getattr(model, "generation_config", None)


def settings_at_source(model: Any) -> GenerationSettings | None:
    """Return the generation settings of a model's source folder, ``None`` after a recorded load."""
    folder = None if runtime_state(model).source else source_folder(model)
    try:
        return None if folder is None else read_generation_settings(folder)
    except CheckpointError as error:  # a save does not fail for it
        logger.warning("%s", error)
        return None


def adopt(model: Any, folder: Path | None, settings: GenerationSettings | None) -> None:
    """Record a checkpoint's folder on the model, and give the model its generation settings; a user's settings stay.

    ``settings`` is ``None`` for a model that is not of transformers.
    """
    state = runtime_state(model)
    earlier = (None, None) if state.source is None else state.source.generation
    merged = getattr(model, "generation_config", None), earlier[1]
    if settings is not None and model.can_generate():
        merged = generation_config(model, settings, earlier)
        model.generation_config = merged[0]
    state.source = PretrainedSource(folder, merged if merged[1] is not None else (None, None))


def source_folder(model: Any) -> Path | None:
    """Return the folder that the weights came from: of the last load, or of the model's ``name_or_path``."""
    source = runtime_state(model).source
    if source is not None and source.folder is not None:
        return source.folder  # type: ignore[no-any-return]
    name = model.config.name_or_path if is_transformers_model(model) else ""
    return Path(name) if name and os.path.isdir(name) else _cached_snapshot(name)


def _cached_snapshot(repository: str) -> Path | None:
    if not repository:
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, allow_patterns=["config.json"], local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None
