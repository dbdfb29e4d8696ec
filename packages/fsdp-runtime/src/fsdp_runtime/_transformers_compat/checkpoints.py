"""Contents of a checkpoint beside the weights: its configs, and names that are left out or tied.

A generation config has the checkpoint's settings, and the user's changes to the model's config.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime._transformers_compat.models import original_class, original_classes
from fsdp_runtime.errors import CheckpointError

logger = logging.getLogger(__name__)

#: The files of a checkpoint with generation settings; older checkpoints have them in the model's config.
GENERATION_FILES = ("generation_config.json", "config.json")
#: Fields that record the origin of a config, not a setting (5.10 to 5.24).
_METADATA = ("_from_model_config", "_commit_hash", "_original_object_hash", "transformers_version")


def left_out_on_save(model: Any) -> tuple[set[str], set[str]]:
    """Return the names that a transformers model declares tied to another tensor, and other names that a save omits."""
    return set(getattr(model, "all_tied_weights_keys", None) or ()), set(model._keys_to_ignore_on_save or ())


def is_ignored_on_load(model: Any, name: str) -> bool:
    """Return True if the model's class allows a name in a checkpoint that the model does not have."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def relative_imports(module: Path) -> list[Path]:
    """Return the files that a module of remote code imports, directly and indirectly."""
    from transformers.dynamic_module_utils import get_relative_import_files

    return [Path(file) for file in get_relative_import_files(module)]


def vocabulary_size(model: Any) -> int | None:
    """Return the vocabulary size that the model's config states."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def save_config(
    model: Any, directory: Path, dtype: torch.dtype, generation: Any, quantization: dict[str, Any] | None
) -> None:
    """Write ``config.json``, ``generation_config.json`` and a remote class's code as ``save_pretrained`` would."""
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [original_class(model).__name__]
    if quantization is not None:
        config.quantization_config = quantization
    elif hasattr(config, "quantization_config"):  # of the loaded checkpoint, which has codes
        del config.quantization_config
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        with original_classes(model):
            custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if not model.can_generate() or generation is None:
        return
    try:
        generation.save_pretrained(directory)
    except ValueError as error:  # a sampling flag must not end a save after hours of training
        logger.warning("saving the generation config unchanged, though transformers finds it invalid: %s", error)
        generation.to_json_file(directory / "generation_config.json")


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
