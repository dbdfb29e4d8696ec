"""Models without weights, from a config or a class name; the one place that imports transformers by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tp_plans.errors import UnknownArchitectureError


def meta_model_from_config(source: str | Path) -> Any:
    """The model that a checkpoint directory or a ``config.json`` describes, on the meta device.

    No remote code is executed.

    Raises:
        UnknownArchitectureError: there is no such file, or the installed transformers has no class for it.
        ImportError: torch or transformers is not installed.
    """
    import transformers

    release = f"transformers {transformers.__version__}"
    path = Path(source)
    if not path.exists():
        raise UnknownArchitectureError(f"{source}: no such file; give a config.json or the folder of a checkpoint")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UnknownArchitectureError(f"{source}: {release} cannot read it: {error}") from error
    names = getattr(config, "architectures", None) or []
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if cls is None:
        told = f"its architectures are {', '.join(names)}" if names else "it names no architectures"
        raise UnknownArchitectureError(f"{source}: {told}, none of which {release} has; remote code is not run")
    return _on_meta(cls, config)


def meta_model_of_class(name: str) -> Any:
    """A transformers class with its default config, on the meta device.

    Raises:
        UnknownArchitectureError: the installed transformers has no such model class.
        ImportError: torch or transformers is not installed.
    """
    import transformers

    cls = getattr(transformers, name, None)
    config_class = getattr(cls, "config_class", None)
    if cls is None or config_class is None:
        raise UnknownArchitectureError(f"transformers {transformers.__version__} has no model class {name!r}")
    return _on_meta(cls, config_class())


def _on_meta(cls: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return cls(config)
