"""Tensors that a transformers class keeps in a fixed dtype, for every dtype a model is loaded in."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_runtime._transformers_compat.models import is_transformers_model, original_class

_log = logging.getLogger(__name__)

#: Dtypes that constructors choose themselves, by model and requested dtype.
_chosen: WeakKeyDictionary[nn.Module, dict[torch.dtype, dict[str, torch.dtype]]] = WeakKeyDictionary()


def kept_in_float32(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that transformers loads in float32 where the model is in bfloat16."""
    in_float32: set[str] = set()
    for prefix, module, _ in _models_inside(model):
        patterns = _float32_patterns(module, torch.bfloat16)
        names = (name for name, _ in module.named_parameters() if any(pattern.search(name) for pattern in patterns))
        in_float32 |= {prefix + name for name in names}
    return frozenset(in_float32)


def kept_dtypes(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the tensors that ``from_pretrained(dtype=dtype)`` leaves in another dtype, by name."""
    # Names that match a pattern of the class are loaded in float32. Any other tensor gets the dtype that the class's
    # constructor gives it under the default dtype ``dtype`` (``convert_and_load_state_dict_in_model``, 5.10 to 5.24).
    names, dtypes = list(names), dict[str, torch.dtype]()
    for prefix, module, cls in _models_inside(model):
        patterns, chosen = _float32_patterns(module, dtype), _chosen_dtypes(module, cls, dtype)
        for name in names:
            inner = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if any(pattern.search(inner) for pattern in patterns):
                dtypes[name] = torch.float32
            elif inner in chosen:
                dtypes[name] = chosen[inner]
    return dtypes


def _models_inside(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield prefix, model and class of the outermost transformers models in a module, as in a ``PeftModel``."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module not in inside and is_transformers_model(module):
            inside |= set(module.modules())
            yield f"{path}." if path else "", module, original_class(module)


def _float32_patterns(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Return the name patterns of tensors that transformers loads in float32, for a dtype of the model."""
    # ``_keep_in_fp32_modules`` counts for float16, ``_keep_in_fp32_modules_strict`` for bfloat16 too (5.10 to 5.24).
    attributes = {
        torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        torch.bfloat16: ("_keep_in_fp32_modules_strict",),
    }.get(dtype, ())
    declared = (pattern for attribute in attributes for pattern in getattr(model, attribute, None) or ())
    return [re.compile(pattern.replace("*", ".*")) for pattern in declared]


def _chosen_dtypes(model: Any, cls: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The floating-point tensors to which the model's constructor gives a dtype other than the default dtype."""
    by_dtype = _chosen.setdefault(model, {})
    if dtype not in by_dtype:
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                config = copy.deepcopy(model.config)
                twin = cls._from_config(config, dtype=dtype, attn_implementation="eager")
        except Exception as error:  # noqa: BLE001 - constructors of remote code raise anything
            _log.warning(
                "%s cannot be built from its config (%s): its exports round the tensors that its constructor keeps in "
                "another dtype, unless its class declares them",
                cls.__name__,
                error,
            )
            twin = nn.Module()
        by_dtype[dtype] = {
            name: tensor.dtype
            for name, tensor in twin.state_dict().items()
            if tensor.is_floating_point() and tensor.dtype != dtype
        }
    return by_dtype[dtype]
