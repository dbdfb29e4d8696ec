"""Plan an export of weights: names, shapes, dtypes, source tensors in the model, and adapters to merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import BaseModel
from fsdp_runtime._transformers_compat.checkpoints import left_out_on_save
from fsdp_runtime._transformers_compat.conversions import Conversion, Translation, model_to_checkpoint
from fsdp_runtime._transformers_compat.dtypes import kept_dtypes
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import ConversionError, OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.boxes import Chunk, identity_chunk, local_part, require_plain_shards, slices_of
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.weights.adapters import LoraFactors, base_state_entries, lora_factors, merge_lora
from fsdp_runtime.weights.conversion import TensorSpec, trace_conversion
from fsdp_runtime.weights.quantize.packed import dequantized_entry

Names = Literal["checkpoint", "model"]


@dataclass(frozen=True)
class ExportedTensor(WeightInfo):
    """Name, dtype, shape and chunks of an exported tensor."""

    chunks: Sequence[Chunk] | None  # of the model's tensors; ``None``: run the conversion
    parts: Sequence[WeightInfo] = ()  # values and scales of a quantized tensor

    @property
    def stored(self) -> Sequence[WeightInfo]:
        """The tensors of a file or a stream: the parts, or the tensor itself."""
        return self.parts or (self,)


@dataclass(frozen=True)
class ExportGroup:
    """Tensors of the model that are gathered together, and the exported tensors built from them."""

    sources: Mapping[str, Tensor] = field(default_factory=dict)  # by the model's names
    tensors: Sequence[ExportedTensor] = ()
    conversion: Conversion | None = None  # makes the tensors without chunks
    # to merge, by the weight's name; ``sources`` has the factors too
    adapters: Mapping[str, Sequence[LoraFactors]] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # export dtypes of the sources, factors excluded
    ranks: tuple[int, ...] | None = None  # global ranks with all sources; ``None`` for all ranks of the model

    @property
    def nbytes(self) -> int:
        """Bytes of the full sources."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.sources.values())

    def produce(self, full: Mapping[str, Tensor]) -> Iterator[tuple[ExportedTensor, Tensor]]:
        """Yield the exported tensors, not yet rounded to their dtypes; views of the full sources if possible."""
        merged = {name: merge_lora(full[name], factors, full) for name, factors in self.adapters.items()}
        full = {**full, **merged}
        converted: Mapping[str, Tensor] = {}
        for item in self.tensors:
            if item.chunks is None and self.conversion is not None:
                converted = converted or self.conversion.run(
                    {name: full[name].to(torch.promote_types(full[name].dtype, to)) for name, to in self.dtypes.items()}
                )
                yield item, converted[item.name].contiguous()
            else:
                yield item, _assemble(item, full)


def export_groups(
    base: BaseModel, entries: Sequence[StateEntry], *, dtype: torch.dtype | None, names: Names
) -> list[ExportGroup]:
    """Plan the export of a model's state, in model order; no communication, equal on every rank."""
    option: object = dtype
    if option is not None and not (isinstance(option, torch.dtype) and option.is_floating_point):
        raise OptionError(f"dtype={dtype!r}: weights are exported in a floating-point dtype, such as torch.bfloat16")
    base_entries = base_state_entries(base, entries, exported=True)
    factors = lora_factors(base, entries, base_entries)
    require_plain_shards(base_entries)
    base_entries = [dequantized_entry(entry) for entry in base_entries]
    tensors, mapping = exported_names(base.module, base_entries, names)
    fixed_dtypes = {} if dtype is None else kept_dtypes(base.module, tensors, dtype)
    specs = {
        name: TensorSpec(tuple(t.shape), fixed_dtypes.get(name, dtype) if dtype and t.is_floating_point() else t.dtype)
        for name, t in tensors.items()
    }
    holders = {name: entry.ranks for entry in base_entries for name in entry.names}
    position = {name: index for index, name in enumerate(tensors)}
    conversion_at = {
        min(conversion.sources, key=position.__getitem__): conversion for conversion in mapping.conversions
    }
    groups = []
    for name in tensors:
        conversion = conversion_at.get(name)
        if (target := mapping.renamed.get(name)) is not None:
            spec, dtypes = specs[name], {name: specs[name].dtype}
            exported = [ExportedTensor(target, spec.dtype, spec.shape, [identity_chunk(name, spec.shape)])]
        elif conversion is not None:
            dtypes = {source: specs[source].dtype for source in conversion.sources}
            converted = trace_conversion(conversion, specs)
            exported = [ExportedTensor(out, item.dtype, item.shape, item.chunks) for out, item in converted.items()]
        else:
            continue
        adapters = {source: factors[source] for source in dtypes if source in factors}
        sources = {source: tensors[source] for source in dtypes}
        for factor in (factor for members in adapters.values() for factor in members):
            sources |= {factor.a_name: factor.a, factor.b_name: factor.b}
        ranks = common_ranks({source: holders[source] for source in dtypes})
        groups.append(ExportGroup(sources, exported, None if target else conversion, adapters, dtypes, ranks))
    return groups


