"""The plan that transformers ships for a model, collected from all its levels.

It comes in pieces: on the model class (the head), on the config (the blocks), and on every inner model, each
relative to where that model sits.
"""

from __future__ import annotations

from collections.abc import Mapping

from tp_plans._transformers_compat import own_plan
from tp_plans.model_tree import ModelTree


def shipped_plan(tree: ModelTree) -> dict[str, str]:
    """Pattern to style word: the class's plan under those of inner models' configs and instances; outer over inner."""
    words: dict[str, str] = dict(own_plan(type(tree.model)) or {})
    for path, module in reversed(list(tree.modules.items())):
        prefix = f"{path}." if path else ""
        config = getattr(module, "config", None)
        if getattr(module, "base_model", None) is module:  # the config's plan is relative to the base model
            words.update(_prefixed(prefix, getattr(config, "base_model_tp_plan", None)))
        words.update(_prefixed(prefix, own_plan(module)))
    return words


def _prefixed(prefix: str, words: Mapping[str, str] | None) -> dict[str, str]:
    return {f"{prefix}{pattern}": word for pattern, word in (words or {}).items()}
