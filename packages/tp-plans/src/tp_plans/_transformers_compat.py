"""Every use of private API of transformers, with its reason; seen to work on transformers 5.24.

By attribute alone: transformers is not imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def own_plan(owner: Any) -> Mapping[str, str] | None:
    """The plan that a model class or an instance carries, in transformers' words."""
    # The public ``tp_plan`` property, if present, merges the plans of inner models under other names.
    plan: Mapping[str, str] | None = getattr(owner, "_tp_plan", None)
    return plan


def own_expert_plan(module: Any) -> Mapping[str, str]:
    """The expert-parallel plan of an inner model's config, in transformers' words, relative to that model."""
    if getattr(module, "base_model", None) is not module:  # the config's plan is relative to the base model
        return {}
    plan: Mapping[str, str] | None = getattr(getattr(module, "config", None), "base_model_ep_plan", None)
    return plan or {}


def mark_expert_parallel(experts: Any) -> None:
    """Mark transformers' batched and grouped experts: their routes may hold the index for "no expert of this rank"."""
    # Without the mark their kernels (since 5.23) leave the rows of such routes uninitialised. No upstream issue found.
    if hasattr(experts, "_is_expert_parallel"):
        experts._is_expert_parallel = True


def skips_sentinel_index(experts: Any) -> bool:
    """Return whether a module of experts skips the index for "no expert of this rank"."""
    # The eager code of transformers' own raises for it before 5.18: the one-hot mask that it makes has no place for it.
    if not type(experts).__module__.startswith("transformers."):
        return True
    release = tuple(map(int, re.findall(r"\d+", sys.modules["transformers"].__version__)[:2]))
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return release >= (5, 18) or implementation not in (None, "eager")


def kept_in_float32(model: Any, names: Iterable[str]) -> frozenset[str]:
    """Return the names of parameters that transformers loads in float32 although the model is in bfloat16."""
    # ``_keep_in_fp32_modules_strict`` names them, as patterns that are searched in a parameter's name (5.6 to 5.24).
    float32_names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    patterns = [re.compile(name_pattern.replace("*", ".*")) for name_pattern in float32_names]
    return frozenset(name for name in names if any(pattern.search(name) for pattern in patterns))
