"""Parts of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def merged_parameter_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one group of the parameters, and of the nodes from which a split backward continues to them."""
    # torch 2.11 to 2.15 puts a parameter between several nodes into several groups, and runs a backward for each group:
    # its gradient is then counted twice, or raises because the graph is freed. ``get_param_groups`` in
    # torch/distributed/pipelining/_backward.py joins a parameter's groups one by one. One backward over all nodes
    # counts each gradient once.
    gradients: dict[Any, Any] = {}
    for group in groups:
        reached = zip(group["intermediates"], group.get("grads") or (), strict=False)
        gradients.update((node, values) for node, values in reached if values is not None)
    parameters = dict.fromkeys(p for group in groups if any(group.get("grads") or ()) for p in group["params"])
    return [{"params": parameters, "intermediates": [*gradients], "grads": [*gradients.values()]}] if gradients else []
