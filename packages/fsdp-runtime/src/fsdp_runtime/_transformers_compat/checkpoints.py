"""What a checkpoint holds next to the weights: its config, names that are left out or tied."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime._transformers_compat.models import is_transformers_model, original_class


def declared_aliases(model: Any) -> set[str]:
    """Names that the model declares to be tied to another's tensor, as ``lm_head.weight``; not saved."""
    return set(getattr(model, "all_tied_weights_keys", None) or ()) if is_transformers_model(model) else set()


def ignored_on_save(model: Any) -> set[str]:
    """Names that ``save_pretrained`` leaves out."""
    return set(model._keys_to_ignore_on_save or ()) if is_transformers_model(model) else set()


def is_ignored_on_load(model: Any, name: str) -> bool:
    """Return True if the model's class says that a name may be in a checkpoint without being in the model."""
    patterns = (model._keys_to_ignore_on_load_unexpected or ()) if is_transformers_model(model) else ()
    return any(re.search(pattern, name) for pattern in patterns)


def save_config(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write ``config.json`` (and ``generation_config.json``) as ``save_pretrained`` would."""
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [original_class(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