def exported_names(
    model: nn.Module, entries: Sequence[StateEntry], names: Names
) -> tuple[dict[str, Tensor], Translation]:
    """Return the tensors of an export by the model's names, and the renamings and conversions of the export."""
    # A tied tensor is saved once if the model's class declares the tie: transformers then ties it again on load. A
    # tensor shared without a declaration is saved under all its names.
    if names not in get_args(Names):
        raise OptionError(f"names={names!r}: write 'checkpoint' or 'model'")
    is_transformers = is_transformers_model(model)
    aliases, ignored = left_out_on_save(model) if is_transformers else (set(), set())
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        saved = tuple(name for name in entry.names if name not in aliases) or entry.names[:1]
        tensors.update(
            (name, entry.tensor) for name in (saved if is_transformers else saved[:1]) if name not in ignored
        )
    if is_transformers and names == "checkpoint":
        return tensors, model_to_checkpoint(model, tensors)
    return tensors, Translation({name: name for name in tensors}, ())


def common_ranks(holders: Mapping[str, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Return the ranks with all tensors of a conversion."""
    sets = [set(ranks) for ranks in holders.values() if ranks is not None]
    if sets and not (common := set.intersection(*sets)):
        raise ConversionError(
            f"{', '.join(list(holders)[:8])} become tensors of the checkpoint together, and no pipeline stage has all "
            'of them: export with names="model", or use a mesh without pp'
        )
    return tuple(sorted(common)) if sets else None


def _assemble(item: ExportedTensor, full: Mapping[str, Tensor]) -> Tensor:
    parts = [(chunk, chunk.to_target(full[chunk.source][slices_of(chunk.source_box)])) for chunk in item.chunks or ()]
    if len(parts) == 1:
        return parts[0][1].contiguous()
    dtype = reduce(torch.promote_types, {values.dtype for _, values in parts}, item.dtype)
    tensor = torch.empty(item.shape, dtype=dtype, device=next(iter(full.values())).device)
    for chunk, values in parts:
        tensor[slices_of(chunk.target)] = values
    return tensor


class MergedShards:
    """Shards of the adapted weights, with the adapters merged; factors are gathered for one weight at a time."""

    # Bit-identical to ``stream_weights``: both add rank-1 products of the factors one by one. ``exact`` leaves the
    # merged shards unrounded, for further computations.

    def __init__(self, groups: Sequence[ExportGroup], *, exact: bool = False) -> None:
        self._adapted = [
            (name, group.sources[name], factors) for group in groups for name, factors in group.adapters.items()
        ]
        self.local = {
            name: torch.empty_like(
                local_part(weight)[0],
                dtype=torch.promote_types(weight.dtype, torch.float32) if exact else group.dtypes[name],
                requires_grad=False,
            )
            for group in groups
            for name, weight in group.sources.items()
            if name in group.adapters
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the current adapters into the current weights.  Collective over the model's ranks."""
        for name, weight, factors in self._adapted:
            named = {key: tensor for f in factors for key, tensor in ((f.a_name, f.a), (f.b_name, f.b))}
            full = dict(zip(named, full_tensors(list(named.values())), strict=True))
            local, box = local_part(weight)
            self.local[name].copy_(merge_lora(local.detach(), factors, full, slices_of(box)))
