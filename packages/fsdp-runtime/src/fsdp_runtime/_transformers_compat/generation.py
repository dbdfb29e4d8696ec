"""Generation configs: the checkpoint's config, and the user's changes to the model's config."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_runtime.errors import CheckpointError

#: The files of a checkpoint with generation settings; older checkpoints have them in the model's config.
GENERATION_FILES = ("generation_config.json", "config.json")
#: Fields that record the origin of a config, not a setting (5.10 to 5.24).
_METADATA = ("_from_model_config", "_commit_hash", "_original_object_hash", "transformers_version")


def read_generation_settings(folder: Path) -> dict[str, Any] | None:
    """Return the contents of ``GENERATION_FILES`` by name, ``None`` if a folder has neither."""
    contents: dict[str, Any] = {}
    for file in (folder / name for name in GENERATION_FILES):
        if not file.is_file():
            continue
        try:
            contents[file.name] = {**json.loads(file.read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): download or save it again") from error
    return contents or None


def generation_config(model: Any, stored: Mapping[str, Any], adopted: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the config of ``stored`` with and without the user's changes; return a user's own config unchanged.

    ``adopted`` are the two configs that an earlier load has returned.
    """
    # The model's constructor derives a config from the model's and marks it by ``_from_model_config``; a user's own
    # config has no mark. ``_original_object_hash`` tells whether a config has changed since (5.10 to 5.24).
    current = model.generation_config
    if current is None or not (current is adopted[0] or current._from_model_config):
        return current, None
    kind, configs = type(current), copy.deepcopy({**stored})
    derived = kind.from_model_config(configs["config.json"]) if "config.json" in configs else kind()
    if current is adopted[0]:
        changes = _changes(current, adopted[1])
    elif getattr(current, "_original_object_hash", None) == hash(current):
        changes = {}
    else:  # the user may have changed the model's config after the default was derived from it
        changes = _changes(current, kind.from_model_config(model.config), derived, kind())
    config = derived
    if "generation_config.json" in configs:
        config = kind.from_dict(configs["generation_config.json"])
        config._original_object_hash = hash(config)  # as ``from_pretrained``: an unchanged config is saved verbatim
    unchanged = copy.deepcopy(config)
    for field, value in changes.items():
        setattr(config, field, value)
    return config, unchanged


def _changes(current: Any, *others: Any) -> dict[str, Any]:
    """Return the fields with values that differ from all other configs."""
    return {
        name: value
        for name, value in vars(current).items()
        if name not in _METADATA and all(getattr(other, name, None) != value for other in others)
    }
