"""Mixtures that stay balanced: router biases that follow the load of the experts."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import ModelError, OptionError, RoutesError
from fsdp_runtime.model.stages import whole_entries, with_absent_tensors
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.boxes import local_part, slices_of
from fsdp_runtime.sharded.collectives import all_reduce_over, model_mesh
from fsdp_runtime.steps.guards.calls import models_with
from fsdp_runtime.steps.routing.replay import record_routes
from fsdp_runtime.steps.routing.routers import Router, find_routers
from fsdp_runtime.steps.routing.routes import Routes

logger = logging.getLogger(__name__)

#: Biases that only select: DeepSeek-V3's name, ERNIE's and LFM2's.
_BIAS = re.compile(r"(^|\.)(e_score_)?correction_bias$|(^|\.)expert_bias$")
#: Axes with different tokens on each rank; ``record_routes`` gathers the tokens of ``cp``.
_BATCH_AXES = ("dp_replicate", "dp_shard")


class RouterBalance:
    """Move the correction bias of every router against the load of its experts, without an auxiliary loss.

    The loads are counted over the tokens of all ranks and all forwards since the last step.  A recomputed forward
    counts once.  ``step`` adds ``rate`` to the biases of experts below the mean load, and subtracts it above; the sum
    of a router's biases does not change.

    Args:
        model: a mixture; the tokens of this rank count where it is not parallelized.  Routers without a bias are left
            alone, and a line of the log names them.
        rate: the change of a bias per step.

    Raises:
        ModelError: no router has a correction bias, a selection is unknown, or other code sharded the model.
        OptionError: ``rate`` is negative.

    Source: L. Wang et al., arXiv:2408.15664; the sign rule of DeepSeek-V3 (arXiv:2412.19437).

    Example:
        >>> import torch, transformers
        >>> from fsdp_runtime.steps import RouterBalance
        >>> config = transformers.Glm4MoeConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        ...     first_k_dense_replace=0,
        ... )
        >>> model = transformers.Glm4MoeForCausalLM(config)
        >>> balance = RouterBalance(model, rate=0.5)
        >>> with balance.counting():
        ...     loss = model(torch.randint(32, (2, 5))).logits.logsumexp(-1).sum()
        >>> balance.step()
        >>> {path: int(counts.sum()) for path, counts in balance.loads.items()}
        {'model.layers.0.mlp.gate': 20}
    """

    def __init__(self, model: nn.Module, rate: float = 1e-3) -> None:
        if rate < 0:
            raise OptionError(f"rate={rate!r}: give 0 or more")
        self.rate, self._model, self._counts = rate, model, dict[str, Tensor]()
        #: The tokens of each expert before the last step, ``[experts]``, by the path of the router.
        self.loads: dict[str, Tensor] = {}
        with with_absent_tensors(whole_entries(model, state_entries(model))):
            self._routers = find_routers(model).by_path
        self._biases()

    def _biases(self) -> dict[str, Tensor]:
        """Return the biases by the path of the router; ``parallelize`` and loads may replace tensors."""
        entries = whole_entries(self._model, state_entries(self._model))
        tensors = {name: entry.tensor for entry in entries for name in entry.names}
        biases = {path: bias for path, router in self._routers.items() if (bias := _bias(router, tensors)) is not None}
        if not biases:
            raise ModelError(
                f"no router of {type(self._model).__name__} has a correction bias ({', '.join(self._routers)}): "
                "balance its experts by the auxiliary loss of its config"
            )
        if not self.loads and (without := [path for path in self._routers if path not in biases]):
            logger.info("routers without a correction bias are left alone: %s", ", ".join(without))
        return biases

    @contextmanager
    def counting(self, mask: Tensor | None = None) -> Iterator[Routes]:
        """Record the routes of one forward, or of one schedule of stages, and count them; see :meth:`count`."""
        with record_routes(self._model) as routes:
            yield routes
        self.count(routes, mask)

    @torch.no_grad()
    def count(self, routes: Routes, mask: Tensor | None = None) -> None:
        """Add the routes of one forward.

        Args:
            routes: a result of ``record_routes``, or the replayed routes; -1 is not counted.
            mask: ``[batch, length]``, false at tokens that are not counted, such as padding.

        Raises:
            RoutesError: the mask has another number of tokens than the routes.
        """
        for path, ids in routes.items():
            if mask is not None and mask.numel() != len(ids):
                raise RoutesError(f"mask has {mask.numel()} tokens, and the routes of {path} have {len(ids)}")
            counted = ids >= 0 if mask is None else (ids >= 0) & mask.bool().reshape(-1, 1).to(ids.device)
            empty = torch.zeros(self._routers[path].experts, dtype=torch.int64, device=ids.device)
            counts = empty.scatter_add(0, ids.clamp(min=0).flatten().long(), counted.flatten().long())
            self._counts[path] = self._counts.get(path, 0) + counts

    @torch.no_grad()
    def step(self, *_: Any) -> None:
        """Move the biases and forget the counts.  Collective.

        Call it before the optimizer's step, or as a hook: ``optimizer.register_step_pre_hook(balance.step)``.

        Raises:
            RoutesError: no forward was counted since the last step.
        """
        if not self._counts:
            raise RoutesError("no forward was counted since the last step: run it inside `with balance.counting():`")
        paths, biases = sorted(self._counts), self._biases()
        groups = batch_groups(self._model)
        summed = all_reduce_over(groups, torch.cat([self._counts[path] for path in paths]), dist.ReduceOp.SUM)
        sizes = [len(self._counts[path]) for path in paths]
        self.loads, self._counts = dict(zip(paths, torch.split_with_sizes(summed, sizes), strict=True)), {}
        for path, bias in biases.items():
            if path in self.loads and not bias.is_meta:  # else another pipeline stage has the bias
                loads = self.loads[path].double()
                change = (loads.mean() - loads).sign() * self.rate
                local, box = local_part(bias)
                full = (change - change.mean()).reshape(bias.shape)
                local.add_(full[slices_of(box)].to(local.device, local.dtype))


def load_table(loads: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return one row per router for a logger.

    Args:
        loads: ``RouterBalance.loads``, or other numbers of tokens ``[experts]`` by router.

    Returns:
        Rows of ``router``, ``entropy`` (of the experts' shares, 1 for equal loads), ``most`` and ``least`` (largest and
        smallest load over the mean) and ``loads``.  Waits for the device once per router.

    Example:
        >>> import torch
        >>> from fsdp_runtime.steps import load_table
        >>> load_table({"gate": torch.tensor([2, 2, 0, 0])})
        [{'router': 'gate', 'entropy': 0.5, 'most': 2.0, 'least': 0.0, 'loads': [2, 2, 0, 0]}]
    """
    rows: list[dict[str, Any]] = []
    for router, counts in loads.items():
        numbers = counts.tolist()
        shares = [number / max(sum(numbers), 1) for number in numbers]
        entropy = -sum(share * math.log(share) for share in shares if share) / math.log(max(len(shares), 2))
        extremes = {"most": max(shares) * len(shares), "least": min(shares) * len(shares)}
        rows.append({"router": router, "entropy": entropy, **extremes, "loads": numbers})
    return rows


def batch_groups(model: nn.Module) -> list[ProcessGroup]:
    """Return this rank's groups on the axes with different tokens on each rank."""
    mesh = model_mesh(model, model.parameters())
    if mesh is None:
        return []
    if not models_with(model.parameters()):
        raise ModelError("the model was sharded by other code, so its batch axis is unknown: call parallelize")
    axes = [axis for axis in _BATCH_AXES if axis in (mesh.mesh_dim_names or ())]
    return [mesh.get_group(axis) for axis in axes if mesh[axis].size() > 1]


def _bias(router: Router, tensors: dict[str, Tensor]) -> Tensor | None:
    """Return the correction bias in a router or beside it."""
    for place in (router.path, router.path.rpartition(".")[0]):
        for name, tensor in tensors.items():
            inside = name.removeprefix(f"{place}.")
            if inside != name and _BIAS.search(inside) and tensor.numel() == router.experts:
                return tensor
    return None
