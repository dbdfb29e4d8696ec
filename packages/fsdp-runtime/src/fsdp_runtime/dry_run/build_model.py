"""Build the model of a dry run on the meta device, from a config, a config file or a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fsdp_runtime import meta_device
from fsdp_runtime._peft_compat import refused_by_lora
from fsdp_runtime._transformers_compat.models import disable_cache, has_model_for
from fsdp_runtime.dry_run.parse_args import require_model_source
from fsdp_runtime.errors import EstimateError


def build_model(source: str | Path | Any, dtype: torch.dtype, frozen_dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model on the meta device, in training mode, its floating-point parameters in ``dtype``."""
    # ``frozen_dtype`` is the dtype of parameters without gradients.
    require_model_source(source)
    build = model_builder(source)
    with meta_device():
        model = build()
    if not isinstance(model, nn.Module):
        raise EstimateError(f"the function that builds the model returned a {type(model).__name__}: return a module")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            stored = dtype if parameter.requires_grad else frozen_dtype or dtype
            parameter.data = parameter.data.to("meta", stored)
    disable_cache(model)  # training fills no cache
    return model.train()


def vocabulary_size(model: nn.Module, embedding: str | None) -> int:
    """Return the number of rows of a model's token embedding."""
    weight = getattr(model.get_submodule(embedding), "weight", None) if embedding is not None else None
    if not isinstance(weight, torch.Tensor):
        raise EstimateError(f"no token embedding was found in {type(model).__name__}: pass logprobs=function(model)")
    return int(weight.shape[0])


def model_builder(source: Any) -> Callable[[], nn.Module]:
    """Return the function that builds the model: the source itself, or a function from a config."""
    if callable(source):
        return cast("Callable[[], nn.Module]", source)
    auto, config = _auto_and_config(source)
    return lambda: cast("nn.Module", auto.from_config(config))


def auto_class(source: Any) -> str:
    """Return the name of the auto class of transformers that builds the model of a config."""
    return "AutoModelForCausalLM" if callable(source) else str(_auto_and_config(source)[0].__name__)


def _auto_and_config(source: Any) -> tuple[Any, Any]:
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
            return auto, config
    if has_model_for(AutoModel, config):
        raise EstimateError(
            f"{type(config).__name__} has no model class with a language-model head, which log-probs need: pass a "
            "function that builds the model, and logprobs=function(model, inputs)"
        )
    raise EstimateError(f"transformers has no model class for {type(config).__name__}: pass a function that builds it")


def _read(file: Path, auto_config: Any) -> Any:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EstimateError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise EstimateError(f"{file} has no model_type, which names the model's class: give a model's config.json")
    try:
        return auto_config.from_pretrained(file)
    except (ValueError, KeyError) as error:
        remote = ", with remote code (auto_map)" if "auto_map" in content else ""
        raise EstimateError(
            f"{file}: the installed transformers does not know model_type {content['model_type']!r}{remote}. A dry run "
            "does not run remote code: build the model in a function and pass that, or install a transformers release "
            f"that has the class ({str(error).splitlines()[0]})"
        ) from error


@dataclass(frozen=True)
class WithAdapters:
    """Build a model with low-rank adapters, all other parameters frozen."""

    source: Any  # any model argument of ``estimate``
    rank: int = 16  # of the adapters

    def __post_init__(self) -> None:
        """Raise :class:`EstimateError` for a rank that is not positive."""
        if self.rank < 1:
            raise EstimateError(f"rank={self.rank} of LoRA: give a positive integer")

    def __call__(self) -> nn.Module:
        """Return the adapted model."""
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise EstimateError("LoRA needs peft: pip install peft, or leave lora out") from error
        model = model_builder(self.source)()
        excluded = not_adapted(model)
        options = {"exclude_modules": list(excluded)} if excluded else {}
        adapters = LoraConfig(r=self.rank, target_modules="all-linear", task_type="CAUSAL_LM", **options)
        adapted: nn.Module = get_peft_model(model, adapters)
        return adapted


def not_adapted(model: nn.Module) -> tuple[str, ...]:
    """Return names of linear layers without LoRA: routers, which return several tensors, and layers PEFT refuses."""
    classes = {
        path.rpartition(".")[2]: None
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    }
    return (*classes, *refused_by_lora(model))
