"""Every use of peft's modules, with its reason; tested on peft 0.21.

peft is imported only for a peft model, so this package does not depend on peft.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from torch import Tensor, nn

#: The path of the adapted model in a ``PeftModel``.
BASE = "base_model.model"


@dataclass(frozen=True)
class LoraLayer:
    """A layer with low-rank adapters."""

    path: str
    module: nn.Module  # peft's wrapper, with the layer as ``base_layer`` and the factors in ``lora_A`` and ``lora_B``
    scaling: dict[str, float]  # of every active adapter, by name
    transposed: bool  # the weight is ``[in, out]``
    odd: str  # the difference from plain, unmerged LoRA, if any
    biased: bool  # the low-rank product has a bias (``lora_bias``)
    parameter: str | None = None  # the adapted, stacked parameter of ``experts``
    experts: nn.Module | None = None  # the owner of ``parameter``, below all wrappers
    number: int = 1  # of experts in the stacked factors
    matrix: str | None = None  # path of an adapted matrix, such as a router's: its module reads the sum


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the base model's module inside of peft's wrappers around it."""
    while (wrapped := _wrapped(module)) is not None:
        module = next(iter(wrapped[1].values()))
    return module


@dataclass(frozen=True, eq=False)
class Factors:
    """An active adapter of a layer, as stored."""

    a: Tensor  # ``[rank, in]``
    b: Tensor  # ``[out, rank]``
    bias: Tensor | None
    scaling: float
    magnitude: Tensor | None  # DoRA's norms of the rows, ``[out]``


def active_factors(wrapper: Any) -> Iterator[Factors]:
    """Iterate over the active adapters of a wrapper with low-rank factors."""
    for name in () if wrapper.disable_adapters or wrapper.merged else _active(wrapper):
        b, norms = wrapper.lora_B[name], wrapper.lora_magnitude_vector
        magnitude = norms[name].weight if name in norms else None
        yield Factors(wrapper.lora_A[name].weight, b.weight, b.bias, float(wrapper.scaling[name]), magnitude)


def _active(wrapper: Any) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


@dataclass(frozen=True, eq=False)
class LinearInForce:
    """A linear layer, perhaps inside peft's wrappers, and the factors of its active adapters."""

    layer: Any  # has the weight ``[out, in]``, and the bias, if any
    factors: tuple[Factors, ...] = ()
    not_linear: str = ""  # the reason if the output is not a linear map of the input


def linear_in_force(module: Any) -> LinearInForce:
    """Return the linear layer that runs when a module is called, with its adapters."""
    peft = sys.modules.get("peft")
    if peft is None or (wrapped := _wrapped(module)) is None:
        return LinearInForce(module)
    kind, instead = wrapped
    disabled = is_disabled(module)
    if isinstance(module, peft.utils.TrainableTokensWrapper) and not disabled:
        return LinearInForce(module)  # its weight is the base model's weight with the trained tokens
    if kind == "copies":
        return linear_in_force(instead[_name_in_force(module, instead)])
    if kind == "other":
        reason = f"peft's {kind_of(module)} adapts it"
        return replace(linear_in_force(next(iter(instead.values()))), not_linear="" if disabled else reason)
    if module.merged and disabled:
        return LinearInForce(module.base_layer, not_linear="its adapters are merged and disabled: unmerge them")
    not_linear = "" if module.merged or disabled else _not_linear(module)
    return LinearInForce(module.base_layer, tuple(active_factors(module)), not_linear)


def _not_linear(wrapper: Any) -> str:
    """Return the reason why a layer with low-rank adapters is not one weight; ``""`` if it is."""
    if not isinstance(wrapper.base_layer, nn.Linear) or getattr(wrapper, "parameter_name", None) is not None:
        return f"peft adapts a {type(wrapper.base_layer).__name__} here"
    for name in _active(wrapper):
        variant = wrapper.lora_variant.get(name)
        if variant is not None and type(variant).__name__ != "DoraLinearVariant":
            return f"peft's {type(variant).__name__} adapts it"
        dropout = wrapper.lora_dropout[name]
        if wrapper.training and getattr(dropout, "p", 0.0) > 0:
            return f"its adapter has dropout ({dropout.p}): set lora_dropout=0 for it"
    return ""


def is_out_first(wrapper: Any) -> bool:
    """Return True if a stacked weight is ``[experts, out, in]``, ``False`` for ``[experts, in, out]``."""
    return bool(wrapper._did_swap_in_out_features)


def refused_by_lora(model: Any) -> tuple[str, ...]:
    """Return the names of linear layers that LoRA refuses by name: a fused kernel of Mamba reads their weights."""
    # peft's ``_check_lora_target_modules_mamba`` raises for them even with ``target_modules="all-linear"``.
    kinds = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
    return ("out_proj",) if getattr(getattr(model, "config", None), "model_type", None) in kinds else ()


