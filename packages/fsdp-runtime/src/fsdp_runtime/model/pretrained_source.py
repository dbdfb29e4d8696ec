"""The folder that a model's weights came from, and the generation config that it holds."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_runtime._transformers_compat.generation import generation_config, read_generation_settings
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.runtime_state import runtime_state

logger = logging.getLogger(__name__)

#: The files of a checkpoint with generation settings, by name.
GenerationSettings = dict[str, Any]


@dataclass(frozen=True)
class PretrainedSource:
    """Record of a load on the model."""

    folder: Path | None  # of the checkpoint
    generation: tuple[Any, Any] = (None, None)  # the generation config that the load has set, and the checkpoint's own


def generates(model: Any) -> bool:
    """Return True for a model of transformers that has ``generate``."""
    return is_transformers_model(model) and bool(model.can_generate())


def generation_config_of(model: Any, settings: GenerationSettings | None) -> Any:
    """Return the model's generation config, with the checkpoint's settings wherever the user has set none."""
    return _merged(model, settings)[0]


def _merged(model: Any, settings: GenerationSettings | None) -> tuple[Any, Any]:
    """Return the config of :func:`generation_config_of`, and the checkpoint's own, if it was used."""
    source = runtime_state(model).source
    adopted = (None, None) if source is None else source.generation
    if settings is None or not generates(model):
        return getattr(model, "generation_config", None), adopted[1]
    return generation_config(model, settings, adopted)


def settings_at_source(model: Any) -> GenerationSettings | None:
    """Return the generation settings of the folder that a model came from other than by a recorded load."""
    folder = None if runtime_state(model).source else source_folder(model)
    try:
        return None if folder is None else read_generation_settings(folder)
    except CheckpointError as error:  # a save does not fail for it
        logger.warning("%s", error)
        return None


def adopt(model: Any, folder: Path | None, settings: GenerationSettings | None) -> None:
    """Record a checkpoint's folder on the model, and give the model its generation settings."""
    merged = _merged(model, settings)
    if settings is not None and generates(model):
        model.generation_config = merged[0]
    runtime_state(model).source = PretrainedSource(folder, merged if merged[1] is not None else (None, None))


def source_folder(model: Any) -> Path | None:
    """Return the folder that the weights came from: of the last load, or of the model's ``name_or_path``."""
    source = runtime_state(model).source
    if source is not None and source.folder is not None:
        return source.folder  # type: ignore[no-any-return]
    name = getattr(getattr(model, "config", None), "name_or_path", None) if is_transformers_model(model) else None
    if not name:
        return None
    return Path(name) if os.path.isdir(name) else _cached_snapshot(name)


def _cached_snapshot(repository: str) -> Path | None:
    """Return the folder of a hub id in the local cache, if it is there."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, allow_patterns=["config.json"], local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None
