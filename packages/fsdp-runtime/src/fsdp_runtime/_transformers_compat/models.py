"""The kind of a model, what its class and config say of it, and its class before ``fully_shard``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_transformers_model(module: nn.Module) -> bool:
    """Return True for a ``PreTrainedModel``; transformers is not imported for that."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def has_model_for(auto: Any, config: Any) -> bool:
    """Return True if an auto class has a model for a config; the public way is to build one and catch its error."""
    return type(config) in auto._model_mapping


def model_from_config(cls: Any, config: Any, dtype: Any) -> Any:
    """Build a model of a class with fresh weights, in ``dtype`` or the config's, as auto classes' ``from_config`` do.

    ``_from_config`` since transformers 4.20; the public form wants an auto class, of which a checkpoint names none.
    """
    return cls._from_config(config, **({} if dtype is None else {"dtype": dtype}))


def auto_class_builds(auto: Any, config: Any) -> Any:
    """Return the class that an auto class builds for a config, ``None`` if it knows none (``_model_mapping``)."""
    return (
        auto._model_mapping[type(config)] if hasattr(auto, "_model_mapping") and has_model_for(auto, config) else None
    )


def picks_one_token(model: Any) -> bool:
    """Return True if the model's class scores one token of each row: the last that is no padding, or the first.

    Classes say so by their names alone.
    """
    endings = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
    return any(base.__name__.endswith(endings) for base in type(model).__mro__)


def is_encoder_decoder(model: Any) -> bool:
    """Return True if the model's config says that it has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def is_masked_language_model(config: Any) -> bool:
    """Return True for a config of an encoder that is trained on masked tokens, and is not set up as a decoder."""
    transformers = sys.modules.get("transformers")
    if transformers is None or getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return False
    return has_model_for(transformers.AutoModelForMaskedLM, config)


def pooler(model: Any) -> str | None:
    """Return the path of a module that gives one vector a row, in a class that may output it or score it.

    Modules are called so by their names or those of their classes.
    """
    endings = ("ForMaskedLM", "ForCausalLM", "ForTokenClassification", "ForQuestionAnswering")
    if type(model).__name__.endswith(endings):
        return None
    return next((path for path, module in model.named_modules() if _is_pooler(path, module)), None)


def _is_pooler(path: str, module: nn.Module) -> bool:
    return path.rpartition(".")[2] == "pooler" or type(module).__name__.endswith("Pooler")


def recorded_outputs(module: nn.Module) -> frozenset[str]:
    """Return what a transformers model collects from modules inside where it is asked to, such as ``"router_logits"``.

    ``_can_record_outputs`` names what ``capture_outputs`` collects (5.6 to 5.23).
    """
    return (
        frozenset(getattr(module, "_can_record_outputs", None) or ()) if is_transformers_model(module) else frozenset()
    )


def keep_recording(model: nn.Module) -> None:
    """Let the transformers models in a model collect outputs under the names that ``fully_shard`` gives their classes.

    ``capture_outputs`` finds what a class can collect by the class's name, which the model's constructor has registered
    (``_CAN_RECORD_REGISTRY``, 5.6 to 5.23); of another name it collects nothing, and the output is ``None``.
    """
    for module in model.modules():
        if recorded_outputs(module):
            capturing = sys.modules["transformers.utils.output_capturing"]
            dict.__setitem__(capturing._CAN_RECORD_REGISTRY, str(type(module)), module._can_record_outputs)


def asks_for(model: Any, kwargs: Mapping[str, Any], output: str) -> bool:
    """Return True if a forward is asked for an output, such as ``"attentions"``, by keyword or by the config."""
    name = f"output_{output}"
    asked = kwargs.get(name)
    return bool(getattr(getattr(model, "config", None), name, False) if asked is None else asked)


def is_stateful(model: Any) -> bool:
    """Return True if the model's class says that it carries a state from token to token, as ``generate`` asks."""
    return bool(getattr(model, "_is_stateful", False))


def kept_in_float32(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that transformers loads in float32 where the model is in bfloat16.

    ``_keep_in_fp32_modules_strict`` names them, as patterns that are searched in a parameter's name (5.6 to 5.23).
    A model of transformers may be inside another module, such as a ``PeftModel``.
    """
    found: set[str] = set()
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside or not is_transformers_model(module):
            continue
        inside |= set(module.modules())
        declared = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        patterns = [re.compile(each.replace("*", ".*")) for each in declared]
        names = (name for name, _ in module.named_parameters() if any(pattern.search(name) for pattern in patterns))
        found |= {f"{path}.{name}" if path else name for name in names}
    return frozenset(found)


def rope_types(config: Any) -> set[str]:
    """Return the types of rotary embeddings of a text config: one for all layers, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", "default")) for each in nested or [rope]}


def disable_cache(model: nn.Module) -> None:
    """Set ``use_cache`` to ``False`` in every config of a model's modules."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def is_cache(value: object) -> bool:
    """Return True for a key/value cache of transformers: a ``Cache``, or an ``EncoderDecoderCache`` of two."""
    return hasattr(value, "get_seq_length") and not isinstance(value, nn.Module)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a ``PreTrainedModel`` without those that were mixed in at run time; of other modules, its own."""
    if not is_transformers_model(module):
        return type(module)
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """The model with its classes as they were before ``fully_shard``.

    FSDP2 gives a module a class of another name and Python module; transformers' table goes by the name, and
    takes such a class for code from elsewhere, to which no renaming applies.
    """
    changed = [(module, type(module)) for module in model.modules() if type(module) is not original_class(module)]
    try:
        for module, _ in changed:
            module.__class__ = original_class(module)
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls
