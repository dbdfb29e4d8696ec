"""Every use of peft's modules, with its reason; tested on peft 0.21.

peft is imported only where the model is one of its own, so this package does not depend on it.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: Where a ``PeftModel`` keeps the model that it adapts.
BASE = "base_model.model"


@dataclass(frozen=True)
class LoraLayer:
    """A layer with low-rank adapters.

    Args:
        path: its path in the adapted model.
        module: peft's wrapper, with the layer as ``base_layer`` and the factors in ``lora_A`` and ``lora_B``.
        scaling: the factor of every adapter that is in force, by its name.
        transposed: the layer's weight is ``[in, out]``.
        plain: it is an ordinary linear layer, a matrix, or stacked experts, with ordinary adapters, not merged.
        parameter: the name of the stacked parameter of ``experts`` that it adapts; ``None`` for a layer's weight.
        experts: the module that owns that parameter, below any other wrapper.
        number: of the experts that the factors stack.
        matrix: the path of the one matrix that it adapts by its name (a router's), whose code reads the sum.
    """

    path: str
    module: nn.Module
    scaling: dict[str, float]
    transposed: bool
    plain: bool
    parameter: str | None = None
    experts: nn.Module | None = None
    number: int = 1
    matrix: str | None = None


def unwrapped(path: str) -> str:
    """Return the path of a layer without that of the wrappers around it: experts have one for each adapted weight."""
    return re.sub(r"(\.base_layer)+$", "", path)


def stored_factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Return the two factors of an adapter as peft stores them."""
    return wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight


def active_factors(wrapper: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Iterate over the adapters in force of a wrapper: the two factors as stored, and the scaling."""
    if wrapper.disable_adapters or wrapper.merged:
        return
    for name in wrapper.active_adapters:
        if name in wrapper.lora_A:
            yield *stored_factors(wrapper, name), float(wrapper.scaling[name])


def is_out_first(wrapper: Any) -> bool:
    """Return True if a stacked weight is ``[experts, out, in]``, false for ``[experts, in, out]``."""
    return bool(wrapper._did_swap_in_out_features)


def is_peft_model(module: nn.Module) -> bool:
    """Return True if a module is a ``PeftModel``; false without importing anything where peft is unused."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def base_model(model: Any) -> Any:
    """Return the model inside a ``PeftModel``; any other model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def model_of_rows(model: Any) -> Any:
    """Return the model inside a ``PeftModel`` that hands it its rows as they are; any other model itself.

    Prompt learning (prompt, prefix and P-tuning) puts virtual tokens in front of every row.
    """
    if not is_peft_model(model) or any(each.is_prompt_learning for each in model.peft_config.values()):
        return model
    return base_model(model)


def lora_layers(model: nn.Module) -> Iterator[LoraLayer]:
    """Iterate over the layers with low-rank adapters of the model inside a ``PeftModel``."""
    peft = sys.modules.get("peft")
    if peft is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            layer: Any = module
            active = [name for name in layer.active_adapters if name in layer.lora_A]
            plain = not (layer.merged or layer.lora_variant or layer.lora_embedding_A or any(layer.lora_bias.values()))
            base, parameter = layer.get_base_layer(), getattr(layer, "parameter_name", None)
            stacked = parameter is not None and getattr(base, parameter).ndim == 3
            yield LoraLayer(
                path,
                module,
                {} if layer.disable_adapters else {name: float(layer.scaling[name]) for name in active},
                not is_out_first(layer) if stacked else bool(getattr(layer, "fan_in_fan_out", False)),
                plain and (parameter is not None or isinstance(base, nn.Linear)),
                parameter if stacked else None,
                base if stacked else None,
                layer.num_experts if stacked else 1,
                None if stacked or parameter is None else f"{unwrapped(path)}.base_layer.{parameter}",
            )


def without_adapters(model: nn.Module) -> nn.Module:
    """Return a copy of an adapted model's modules in which the layers have no adapters; it shares all tensors.

    Args:
        model: the model inside the ``PeftModel``, before it is sharded.
    """
    wrappers = {layer.module for layer in lora_layers(model)}
    copies: dict[nn.Module, nn.Module] = {}

    def bare(module: nn.Module) -> nn.Module:
        while module in wrappers:
            module = module.base_layer  # type: ignore[assignment]
        if module not in copies:
            copies[module] = found = copy.copy(module)
            found._modules = {name: child and bare(child) for name, child in module._modules.items()}
        return copies[module]

    return bare(model)


def saved_modules(model: nn.Module) -> dict[str, str]:
    """Return the adapter in force of each module that an adapter trains in full (``modules_to_save``), by path.

    Such a wrapper keeps the module of the base model as ``original_module``, and a copy of each adapter.
    """
    peft = sys.modules.get("peft")
    if peft is None:
        return {}
    found: dict[str, Any] = dict(model.named_modules())
    wrapper = peft.utils.ModulesToSaveWrapper
    return {path: module.active_adapter for path, module in found.items() if isinstance(module, wrapper)}


def adapter_settings(model: Any, adapter: str) -> dict[str, Any]:
    """Return the fields of an adapter's config."""
    settings: dict[str, Any] = model.peft_config[adapter].to_dict()
    return settings


def adapter_config(model: Any, adapter: str) -> Any:
    """Return the config that peft saves with an adapter's weights."""
    config = model.peft_config[adapter]
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = model.get_base_model().__dict__.get("name_or_path")
    return config
