"""A model's shards with its adapters merged: each rank merges its own part of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime.sharded.chunks import local_part
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.weights.adapters import LoraFactors, merge_lora
from fsdp_runtime.weights.export import ExportGroup


class _Adapted(NamedTuple):
    """A weight, its adapters, and where its merged shard is kept."""

    weight: Tensor
    factors: Sequence[LoraFactors]
    merged: Tensor


class MergedShards:
    """The merged shards of the weights that have active adapters; factors are gathered, a weight's at a time.

    The bits are those of ``stream_weights``, as the products of the factors are added one by one.
    """

    def __init__(self, groups: Sequence[ExportGroup], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._adapted = {}
        for group in groups:
            for name, factors in group.adapters.items():
                weight = group.sources[name]
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                merged = torch.empty_like(local, dtype=dtype, requires_grad=False)
                self._adapted[name] = _Adapted(weight, factors, merged)

    @property
    def local(self) -> dict[str, Tensor]:
        """This rank's merged shards by the names of their weights."""
        return {name: each.merged for name, each in self._adapted.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the present adapters into the present weights.  Collective over the model's ranks."""
        for each in self._adapted.values():
            named = {name: tensor for f in each.factors for name, tensor in ((f.a_name, f.a), (f.b_name, f.b))}
            full = dict(zip(named, full_tensors(list(named.values()), dtype=self._dtype), strict=True))
            local, box = local_part(each.weight)
            each.merged.copy_(merge_lora(local.detach().to(each.merged.dtype), each.factors, full, box))
