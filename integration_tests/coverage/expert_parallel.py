"""What one rank finds of one mixture under expert parallelism, each data-parallel rank with tokens of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from coverage.measure import Refused, gradient_errors
from coverage.peers import NoPlanError, experts_by_transformers
from coverage.shrink import VOCAB
from coverage.table import UNBUILDABLE, Entry, built, entries, tiny_model
from fsdp_runtime import FsdpRuntimeError, parallelize, submesh
from harness import parity
from harness.float64 import compute_in_float64
from harness.parity import RankReport, largest, logits_of, mesh_for
from tp_plans import TpPlansError
from tp_plans.infer.experts import expert_stacks
from tp_plans.model_tree import ModelTree

BATCH, LENGTH = 4, 7

#: The meshes that every mixture is measured on.
MESHES: tuple[Mapping[str, int], ...] = (
    {"dp_shard": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "tp": 2, "ep": 4},
    {"dp_shard": 4, "ep": 4},
)


def mixtures() -> dict[str, Entry]:
    """The rows whose model has stacked experts, by name; builds every row on the meta device."""
    found = {}
    for name, entry in entries().items():
        if name in UNBUILDABLE:
            continue
        with torch.device("meta"):
            tree = ModelTree.of(built(entry))
        if expert_stacks(tree):
            found[name] = entry
    return found


def measure_experts(
    name: str, meshes: Sequence[Mapping[str, int]] = MESHES, way: str = "parallelize"
) -> list[RankReport]:
    """Measure one mixture on every mesh, in one of the ways; every rank of the world must call it."""
    in_float64 = WAYS[way].dtype == torch.float64
    with compute_in_float64() if in_float64 else nullcontext():
        return [_measured(name, axes, WAYS[way]) for axes in meshes]


@dataclass(frozen=True)
class Way:
    """A way of dividing experts over ``ep``: a function of the model, its row's name and the mesh, and the dtype."""

    apply: Callable[[nn.Module, str, Mapping[str, int]], nn.Module]
    dtype: torch.dtype = torch.float64


def _by_parallelize(model: nn.Module, name: str, axes: Mapping[str, int]) -> nn.Module:
    return parallelize(model, mesh_for(axes), **entries()[name].options)


def _by_transformers(model: nn.Module, name: str, axes: Mapping[str, int]) -> nn.Module:
    return experts_by_transformers(model, axes)


WAYS: Mapping[str, Way] = {
    "parallelize": Way(_by_parallelize),
    "transformers": Way(_by_transformers),
    "transformers in float32": Way(_by_transformers, torch.float32),
}


def _measured(name: str, axes: Mapping[str, int], way: Way) -> RankReport:
    model, ids, weights, expected, gradients = _reference(name, way.dtype)
    try:
        candidate = way.apply(copy.deepcopy(model), name, axes)
    except (TpPlansError, FsdpRuntimeError, NoPlanError) as error:
        raise Refused(str(error)) from error
    data = submesh(mesh_for(axes), "dp")
    share = BATCH // data.size()
    own = slice(share * data.get_local_rank(), share * (data.get_local_rank() + 1))
    logits = logits_of(candidate, {"input_ids": ids[own]})
    (logits * weights[own]).sum().mul(data.size()).backward()
    # In float64 every number of the model is unique and found by its value, however a layout is labelled.
    by_value = expected.dtype == torch.float64
    errors = gradient_errors(model, candidate, gradients) if by_value else parity.gradient_errors(gradients, candidate)
    return RankReport(
        output_error=largest(logits - expected[own]),
        gradient_errors=dict(errors),
        problems=[*parity.structural_problems(model, candidate), *_not_divided(candidate)],
    )


def _not_divided(candidate: nn.Module) -> list[str]:
    """Stacks that are not on the axis ``ep``."""
    experts = [path for path, _ in candidate.named_modules() if path.endswith(".experts")]
    stacks: dict[str, Any] = {path: candidate.get_submodule(path).down_proj for path in experts}
    axes = {path: getattr(stack, "device_mesh", None) for path, stack in stacks.items()}
    return [f"{path} is not on ep" for path, mesh in axes.items() if "ep" not in ((mesh and mesh.mesh_dim_names) or ())]


@lru_cache(maxsize=1)
def _reference(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
    model = tiny_model(entries()[name], dtype=dtype)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = logits_of(model, {"input_ids": ids})
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    (expected * weights).sum().backward()
    gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return model, ids, weights, expected.detach(), gradients