def is_peft_model(module: nn.Module) -> bool:
    """Return True if a module is a ``PeftModel``; ``False`` without an import if peft is unused."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def base_model(model: Any) -> Any:
    """Return the model inside a ``PeftModel``; any other model unchanged."""
    return model.get_base_model() if is_peft_model(model) else model


@dataclass(frozen=True, eq=False)
class BaseModel:
    """The model inside a ``PeftModel``, and peft's modules in it; any other model itself, without such modules."""

    module: Any
    prefix: str = ""  # of the module's names inside the ``PeftModel``
    places: tuple[Place, ...] = ()
    lora_layers: tuple[LoraLayer, ...] = ()


def base_of(model: Any) -> BaseModel:
    """Return the model inside a ``PeftModel``, or any other model itself."""
    if not is_peft_model(model):
        return BaseModel(model)
    base = model.get_base_model()
    prefix = "base_model." if base is model.base_model else f"{BASE}."  # the first for prompt learning
    return BaseModel(base, prefix, tuple(places(base)), tuple(lora_layers(base)))


def model_of_rows(model: Any) -> Any:
    """Return the model inside a ``PeftModel`` without prompt learning; any other model unchanged."""
    # Prompt learning (prompt, prefix and P-tuning) puts virtual tokens in front of every row.
    if not is_peft_model(model) or any(config.is_prompt_learning for config in model.peft_config.values()):
        return model
    return base_model(model)


def learned_prompts(model: Any) -> str | None:
    """Return the inputs by which prompt learning reaches the model: ``"embeddings"``, ``"keys"`` or ``None``."""
    kinds = [config.peft_type for config in model.peft_config.values() if config.is_prompt_learning]
    if not kinds:
        return None
    types = sys.modules["peft"].PeftType
    of_embeddings = (types.PROMPT_TUNING, types.MULTITASK_PROMPT_TUNING, types.P_TUNING, types.CPT)
    return "embeddings" if all(kind in of_embeddings for kind in kinds) else "keys"


def lora_layers(model: nn.Module) -> Iterator[LoraLayer]:
    """Iterate over the layers with low-rank adapters of the model inside a ``PeftModel``."""
    peft = sys.modules.get("peft")
    if peft is None:
        return
    for path, module in model.named_modules():
        if _is_lora(module):
            layer: Any = module
            base, parameter = layer.get_base_layer(), getattr(layer, "parameter_name", None)
            stacked = parameter is not None and getattr(base, parameter).ndim == 3
            yield LoraLayer(
                path,
                module,
                {} if layer.disable_adapters else {name: float(layer.scaling[name]) for name in _active(layer)},
                not is_out_first(layer) if stacked else bool(getattr(layer, "fan_in_fan_out", False)),
                _odd(layer, base, parameter),
                any(layer.lora_bias.values()),
                parameter if stacked else None,
                base if stacked else None,
                layer.num_experts if stacked else 1,
                None if stacked or parameter is None else f"{path}{_depth(layer) * '.base_layer'}.{parameter}",
            )


def adapters_in_force(model: nn.Module) -> list[tuple[object, ...]]:
    """Return the state that selects the running tensors of a ``PeftModel``, and their scaling."""
    if not is_peft_model(model):
        return []
    base = base_model(model)
    factors = [(layer.path, layer.parameter, layer.scaling, layer.odd) for layer in lora_layers(base)]
    running = [
        (place.path, place.in_force, place.wrapper is not None and is_disabled(place.module)) for place in places(base)
    ]
    return [*factors, *running]


#: The kind of a peft wrapper: low-rank products, copies that adapters train in full, or another method.
WrapperKind = Literal["lora", "copies", "other"]


def _wrapped(module: Any) -> tuple[WrapperKind, dict[str, nn.Module]] | None:
    """Return a wrapper's kind and its modules by name, the base model's first; ``None`` for other modules."""
    if (peft := sys.modules.get("peft")) is None:
        return None
    tuners, utils = peft.tuners, peft.utils
    if isinstance(module, utils.ModulesToSaveWrapper):
        return "copies", _copies(module, "original_module", "modules_to_save")
    if isinstance(module, tuners.ln_tuning.layer.LNTuningLayer):
        return "copies", _copies(module, "base_layer", "ln_tuning_layers")
    if isinstance(module, utils.TrainableTokensWrapper):
        return "other", {"token_adapter": module.token_adapter}
    if isinstance(module, tuners.tuners_utils.BaseTunerLayer) and isinstance(module, nn.Module):
        kind: WrapperKind = "lora" if _is_lora(module) else "other"
        return kind, {"base_layer": cast(nn.Module, module.base_layer)}
    return None


def _name_in_force(wrapper: Any, instead: Mapping[str, nn.Module]) -> str:
    """Return the name of the running module of a wrapper with copies: an adapter's copy or the base model's module."""
    of_base, *copies = instead
    if wrapper.disable_adapters or not wrapper.active_adapters or getattr(wrapper, "merged", False):
        return of_base
    return next((name for name in copies if name.endswith(f".{wrapper.active_adapters[0]}")), of_base)


def kind_of(wrapper: nn.Module) -> str:
    """Return the name of a wrapper's class, as ``"ia3.Linear"``: each kind of adapter has a ``Linear``."""
    cls = type(wrapper)
    prefix, _, rest = cls.__module__.partition("peft.tuners.")
    return cls.__name__ if prefix or not rest else f"{rest.partition('.')[0]}.{cls.__name__}"


