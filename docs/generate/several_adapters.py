"""Several low-rank adapters of one model, one per token: multi-tenant training as in prime-rl.

All adapters are parameters of their block and are gathered with it.  Adapters of linear layers are stacked before
their products: all have gradients and moments.  Of a stacked expert's adapters, only the computing adapter has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten

#: Linear layers that adapters are added to, by name.
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def with_several(model: nn.Module, rank: int, adapters: int) -> nn.Module:
    """Return a frozen model with several trainable adapters on linear layers and stacked experts, in place."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        owner, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear) and name in _TARGETS:
            setattr(model.get_submodule(owner), name, _AdaptedLinear(module, rank, adapters))
        elif name == "experts" and getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3:
            setattr(model.get_submodule(owner), name, _AdaptedExperts(module, rank, adapters))
    return model


def _matrices(count: int, *shape: int, like: Tensor) -> nn.ParameterList:
    empty = (torch.empty(*shape, device=like.device, dtype=like.dtype) for _ in range(count))
    return nn.ParameterList(map(nn.Parameter, empty))


class _AdaptedLinear(nn.Module):
    """A frozen linear layer and some adapters, stacked before their products."""

    def __init__(self, base: nn.Linear, rank: int, adapters: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = _matrices(adapters, rank, base.in_features, like=base.weight)
        self.lora_B = _matrices(adapters, base.out_features, rank, like=base.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        first, second = torch.stack(list(self.lora_A)), torch.stack(list(self.lora_B))
        low = hidden @ first[0].t()
        found: Tensor = self.base_layer(hidden) + (low @ second[0].t()) * 2.0
        return found


class _AdaptedExperts(nn.Module):
    """Frozen stacked experts with adapters of their three projections; one adapter computes."""

    def __init__(self, base: Any, rank: int, adapters: int) -> None:
        super().__init__()
        self.base_layer = base
        down: Tensor = base.down_proj
        self.num_experts, features, width = down.shape
        shapes = {"gate": (width, features), "up": (width, features), "down": (features, width)}
        for name, (rows, columns) in shapes.items():
            for side, shape in {"A": (rank, columns), "B": (rows, rank)}.items():
                used, idle = (  # FSDP2 divides the first dim
                    nn.Parameter(torch.empty(self.num_experts, *sizes, device=down.device, dtype=down.dtype))
                    for sizes in (shape, (adapters - 1, *shape))
                )
                setattr(self, f"{name}_lora_{side}", used)
                setattr(self, f"{name}_idle_lora_{side}", idle)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of experts for ``hidden`` of ``[tokens, features]``, sorted by expert inside."""
        top_k = index.shape[1]
        order = torch.argsort(index.flatten())
        counts = torch.histc(index.flatten().float(), bins=self.num_experts, min=0, max=self.num_experts)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = hidden[order // top_k]
        gate, up = self.base_layer.gate_up_proj.chunk(2, 1)
        inner = torch.nn.functional.silu(self._project(rows, gate, "gate", ends)) * self._project(rows, up, "up", ends)
        found = self._project(inner, self.base_layer.down_proj, "down", ends)
        found = (found.float() * weights.flatten()[order, None]).to(hidden.dtype)
        return torch.zeros_like(hidden).index_add(0, order // top_k, found)

    def _project(self, rows: Tensor, weight: Tensor, name: str, ends: Tensor) -> Tensor:
        first, second = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
        low = aten._grouped_mm(rows, first.transpose(1, 2), ends)
        added = aten._grouped_mm(low, second.transpose(1, 2), ends)
        found: Tensor = aten._grouped_mm(rows, weight.transpose(1, 2), ends) + 2.0 * added
        return found
