"""The model of a dry run: built on the meta device from a config, a file of one, or a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fsdp_runtime._transformers_compat import has_model_for
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.weights import meta_device


def build_model(source: str | Path | Any, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device, in training mode, its floating-point parameters in ``dtype``.

    Args:
        source: a ``config.json`` or a directory with one, a Hugging Face config, or a function that builds a model.
        dtype: of parameters.

    Raises:
        EstimateError: there is no such file, its class is not known, or transformers is not installed.
    """
    if isinstance(source, nn.Module):
        raise EstimateError(
            f"{type(source).__name__} is a model, which a dry run would change: pass its config, or a function that "
            "builds it"
        )
    build = _from_config(source) if not callable(source) else cast("Callable[[], nn.Module]", source)
    with meta_device():
        model = build()
    if not isinstance(model, nn.Module):
        raise EstimateError(f"the function that builds the model returned a {type(model).__name__}")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to("meta", dtype)
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # type: ignore[union-attr]  # training fills no cache
    return model.train()


def vocabulary_of(model: nn.Module, embedding: str | None) -> int:
    """How many tokens a model knows, by the rows of its token embedding."""
    weight = getattr(model.get_submodule(embedding), "weight", None) if embedding is not None else None
    if not isinstance(weight, torch.Tensor):
        raise EstimateError(f"{type(model).__name__} has no token embedding to be found: pass logprobs=function(model)")
    return int(weight.shape[0])


def _from_config(source: Any) -> Callable[[], nn.Module]:
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as error:
        raise EstimateError(
            "building a model from a config needs transformers: pip install fsdp-runtime[transformers], or pass a "
            "function that builds the model"
        ) from error
    config = source
    if isinstance(source, (str, Path)):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise EstimateError(f"{file} does not exist: give a config.json, or a directory that has one")
        config = _read(file, AutoConfig)
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if has_model_for(auto, config):
            return lambda: cast("nn.Module", auto.from_config(config))  # type: ignore[no-untyped-call]
    if has_model_for(AutoModel, config):
        raise EstimateError(f"{type(config).__name__} has no class with a language head, so there is no log-prob")
    raise EstimateError(f"{type(config).__name__} is no config that transformers has a model for")


def _read(file: Path, auto_config: Any) -> Any:
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EstimateError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(told, dict) or "model_type" not in told:
        raise EstimateError(f"{file} has no model_type, which tells the model's class")
    try:
        return auto_config.from_pretrained(file)
    except (ValueError, KeyError) as error:
        remote = ", with code of its own (auto_map)" if "auto_map" in told else ""
        raise EstimateError(
            f"{file}: model_type {told['model_type']!r} is not known to the installed transformers{remote}. A dry run "
            "runs no downloaded code: build the model in a function and pass that, or install a transformers that "
            f"has the class ({str(error).splitlines()[0]})"
        ) from error