def is_disabled(wrapper: Any) -> bool:
    """Return True if a wrapper has no active adapter."""
    return bool(wrapper.disable_adapters) or not wrapper.active_adapters


def _is_lora(module: nn.Module) -> bool:
    """Return True for a LoRA wrapper; AdaLoRA's wrappers are of a subclass, with other factors."""
    tuners = sys.modules["peft"].tuners
    return isinstance(module, tuners.lora.LoraLayer) and not isinstance(module, tuners.adalora.AdaLoraLayer)


def _copies(wrapper: Any, base: str, name: str) -> dict[str, nn.Module]:
    copies = getattr(wrapper, name).items()
    return {base: getattr(wrapper, base), **{f"{name}.{adapter}": copy for adapter, copy in copies}}


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a base model's module, or of a peft wrapper around it, in the adapted model."""

    base: str  # path in the base model
    parts: tuple[str | None, ...]  # of the path: a name that peft added, or ``None`` for the next name of ``base``
    module: nn.Module
    wrapper: WrapperKind | None
    is_copy: bool = False  # an adapter trains the module in full
    in_force: bool = True  # the module runs now

    @property
    def path(self) -> str:
        """The path in the adapted model."""
        return self.moved(self.base)

    def moved(self, pattern: str) -> str:
        """Return a pattern of paths in the base model as a pattern of paths in the adapted model."""
        names = iter(pattern.split("."))
        return ".".join(next(names) if part is None else part for part in self.parts)


def _depth(wrapper: Any) -> int:
    """Return the number of nested wrappers, ``wrapper`` included: one wrapper per adapted parameter."""
    inner = getattr(wrapper, "base_layer", None)
    return 0 if _wrapped(wrapper) is None else 1 + _depth(inner)


def _odd(layer: Any, base: Any, parameter: str | None) -> str:
    """Describe the difference between a layer's adapters and plain, unmerged LoRA; empty without a difference."""
    if layer.merged:
        return "merged"
    if layer.lora_variant:
        names = dict.fromkeys(type(variant).__name__ for variant in layer.lora_variant.values())
        return ", ".join(f"DoRA, peft's {n}: set use_dora=False" if n.startswith("Dora") else n for n in names)
    if parameter is None and not isinstance(base, nn.Linear):
        return f"on {type(base).__name__}"
    return ""


def places(model: nn.Module) -> Iterator[Place]:
    """Iterate over the modules of the model inside a ``PeftModel`` and peft's wrappers, at all of their paths."""

    def walk(place: Place) -> Iterator[Place]:
        if (wrapped := _wrapped(place.module)) is None:
            yield place
            for name, child in place.module._modules.items():
                if child is not None:
                    base = f"{place.base}.{name}" if place.base else name
                    yield from walk(replace(place, base=base, parts=(*place.parts, None), module=child))
            return
        kind, instead = wrapped
        yield replace(place, wrapper=kind)
        running = next(iter(instead)) if kind != "copies" else _name_in_force(place.module, instead)
        for index, (name, inner) in enumerate(instead.items()):
            yield from walk(
                replace(
                    place,
                    parts=(*place.parts, *name.split(".")),
                    module=inner,
                    is_copy=place.is_copy or index > 0,
                    in_force=place.in_force and name == running,
                )
            )

    yield from walk(Place("", (), model, None))


def without_adapters(model: nn.Module) -> nn.Module:
    """Return a copy of the modules inside a ``PeftModel`` without wrappers; it shares the base model's tensors."""
    copies: dict[nn.Module, nn.Module] = {}

    def bare(module: nn.Module) -> nn.Module:
        module = unwrapped(module)
        if module not in copies:
            copies[module] = same = module.__new__(type(module))  # ``copy.copy`` refuses parametrized modules
            same.__dict__.update(module.__dict__)
            same._modules = {name: child and bare(child) for name, child in module._modules.items()}
        return copies[module]

    return bare(model)


def adapter_settings(model: Any, adapter: str) -> dict[str, Any]:
    """Return the fields of an adapter's config."""
    settings: dict[str, Any] = model.peft_config[adapter].to_dict()
    return settings


def adapter_file(
    model: Any, adapter: str, tensors: Mapping[str, Tensor], *, embeddings: bool | Literal["auto"]
) -> dict[str, Tensor]:
    """Return the tensors that peft saves for an adapter, by name in the file."""
    # ``embeddings="auto"`` saves the embedding and the head where they are adapted, or where their size differs from
    # the base model's checkpoint. peft looks up the config of that checkpoint.
    from peft.utils import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        state: dict[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=embeddings
        )
    return state


def save_adapter_config(model: Any, adapter: str, directory: str) -> None:
    """Write the config of an adapter as ``PeftModel.save_pretrained`` does."""
    config = copy.copy(model.peft_config[adapter])
    base = model.base_model if config.is_prompt_learning else model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        base_class = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
        mapping = {"base_model_class": base_class.__name__, "parent_library": base_class.__module__}
    config.save_pretrained(directory, auto_mapping_dict=mapping)
