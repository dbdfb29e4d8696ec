"""LoRA adapters in checkpoints: state entries of the base model, and weights with the adapters merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model, is_peft_model, lora_layers, saved_modules, unwrapped
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.model.state import StateEntry, state_entries
from fsdp_runtime.weights.stacked_adapters import by_expert

_BASE_LAYER = "base_layer."


@dataclass(frozen=True)
class LoraFactors:
    """The factors of one adapter; it adds ``scaling * B @ A`` to a weight, transposed if the weight is.

    Args:
        a_name: a name for ``a``.
        b_name: a name for ``b``.
        a: ``[rank, in]``.
        b: ``[out, rank]``.
        scaling: the adapter's factor.
        transposed: the weight is ``[in, out]``.
        experts: of a stacked weight; ``a`` is then ``[experts * rank, in]`` and ``b`` ``[out, rank * experts]``.
    """

    a_name: str
    b_name: str
    a: Tensor
    b: Tensor
    scaling: float
    transposed: bool
    experts: int | None = None


def base_state_entries(
    model: nn.Module, entries: Sequence[StateEntry] | None = None, *, exported: bool = False
) -> list[StateEntry]:
    """Return the state entries of a model without its adapters, under the names of the base model.

    Of a module that an adapter trains in full there are two copies: the base model's, and the adapter's.

    Args:
        model: any model, a ``PeftModel`` among them.
        entries: ``state_entries(model)``, where they are known already.
        exported: take the copy of the adapter in force alone; else the base model's, and an adapter's without data.
    """
    if not is_peft_model(model):
        return state_entries(model) if entries is None else list(entries)
    base = base_model(model)
    prefixes = sorted((f"{layer.path}." for layer in lora_layers(base)), key=len, reverse=True)
    return list(_without_adapters(state_entries(base), prefixes, saved_modules(base), exported=exported))


def _without_adapters(
    entries: Sequence[StateEntry], prefixes: Sequence[str], saved: Mapping[str, str], *, exported: bool
) -> Iterator[StateEntry]:
    for entry in entries:
        copied = (_name_of_copy(name, saved, exported=exported, on_meta=entry.tensor.is_meta) for name in entry.names)
        names = tuple(name for each in copied if each is not None and (name := _base_name(each, prefixes)) is not None)
        if names:
            yield replace(entry, names=names)


def _name_of_copy(name: str, saved: Mapping[str, str], *, exported: bool, on_meta: bool) -> str | None:
    """Return the base model's name of a tensor in a module of which adapters have copies, ``None`` to leave it out."""
    for path, adapter in saved.items():
        if not name.startswith(f"{path}."):
            continue
        kind, _, rest = name.removeprefix(f"{path}.").partition(".")
        if kind == "original_module":
            return None if exported else f"{path}.{rest}"
        copy, _, rest = rest.partition(".")
        return f"{path}.{rest}" if (copy == adapter if exported else on_meta) else None
    return name


def _base_name(name: str, prefixes: Sequence[str]) -> str | None:
    """Return the name of a tensor without wrappers, ``None`` for what a wrapper adds; inner wrappers come first."""
    for prefix in prefixes:
        if name.startswith(prefix):
            inside = name.removeprefix(prefix)
            if not inside.startswith(_BASE_LAYER):
                return None
            name = prefix + inside.removeprefix(_BASE_LAYER)
    return name


