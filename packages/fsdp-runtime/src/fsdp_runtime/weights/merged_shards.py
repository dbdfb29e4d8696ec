"""A model's shards with its adapters merged: each rank merges its own part of a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_runtime.sharded.chunks import local_part, slices_of
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.weights.adapters import merge_lora
from fsdp_runtime.weights.export import ExportGroup


class MergedShards:
    """The merged shards of the weights that have active adapters; factors are gathered, a weight's at a time."""

    # The bits are those of ``stream_weights``, as the products of the factors are added one by one.

    def __init__(self, groups: Sequence[ExportGroup], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._adapted = [
            (name, group.sources[name], factors) for group in groups for name, factors in group.adapters.items()
        ]
        self.local = {
            name: torch.empty_like(local_part(weight)[0], dtype=dtype, requires_grad=False)
            for name, weight, _ in self._adapted
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the present adapters into the present weights.  Collective over the model's ranks."""
        for name, weight, factors in self._adapted:
            named = {key: tensor for f in factors for key, tensor in ((f.a_name, f.a), (f.b_name, f.b))}
            full = dict(zip(named, full_tensors(list(named.values()), dtype=self._dtype), strict=True))
            local, box = local_part(weight)
            merged = self.local[name]
            merged.copy_(merge_lora(local.detach().to(merged.dtype), factors, full, slices_of(box)))
