"""Contents of a checkpoint beside the weights: its config, names that are left out or tied."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime._transformers_compat.models import original_class, original_classes

logger = logging.getLogger(__name__)


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
