"""``torch.autograd.set_detect_anomaly`` in a backward with gradients that are DTensors.

It asks every gradient ``isnan(gradient).any()`` by a private operator.  DTensor has no sharding strategy for it in 2.10
to 2.15 (no upstream issue found), so that the first backward over ``tp`` would fail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


# Each rank looks at its own part, without a collective: the mode may be on in one rank alone.
def _of_own_part(tensor: Any) -> list[tuple[list[Any], list[Any]]]:
    return [([Replicate()], [placement]) for placement in (Replicate(), *map(Shard, range(tensor.ndim)))]


register_sharding(torch.ops.aten._is_any_true.default)(_of_own_part)