def lora_factors(model: nn.Module, entries: Sequence[StateEntry]) -> dict[str, list[LoraFactors]]:
    """Return the active adapters by the name of the weight that each belongs to.

    Args:
        model: any model, a ``PeftModel`` among them.
        entries: from :func:`base_state_entries`.

    Raises:
        OptionError: an adapter is not plain LoRA on a linear layer, is merged already, or is on a tied weight.
    """
    if not is_peft_model(model):
        return {}
    base = base_model(model)
    tensors = {name: entry.tensor for entry in state_entries(base) for name in entry.names}
    tied = {name for entry in entries for name in entry.names if len(entry.names) > 1}
    factors: dict[str, list[LoraFactors]] = {}
    for layer in lora_layers(base):
        weight = f"{layer.path}.weight"
        if layer.parameter is not None:
            weight = f"{unwrapped(layer.path)}.{layer.parameter}"
        elif layer.matrix is not None:
            weight = layer.matrix.replace(".base_layer.", ".")
        if layer.odd or layer.biased or weight in tied:
            raise OptionError(
                f"the adapters of {layer.path} cannot be merged for export: they are merged already, not plain LoRA "
                "on a linear layer or on stacked experts, or on a tied weight; unmerge them, or leave the layer out of "
                "target_modules"
            )
        for name, scaling in layer.scaling.items():
            a, b = (f"{layer.path}.{part}.{name}.weight" for part in ("lora_A", "lora_B"))
            experts = None if layer.parameter is None else layer.number
            found = LoraFactors(a, b, tensors[a], tensors[b], scaling, layer.transposed, experts)
            factors.setdefault(weight, []).append(found)
    return factors


def merge_lora(
    weight: Tensor, factors: Sequence[LoraFactors], full: Mapping[str, Tensor], box: Sequence[slice] | None = None
) -> Tensor:
    """Return a weight or a part of it plus its adapters, computed in float32 or a wider dtype, in the weight's dtype.

    The outer products of the ranks are added one by one: the order in which a matrix product adds depends on the shape
    of the part, and so would the last bit.

    Args:
        weight: the weight, or a part of it.
        factors: its adapters.
        full: the full factors by name.
        box: the rows and columns of the part, for stacked experts the experts first; ``None`` for the full weight.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(exact, copy=True)
    product, term = torch.empty_like(merged), torch.empty_like(merged)
    for each in factors:
        a, b = full[each.a_name].to(exact), full[each.b_name].to(exact)
        if each.experts is not None:
            a, b = by_expert(a, b, each.experts)
        left, right = (a.mT, b.mT) if each.transposed else (b, a)  # [..., out, rank] and [..., rank, in] of the weight
        if box is not None:
            left, right = left[tuple(box[:-1])], right[(*box[:-2], slice(None), box[-1])]
        product.zero_()
        for rank in range(right.shape[-2]):
            product.add_(torch.mul(left[..., rank, None], right[..., rank, None, :], out=term))
        merged.add_(product.mul_(each.scaling))
    return merged.to(weight.dtype)


def require_materialized_adapters(model: nn.Module) -> None:
    """Raise :class:`ModelError` if adapters are on the meta device: the base model's checkpoint lacks them."""
    if not is_peft_model(model):
        return
    on_meta = [name for name, parameter in model.named_parameters() if ".lora_" in name and parameter.is_meta]
    if on_meta:
        raise ModelError(
            f"{len(on_meta)} adapter tensors are on the meta device, first {on_meta[0]}, and the base model's "
            "checkpoint does not have them: call init_adapters or load_adapter first, or load a training state"
        )


def saved_tensors(model: Any, entries: Sequence[StateEntry], adapter: str) -> dict[str, Tensor]:
    """Return all that peft saves of an adapter: its factors, and its copies of the modules that it trains in full.

    Raises:
        OptionError: the model has no such adapter.
    """
    tensors = adapter_tensors(model, entries, adapter)
    copies = f".modules_to_save.{adapter}."
    named = ((name, entry.tensor) for entry in entries for name in entry.names[:1] if copies in name)
    return tensors | {name.replace(copies, "."): tensor for name, tensor in named}


def adapter_tensors(model: Any, entries: Sequence[StateEntry], adapter: str) -> dict[str, Tensor]:
    """Return an adapter's low-rank factors by the names that peft gives them on disk.

    Raises:
        OptionError: the model has no such adapter.
    """
    if not is_peft_model(model) or adapter not in model.peft_config:
        raise OptionError(f"{type(model).__name__} has no adapter {adapter!r}: pass the PeftModel and one of its names")
    tensors = {}
    for entry in entries:
        for part in ("lora_A", "lora_B"):
            if f".{part}.{adapter}." in entry.names[0]:
                tensors[entry.names[0].replace(f".{part}.{adapter}.", f".{part}.")] = entry.tensor
    return tensors
