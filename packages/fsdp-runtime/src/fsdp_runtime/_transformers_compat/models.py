"""The kind of a model by its class and config, its class before ``fully_shard``, and its recomputed functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import modules_of
from fsdp_runtime.swaps import swapped

#: The methods of transformers' models that run a tower, by medium.
MEDIA_METHODS = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}


def is_transformers_model(module: nn.Module) -> bool:
    """Return True for a ``PreTrainedModel``; transformers is not imported for that."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def has_model_for(auto: Any, config: Any) -> bool:
    """Return True if an auto class has a model for a config; the public way is to build a model and catch its error."""
    return type(config) in auto._model_mapping


def model_from_config(cls: Any, config: Any, dtype: Any) -> Any:
    """Build a model with fresh weights, in ``dtype`` or the config's, as auto classes' ``from_config`` do."""
    # ``_from_config`` since transformers 4.20; the public form needs an auto class, and a checkpoint names none.
    return cls._from_config(config, **({} if dtype is None else {"dtype": dtype}))


def auto_class_builds(auto: Any, config: Any) -> Any:
    """Return the class that an auto class builds for a config, ``None`` for an unknown config (``_model_mapping``)."""
    has_model = hasattr(auto, "_model_mapping") and has_model_for(auto, config)
    return auto._model_mapping[type(config)] if has_model else None


def picks_one_token(model: Any) -> bool:
    """Return True if the model's class scores one token of each row: the last token without padding, or the first."""
    # Only the names of classes tell.
    endings = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
    return any(base.__name__.endswith(endings) for base in type(model).__mro__)


def scores_rows(model: Any) -> bool:
    """Return True if the model's class applies ``score`` to all tokens, and then picks a token other than padding."""
    # So do ``GenericForSequenceClassification`` and the decoders with separate code (4.57 to 5.24).
    named = {"score", "pad_token_id"} <= _names_in_forward(model)
    return named and picks_one_token(model) and isinstance(getattr(model, "score", None), nn.Module)


def calls_loss_function(model: Any) -> bool:
    """Return True if the code of the model's forward calls its ``loss_function``."""
    return hasattr(model, "loss_function") and "loss_function" in _names_in_forward(model)


def computes_balancing_loss(model: Any) -> bool:
    """Return True if a decoder's forward calls transformers' auxiliary loss of router logits (4.36 to 5.24)."""
    # Encoder-decoders (Switch, NLLB) have a loss per stack, with other outputs.
    return "load_balancing_loss_func" in _names_in_forward(model) and not is_encoder_decoder(model)


def takes_places_of_logits(model: Any) -> bool:
    """Return True if the model's forward takes token positions, or their number, as ``logits_to_keep``."""
    # The forward calls ``slice_logits_to_keep`` (since 5.23), or chooses between a slice and indices (4.57 on).
    names = _names_in_forward(model)
    return "slice_logits_to_keep" in names or {"logits_to_keep", "isinstance", "slice"} <= names


def _names_in_forward(model: Any) -> set[str]:
    """Return the names that the code of a model's forward uses, below decorators and classes that were mixed in."""
    forwards = (inspect.unwrap(vars(cls)["forward"]) for cls in type(model).__mro__ if "forward" in vars(cls))
    codes = (code for forward in forwards if (code := getattr(forward, "__code__", None)) is not None)
    return {name for code in codes for name in (*code.co_names, *code.co_varnames)}


def is_causal_lm_loss(function: Any) -> bool:
    """Return True for the loss of transformers that compares each token's logits with the next label."""
    module = sys.modules.get("transformers.loss.loss_utils")
    return module is not None and function is module.ForCausalLMLoss


@contextmanager
def with_loss_function(model: Any, function: Any) -> Iterator[None]:
    """The model with another ``loss_function``, which its property keeps as ``_loss_function`` (4.57 to 5.24)."""
    before = vars(model).get("_loss_function")
    model.loss_function = function
    try:
        yield
    finally:
        if before is None:
            del model._loss_function
        else:
            model.loss_function = before


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
    """Return the path of a module with one vector per row, in a class that may output or score the vector."""
    # The name of the module or of its class tells.
    endings = ("ForMaskedLM", "ForCausalLM", "ForTokenClassification", "ForQuestionAnswering")
    if type(model).__name__.endswith(endings):
        return None
    kinds = ((path, type(module).__name__) for path, module in model.named_modules())
    return next((path for path, kind in kinds if path.rpartition(".")[2] == "pooler" or kind.endswith("Pooler")), None)


