"""What one rank finds of one mixture under expert parallelism, each data-parallel rank with tokens of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from architecture_matrix.shrink import VOCAB
from architecture_matrix.table import UNBUILDABLE, Entry, built, entries, tiny_model
from fsdp_runtime import parallelize, submesh
from harness import parity
from harness.parity import RankReport, largest, logits_of, mesh_for
from tp_plans import ModelTree
from tp_plans.infer.experts import expert_stacks

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


def measure_experts(name: str, meshes: Sequence[Mapping[str, int]] = MESHES) -> list[RankReport]:
    """Measure one mixture on every mesh; every rank of the world must call it."""
    return [_measured(name, axes) for axes in meshes]


def _measured(name: str, axes: Mapping[str, int]) -> RankReport:
    model, ids, weights, expected, gradients = _reference(name)
    mesh = mesh_for(axes)
    candidate = parallelize(copy.deepcopy(model), mesh, **entries()[name].options)
    data = submesh(mesh, "dp")
    share = BATCH // data.size()
    own = slice(share * data.get_local_rank(), share * (data.get_local_rank() + 1))
    logits = logits_of(candidate, {"input_ids": ids[own]})
    (logits * weights[own]).sum().mul(data.size()).backward()
    return RankReport(
        output_error=largest(logits - expected[own]),
        gradient_errors=parity.gradient_errors(gradients, candidate),
        problems=[*parity.structural_problems(model, candidate), *_not_divided(candidate)],
    )


def _not_divided(candidate: nn.Module) -> list[str]:
    """Stacks that are not on the axis ``ep``."""
    experts = [path for path, _ in candidate.named_modules() if path.endswith(".experts")]
    stacks: dict[str, Any] = {path: candidate.get_submodule(path).down_proj for path in experts}
    axes = {path: getattr(stack, "device_mesh", None) for path, stack in stacks.items()}
    return [f"{path} is not on ep" for path, mesh in axes.items() if "ep" not in ((mesh and mesh.mesh_dim_names) or ())]


@lru_cache(maxsize=1)
def _reference(name: str) -> tuple[nn.Module, Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
    model = tiny_model(entries()[name])
    if any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        model = tiny_model(entries()[name], dtype=torch.float32)  # FSDP2 wants one dtype in a block
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = logits_of(model, {"input_ids": ids})
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    (expected * weights).sum().backward()
    gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return model, ids, weights, expected.detach(), gradients
