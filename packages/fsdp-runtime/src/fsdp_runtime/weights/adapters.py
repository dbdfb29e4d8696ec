"""LoRA adapters in checkpoints: state entries of the base model, and weights with the adapters merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fsdp_runtime._peft_compat import BaseModel, adapter_file, is_disabled, is_peft_model, kind_of
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.model.stages import with_absent_tensors
from fsdp_runtime.model.state import StateEntry


@dataclass(frozen=True)
class LoraFactors:
    """Factors of one adapter: ``scaling * B @ A`` is added to a weight, or the transpose to a transposed weight."""

    a_name: str
    b_name: str
    a: Tensor  # ``[rank, in]``; for stacked experts ``[experts * rank, in]``
    b: Tensor  # ``[out, rank]``; for stacked experts ``[out, rank * experts]``
    scaling: float
    transposed: bool  # the weight is ``[in, out]``
    experts: int | None = None


def base_state_entries(base: BaseModel, entries: Sequence[StateEntry], *, exported: bool = False) -> list[StateEntry]:
    """Return the state entries of a model without its adapters, under the names of the base model."""
    # A module that an adapter trains in full has two copies. The base model's copy is returned, and also the adapter's
    # copy if it is on the meta device. With ``exported``, only the active adapter's copy is returned.
    if not base.prefix:
        return list(entries)
    owners = {place.path: place for place in base.places if place.wrapper is None}
    base_entries = []
    for entry in _inside(base, entries):
        names = []
        for name in entry.names:
            owner, _, attribute = name.rpartition(".")
            place = owners.get(owner)
            if place is not None and (place.in_force if exported else not place.is_copy or entry.tensor.is_meta):
                names.append(f"{place.base}.{attribute}" if place.base else attribute)
        if names:
            base_entries.append(replace(entry, names=tuple(names)))
    return base_entries


def _inside(base: BaseModel, entries: Sequence[StateEntry]) -> Iterator[StateEntry]:
    """Yield the entries inside of the base model, adapters included, under their names there."""
    for entry in entries:
        names = [name.removeprefix(base.prefix) for name in entry.names if name.startswith(base.prefix)]
        if names:
            yield replace(entry, names=tuple(names))


def lora_factors(
    base: BaseModel, entries: Sequence[StateEntry], base_entries: Sequence[StateEntry]
) -> dict[str, list[LoraFactors]]:
    """Return the active adapters' factors by the name of their weight in :func:`base_state_entries`."""
    tensors = {name: entry.tensor for entry in _inside(base, entries) for name in entry.names}
    tied = {name for entry in base_entries for name in entry.names if len(entry.names) > 1}
    layers = {layer.path: layer for layer in base.lora_layers}
    factors: dict[str, list[LoraFactors]] = {}
    for place in base.places:
        if not place.in_force or place.wrapper in (None, "copies"):
            continue
        layer = layers.get(place.path)
        if layer is None:
            if not is_disabled(place.module):
                raise OptionError(
                    f"{place.path} is adapted by peft's {kind_of(place.module)}, which is not merged for export: "
                    "export the base model inside model.disable_adapter(), and the adapter with save_adapter"
                )
            continue
        name = layer.parameter or (layer.matrix or "weight").rpartition(".")[2]
        weight = f"{place.base}.{name}"
        if layer.odd or layer.biased or weight in tied:
            raise OptionError(
                f"the adapters of {layer.path} cannot be merged for export: they are merged already, not plain LoRA "
                f"on a linear layer or on stacked experts, or on a tied weight ({layer.odd or 'a bias or a tie'}); "
                "unmerge them, or leave the layer out of target_modules"
            )
        for adapter, scaling in layer.scaling.items():
            a, b = (f"{layer.path}.{part}.{adapter}.weight" for part in ("lora_A", "lora_B"))
            experts = None if layer.parameter is None else layer.number
            adapter_factors = LoraFactors(a, b, tensors[a], tensors[b], scaling, layer.transposed, experts)
            factors.setdefault(weight, []).append(adapter_factors)
    return factors


def merge_lora(
    weight: Tensor, factors: Sequence[LoraFactors], full: Mapping[str, Tensor], box: Sequence[slice] | None = None
) -> Tensor:
    """Merge adapters into a weight or a part of it; the result has the wider of the weight's dtype and float32."""
    # The adapter's rank-1 products are added one by one: a matrix product's order of additions, and so its last bit,
    # depends on the part's shape. ``box`` has the slices of the part: experts (if stacked), rows, columns.
    exact = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(exact, copy=True)
    product, term = torch.empty_like(merged), torch.empty_like(merged)
    for factor in factors:
        a, b = full[factor.a_name].to(exact), full[factor.b_name].to(exact)
        if factor.experts is not None:
            a = a.view(factor.experts, -1, a.shape[-1])
            b = b.view(len(b), -1, factor.experts).permute(2, 0, 1)  # peft has the experts innermost
        left, right = (a.mT, b.mT) if factor.transposed else (b, a)  # [..., out, rank], [..., rank, in] of the weight
        if box is not None:
            left, right = left[tuple(box[:-1])], right[(*box[:-2], slice(None), box[-1])]
        product.zero_()
        for rank in range(right.shape[-2]):
            product.add_(torch.mul(left[..., rank, None], right[..., rank, None, :], out=term))
        merged.add_(product.mul_(factor.scaling))
    return merged


def require_materialized_adapters(base: BaseModel, entries: Sequence[StateEntry]) -> None:
    """Raise :class:`ModelError` if adapters are on the meta device: the base model's checkpoint lacks them."""
    on_meta = [name for entry in entries if entry.tensor.is_meta for name in entry.names if ".lora_" in name]
    if base.prefix and on_meta:
        raise ModelError(
            f"{len(on_meta)} adapter tensors are on the meta device, first {on_meta[0]}, and the base model's "
            "checkpoint does not have them: call init_adapters or load_adapter first, or load a training state"
        )


def saved_tensors(
    model: Any, entries: Sequence[StateEntry], adapter: str, *, embeddings: bool | Literal["auto"]
) -> dict[str, Tensor]:
    """Return the tensors that peft saves for an adapter, by the names in the adapter's file."""
    require_adapter(model, adapter)
    tensors = {name: entry.tensor for entry in entries for name in entry.names}
    with with_absent_tensors(entries):
        saved = adapter_file(model, adapter, tensors, embeddings=embeddings)
    known = {id(tensor) for tensor in tensors.values()}
    if odd := next((name for name, tensor in saved.items() if id(tensor) not in known), None):
        kind = type(model.peft_config[adapter]).__name__
        raise OptionError(f"peft computes {odd} of a {kind} when it saves it: save it from a model of plain tensors")
    return saved


def adapter_tensors(model: Any, entries: Sequence[StateEntry], adapter: str) -> dict[str, Tensor]:
    """Return an adapter's low-rank factors by the names that peft gives them on disk."""
    require_adapter(model, adapter)
    return {
        entry.names[0].replace(f".{part}.{adapter}.", f".{part}."): entry.tensor
        for entry in entries
        for part in ("lora_A", "lora_B")
        if f".{part}.{adapter}." in entry.names[0]
    }


def require_adapter(model: Any, adapter: str) -> None:
    """Refuse a model without an adapter of a name."""
    if not is_peft_model(model) or adapter not in model.peft_config:
        raise OptionError(f"{type(model).__name__} has no adapter {adapter!r}: pass the PeftModel and one of its names")
