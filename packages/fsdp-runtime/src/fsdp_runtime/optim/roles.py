"""The role of every parameter of a model, and the matrices that a parameter stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.runtime_state import runtime_state
from tp_plans.model_tree import ModelTree, ancestors, is_at_or_below, join, parent
from tp_plans.naming import FUSED_MLPS, leaf
from tp_plans.runtime import fused_rows

#: ``"matrix"`` is the weight of a linear layer, and ``"expert"`` a stack of matrices, one per expert.
Role = Literal["matrix", "expert", "embedding", "head", "router", "adapter", "norm", "bias", "other"]
#: The roles with a Muon update.
MATRICES = ("matrix", "expert")
#: Names of routers directly in a mixture of experts.
_ROUTERS = ("gate", "router")


@dataclass(frozen=True)
class StoredMatrices:
    """The matrices of one parameter.  The last two dims are a matrix; a first dim of three counts experts."""

    dim: int = -2  # the dim along which fused matrices lie
    sizes: tuple[int, ...] = ()  # sizes of the fused matrices along it; empty for a single matrix
    is_interleaved: bool = False  # the fused matrices take turns, row by row
    is_transposed: bool = False  # stored ``[in, out]``
    path: str = ""  # of the parameter

    def indices(self, shape: tuple[int, ...]) -> Iterator[tuple[range, ...]]:
        """Yield the indices of each matrix along every dim of the parameter."""
        dim = self.dim % len(shape)
        rows = range(shape[0])
        for first in [rows[expert : expert + 1] for expert in rows] if len(shape) == 3 else [rows]:
            full, start = [first, *map(range, shape[1:])], 0
            for number, size in enumerate(self.sizes or (shape[dim],)):
                part = range(number, shape[dim], len(self.sizes)) if self.is_interleaved else range(start, start + size)
                yield (*full[:dim], part, *full[dim + 1 :])
                start += size


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter, by its name in ``model.named_parameters()``.

    Roles come from the structure of the model and do not depend on the mesh.  A tied head has the role of the
    embedding.

    Args:
        model: the model, on any device, parallelized or not.

    Returns:
        ``"matrix"`` (the weight of a linear layer), ``"expert"`` (a stack of them), ``"embedding"``, ``"head"``,
        ``"router"``, ``"adapter"``, ``"norm"``, ``"bias"``, or ``"other"``, such as a convolution or a gate of one row.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.optim import parameter_roles
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]), nn.Linear(4, 8))
        >>> parameter_roles(model)["1.0.0.weight"], parameter_roles(model)["2.weight"]
        ('matrix', 'head')
    """
    tree = ModelTree.of(model)
    stacks = tuple(path for path in tree.modules if _are_experts(tree, path))
    order = {path: place for place, path in enumerate(tree.modules)}
    last = order[tree.decoder_blocks[-1]] if tree.decoder_blocks else len(order)
    roles = {}
    for path, _ in model.named_parameters():
        owner = parent(path)
        follows = order[owner] > last and not any(above in tree.blocks for above in ancestors(path))
        is_head = owner == tree.lm_head or (
            follows and (owner in tree.reads_decoder_output or not is_at_or_below(owner, tree.root))
        )
        roles[path] = _role(tree, path, stacks, is_head=is_head)
    return roles


def _role(tree: ModelTree, path: str, stacks: tuple[str, ...], *, is_head: bool) -> Role:
    owner, parameter = parent(path), tree.parameters[path]
    wrapper = next((above for above in ancestors(path) if f"{above}.base_layer" in tree.modules), None)
    if wrapper is not None and not is_at_or_below(path, f"{wrapper}.base_layer"):
        return "adapter"
    if parameter.ndim < 2:
        return "bias" if leaf(path).endswith("bias") else "norm" if tree.is_norm(owner) else "other"
    if tree.is_embedding(owner):
        return "embedding"
    stack = next((stack for stack in stacks if is_at_or_below(owner, parent(stack))), None)
    in_experts = any(is_at_or_below(owner, stack) for stack in stacks)
    if stack is not None and not in_experts and _is_router(tree, owner, stack):
        return "router"
    if parameter.ndim == 3 and in_experts:
        return "expert"
    if is_head and parameter.ndim == 2:
        return "head"
    is_linear = isinstance(tree.modules[owner], nn.Linear) or type(tree.modules[owner]).__name__ == "Conv1D"
    return "matrix" if is_linear and parameter.ndim == 2 and min(parameter.shape) > 1 else "other"


