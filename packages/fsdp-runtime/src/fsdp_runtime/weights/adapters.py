"""A model with low-rank adapters as its checkpoint sees it: without them, or with them merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model, is_peft_model, lora_layers
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.model.state import Entry, entries


@dataclass(frozen=True)
class Factors:
    """The factors of one adapter of a weight: it stands for ``scaling * B @ A``, transposed where the weight is.

    Args:
        a_name: a name for ``a``.
        b_name: a name for ``b``.
        a: ``[rank, in]``.
        b: ``[out, rank]``.
        scaling: the adapter's factor.
        transposed: the weight is ``[in, out]``.
    """

    a_name: str
    b_name: str
    a: Tensor
    b: Tensor
    scaling: float
    transposed: bool


def base_entries(model: nn.Module) -> list[Entry]:
    """The tensors of a model by the names that they have without adapters, and no adapters."""
    if not is_peft_model(model):
        return entries(model)
    base = base_model(model)
    prefixes = {f"{layer.path}.": f"{layer.path}.base_layer." for layer in lora_layers(base)}
    return list(_without_adapters(entries(base), prefixes))


def _without_adapters(found: Sequence[Entry], prefixes: Mapping[str, str]) -> Iterator[Entry]:
    for entry in found:
        names = []
        for name in entry.names:
            layer = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if layer is None:
                names.append(name)
            elif name.startswith(prefixes[layer]):
                names.append(layer + name.removeprefix(prefixes[layer]))
        if names:
            yield Entry(tuple(names), entry.tensor)


def factors_by_weight(model: nn.Module, found: Sequence[Entry]) -> dict[str, list[Factors]]:
    """The adapters in force, by the name of the weight that each belongs to.

    Raises:
        OptionError: an adapter that is no plain LoRA, or one of a tied weight, which its other place does not have.
    """
    if not is_peft_model(model):
        return {}
    base = base_model(model)
    tensors = {name: entry.tensor for entry in entries(base) for name in entry.names}
    tied = {name for entry in found for name in entry.names if len(entry.names) > 1}
    factors: dict[str, list[Factors]] = {}
    for layer in lora_layers(base):
        weight = f"{layer.path}.weight"
        if not layer.plain or weight in tied:
            raise OptionError(
                f"the adapters of {layer.path} cannot be added on the way out: they are merged already, no plain LoRA "
                "on a linear layer, or on a tied weight; unmerge them, or leave the layer out of target_modules"
            )
        for name, scaling in layer.scaling.items():
            a, b = (f"{layer.path}.{part}.{name}.weight" for part in ("lora_A", "lora_B"))
            factors.setdefault(weight, []).append(Factors(a, b, tensors[a], tensors[b], scaling, layer.transposed))
    return factors


def merge(weight: Tensor, factors: Sequence[Factors], full: Mapping[str, Tensor]) -> Tensor:
    """A full weight with its adapters added, computed in float32 or better, in the weight's dtype."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(exact, copy=True)
    for each in factors:
        product = full[each.b_name].to(exact) @ full[each.a_name].to(exact)
        merged.add_(product.T if each.transposed else product, alpha=each.scaling)
    return merged.to(weight.dtype)


def require_real_adapters(model: nn.Module) -> None:
    """Raise :class:`ModelError` where adapters are on the meta device: no checkpoint of the base model has them."""
    if not is_peft_model(model):
        return
    on_meta = [name for name, parameter in model.named_parameters() if ".lora_" in name and parameter.is_meta]
    if on_meta:
        raise ModelError(
            f"{len(on_meta)} tensors of adapters are on the meta device, first {on_meta[0]}, and the base model's "
            "checkpoint does not have them: call init_adapters or load_adapter first, or load a training state"
        )
