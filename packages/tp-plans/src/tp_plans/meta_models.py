"""Models without weights, from a config or a class name; the one place that imports transformers unasked."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tp_plans.errors import ModelConfigError, UnknownArchitectureError


def meta_model_from_config(source: str | Path) -> Any:
    """The model that a checkpoint folder or ``config.json`` describes, on the meta device; remote code is not run."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    release = f"transformers {transformers.__version__}"
    path = Path(source)
    if not path.exists():
        raise UnknownArchitectureError(f"{source}: no such file; give a config.json or the folder of a checkpoint")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise UnknownArchitectureError(f"{source}: {release} cannot read it: {error}") from error
    names = getattr(config, "architectures", None) or []
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if cls is None and not names:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None:
        listed = f"its architectures are {', '.join(names)}" if names else "it names no architectures"
        raise UnknownArchitectureError(
            f"{source}: {listed}, and {release} has no such class, nor one for text generation of model_type "
            f"{getattr(config, 'model_type', None)!r}; remote code is not run"
        )
    return _on_meta(cls, config, source)


def class_of_model_type(name: str) -> str:
    """Return the name of the class for text generation of a ``model_type``; any other name unchanged."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        listed: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(name))]
        return str((listed[0] if isinstance(listed, tuple) else listed).__name__)
    except (KeyError, ValueError):  # no model type, or one without text generation
        return name


def meta_model_of_class(name: str) -> Any:
    """A transformers class with its default config, on the meta device."""
    import transformers

    cls = getattr(transformers, name, None)
    config_class = getattr(cls, "config_class", None)
    if cls is None or config_class is None:
        raise UnknownArchitectureError(f"transformers {transformers.__version__} has no model class {name!r}")
    return _on_meta(cls, config_class(), name)


def model_of(source: str) -> Any:
    """The model that a word of the command line means: a config, a class of transformers, or a dotted path."""
    if Path(source).exists():
        return meta_model_from_config(source)
    module_name, _, attribute = source.rpartition(".")
    if not module_name:
        return meta_model_of_class(source)
    sys.path.insert(0, "")  # the module may be in the current folder
    try:
        value = getattr(importlib.import_module(module_name), attribute)
        is_model = hasattr(value, "named_modules") and not isinstance(value, type)
        return value if is_model or not callable(value) else value()
    except Exception as error:
        raise ModelConfigError(f"{source}: no model can be built from it: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")


def _on_meta(cls: Any, config: Any, source: str | Path) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return cls(config)
    except ImportError:
        raise
    except Exception as error:
        raise ModelConfigError(
            f"{source}: no {cls.__name__} can be built from it ({type(error).__name__}: {error}): correct the config"
        ) from error