def _are_experts(tree: ModelTree, path: str) -> bool:
    stacked = any(parameter.ndim == 3 for parameter in tree.own_parameters(path).values())
    return tree.is_expert_stack(path) or (leaf(path).endswith("experts") and (stacked or tree.is_numbered(path)))


def _is_router(tree: ModelTree, owner: str, stack: str) -> bool:
    stacked = [p.shape[0] for p in tree.own_parameters(stack).values() if p.ndim == 3]
    experts = max(stacked, default=len(tree.children[stack]))
    return leaf(owner) in _ROUTERS or tree.size(owner, 0) == experts


def stored_matrices(model: nn.Module) -> dict[Tensor, StoredMatrices]:
    """Return the matrices that each parameter with a Muon update stores."""
    roles = parameter_roles(model)
    named = {path: parameter for path, parameter in model.named_parameters() if roles[path] in MATRICES}
    tree, rows = ModelTree.of(model), _fused_rows(model, named)
    stored: dict[Tensor, StoredMatrices] = {}
    for path, parameter in named.items():
        owner = parent(path)
        if id(parameter) in rows:
            matrices = StoredMatrices(sizes=rows[id(parameter)])
        elif roles[path] == "expert" or leaf(owner) in dict(FUSED_MLPS):
            matrices = _gate_and_up(tree, path)
        else:
            # GPT-2's ``Conv1D`` stores ``[in, out]``.
            matrices = StoredMatrices(is_transposed=type(tree.modules[owner]).__name__ == "Conv1D")
        stored[parameter] = replace(matrices, path=path)
    return stored


def _fused_rows(model: nn.Module, matrices: Mapping[str, Tensor]) -> dict[int, tuple[int, ...]]:
    """Return the rows of fused matrices by the ``id`` of the parameter."""
    if not matrices:
        return {}
    base = base_model(model)
    by_plans = {base.get_submodule(path): rows for path, rows in fused_rows(base).items()}
    by_tp = {model.get_submodule(path): rows for path, rows in (runtime_state(model).fused_rows or {}).items()}
    return {id(module.weight): rows for module, rows in {**by_plans, **by_tp}.items()}


def _gate_and_up(tree: ModelTree, path: str) -> StoredMatrices:
    """Return the matrices of an expert's or a gated MLP's parameter, from the shapes of its two projections."""
    # The parameter or its module has the name: ``experts.gate_up_proj``, or ``mlp.gate_up_proj.weight``.
    of_module = leaf(path) == "weight"
    named, tail = (parent(path), ".weight") if of_module else (path, "")
    module = tree.modules[parent(path)]
    for names in FUSED_MLPS:
        places = [join(parent(named), name) + tail for name in names]
        if leaf(named) in names and all(place in tree.parameters for place in places):
            (rows, columns), (hidden, width) = (tuple(tree.parameters[place].shape[-2:]) for place in places)
            if (rows, columns) in ((2 * width, hidden), (width, 2 * hidden)):
                dim = -2 if columns == hidden else -1
                if leaf(named) != names[0]:
                    return StoredMatrices(is_transposed=dim == -1)
                sizes = (width, width) if dim == -2 else (hidden, hidden)
                interleaved = getattr(module, "is_concatenated", True) is False
                return StoredMatrices(dim, sizes, interleaved, dim == -1)
    return StoredMatrices(is_transposed=bool(getattr(module, "is_transposed", False)))