def recorded_outputs(module: nn.Module) -> frozenset[str]:
    """Return outputs that a transformers model can collect from inner modules, such as ``"router_logits"``."""
    # ``_can_record_outputs`` names what ``capture_outputs`` collects (5.10 to 5.24).
    outputs = getattr(module, "_can_record_outputs", None) if is_transformers_model(module) else None
    return frozenset(outputs or ())


def keep_recording(model: nn.Module) -> None:
    """Let transformers models collect outputs under the names that ``fully_shard`` gives their classes."""
    # ``capture_outputs`` finds a class's outputs by the class's name, which the model's constructor has
    # registered (``_CAN_RECORD_REGISTRY``, 5.10 to 5.24); for another name it collects nothing, and the output is
    # ``None``.
    for module in model.modules():
        capturing = sys.modules.get("transformers.utils.output_capturing")  # 4.57 collects by the class itself
        if capturing is not None and recorded_outputs(module):
            dict.__setitem__(capturing._CAN_RECORD_REGISTRY, str(type(module)), module._can_record_outputs)


def asks_for(model: Any, kwargs: Mapping[str, Any], output: str) -> bool:
    """Return True if a forward is asked for an output, such as ``"attentions"``, by keyword or by the config."""
    name = f"output_{output}"
    asked = kwargs.get(name)
    return bool(getattr(getattr(model, "config", None), name, False) if asked is None else asked)


def is_stateful(model: Any) -> bool:
    """Return True if the model's class says that it carries a state from token to token; ``generate`` asks the same."""
    return bool(getattr(model, "_is_stateful", False))


def rope_types(config: Any) -> set[str]:
    """Return the types of rotary embeddings of a text config: one for all layers, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(kind.get("rope_type", "default")) for kind in nested or [rope]}


def length_dependent_ropes(model: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings with frequencies that depend on the longest position in a call."""
    # ``dynamic_rope_update`` reads their ``rope_type``, a word, or a word per kind of layer (4.57 to 5.24).
    ropes = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        words = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(word, str) and ("dynamic" in word or word == "longrope") for word in words):
            ropes.append(module)
    return ropes


def disable_cache(model: nn.Module) -> None:
    """Set ``use_cache`` to ``False`` in every config of a model's modules."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


#: Arguments of a forward that take a key/value cache or a state; transformers 5.24 and later have ``cache``.
CACHES = ("past_key_values", "cache_params", "cache")


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the keywords of a forward, or ``None``."""
    return next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)


def is_cache(value: object) -> bool:
    """Return True for a key/value cache of transformers: a ``Cache``, or an ``EncoderDecoderCache`` of two."""
    return hasattr(value, "get_seq_length") and not isinstance(value, nn.Module)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a ``PreTrainedModel`` without classes mixed in at run time; for other modules, their class."""
    if not is_transformers_model(module):
        return type(module)
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Restore the model's classes from before ``fully_shard`` inside the ``with``."""
    # FSDP2 gives a module a class of another name and Python module. transformers' table goes by the name, and applies
    # no renaming to a class from another Python module.
    with ExitStack() as classes:
        for module in model.modules():
            classes.enter_context(swapped(module, __class__=original_class(module)))
        yield


@contextmanager
def checkpointing_through(model: nn.Module, bind: Callable[[nn.Module, Callable[..., Any]], Any]) -> Iterator[None]:
    """Pass functions that ``gradient_checkpointing_enable`` recomputes through ``bind`` within the context."""
    # The enabled modules carry the checkpoint function as ``_gradient_checkpointing_func`` (5.10 to 5.24), which has no
    # public accessor.
    name = "_gradient_checkpointing_func"
    with ExitStack() as functions:
        for module in modules_of(model):
            if callable(checkpoint := vars(module).get(name)):
                functions.enter_context(swapped(module, **{name: _through(module, checkpoint, bind)}))
        yield


def _through(module: nn.Module, checkpoint: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, *args: checkpoint(bind(module, function), *args)
