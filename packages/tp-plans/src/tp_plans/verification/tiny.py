"""A copy of a model that is small enough to run on the CPU in float64: the model itself, or the same parts, smaller."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tp_plans._torch_compat import own_buffers, own_parameters
from tp_plans._transformers_compat import kept_in_float32
from tp_plans.errors import ModelError
from tp_plans.model_tree import ModelTree
from tp_plans.patterns import wildcard
from tp_plans.verification.shrink import shrunk_config

#: Parameters up to which a model is run at its own sizes.
MAX_PARAMETERS = 30_000_000

#: How far each parameter is moved: fresh models have zero biases and norms of one, which hide errors.
_JITTER = 0.05


@dataclass(frozen=True)
class TinyModel:
    """A model to run, on the CPU in float64, and its description."""

    model: nn.Module
    ran: str


def tiny_model(model: Any, *, tp: int, all_blocks: bool = False) -> TinyModel:
    """Return a copy of a model with the same parts that is small enough to run; by default with fewer blocks."""
    # In this order: the small model itself with its weights moved a little; a model of its config at small sizes; the
    # model with one block of each kind and random weights.
    tree = ModelTree.of(model)
    model = tree.model
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model that is run is a torch.nn.Module, not of type {type(model).__name__}")
    size = _numel(tree)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # every rank draws the same random numbers
        if size <= MAX_PARAMETERS and not _on_meta(tree):
            return TinyModel(_prepared(copy.deepcopy(model)), f"with its own weights ({size:,} parameters)")
        reasons: list[str] = []
        smaller = (_with_all_blocks,) if all_blocks else (_from_shrunk_config, _with_fewer_blocks)
        for build in (_as_configured, *smaller):
            try:
                small = build(model, tree, tp)
            except Exception as error:  # noqa: BLE001 (the code of a model may raise anything)
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            small_tree = ModelTree.of(small)
            size = _numel(small_tree)
            if _patterns(small_tree) != _patterns(tree):
                reasons.append("a smaller config builds other modules")
            elif size > MAX_PARAMETERS:
                reasons.append(f"{size:,} parameters, more than {MAX_PARAMETERS:,}")
            else:
                return TinyModel(_prepared(small), f"a copy of {size:,} parameters with random weights")
    raise ModelError(f"no copy of {type(model).__name__} can be run on the CPU: {'; '.join(dict.fromkeys(reasons))}")


def _as_configured(model: Any, tree: ModelTree, tp: int) -> nn.Module:
    if _numel(tree) > MAX_PARAMETERS:
        raise ModelError("too large to run at its own sizes")
    return _from_config(model, copy.deepcopy(model.config))


def _from_shrunk_config(model: Any, tree: ModelTree, tp: int) -> nn.Module:
    return _from_config(model, shrunk_config(model.config, tp=tp))


def _with_all_blocks(model: Any, tree: ModelTree, tp: int) -> nn.Module:
    return _from_config(model, shrunk_config(model.config, tp=tp, all_blocks=True))


def _from_config(model: Any, config: Any) -> nn.Module:
    with torch.device("cpu"):
        built: nn.Module = type(model)(config)
    return built


def _with_fewer_blocks(model: nn.Module, tree: ModelTree, tp: int) -> nn.Module:
    """A model with one block of each kind and random weights; no weight of the original is copied."""
    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in tree.parameters.values()
    }
    small = copy.deepcopy(model, empty)
    kept_tree = ModelTree.of(small)
    for stack, blocks in kept_tree.stacks.items():
        container = kept_tree.modules[stack]
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or kept_tree.children[stack] != blocks:
            continue
        kinds: dict[Any, nn.Module] = {}
        for block in blocks:
            kinds.setdefault(_kind(block, kept_tree), kept_tree.modules[block])
        del container[:]
        container.extend(kinds.values())
    small_tree = ModelTree.of(small)
    if _numel(small_tree) <= MAX_PARAMETERS:
        _fill(small_tree)
    return small


def _kind(block: str, tree: ModelTree) -> Any:
    inside = (block, *tree.below(block))
    return tuple(
        (type(tree.modules[path]), tuple((name, tuple(p.shape)) for name, p in tree.own_parameters(path).items()))
        for path in inside
    )


def _fill(tree: ModelTree) -> None:
    """Give tensors on the meta device data: parameters random, vectors of norms near one, buffers positive."""
    for module in tree.modules.values():
        for name, parameter in own_parameters(module).items():
            if parameter is None or not parameter.is_meta:
                continue
            shape = tuple(parameter.shape)
            data = torch.randn(shape) / max(1, shape[-1]) ** 0.5 if len(shape) > 1 else torch.zeros(shape)
            if len(shape) == 1 and name == "weight":
                data = torch.ones(shape)
            own_parameters(module)[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.is_meta:
                filled = torch.rand(buffer.shape) if buffer.is_floating_point() else torch.zeros(buffer.shape)
                own_buffers(module)[name] = filled.to(buffer.dtype)


def _prepared(model: nn.Module) -> nn.Module:
    """The model in float64 without dropout, every parameter moved a little and trained."""
    model.to(device="cpu", dtype=torch.float64).eval()
    set_experts: Any = getattr(model, "set_experts_implementation", None)
    if callable(set_experts):
        with suppress(ValueError, RuntimeError):  # the class has only one implementation of experts
            set_experts("eager")  # kernels of grouped products take no float64
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # type: ignore[union-attr]  # states that decoding keeps may not be trained
    tree = ModelTree.of(model)
    for path in kept_in_float32(model, tree.parameters):  # the model's code casts activations to the parameter's dtype
        tree.parameters[path].data = tree.parameters[path].data.float()
    with torch.no_grad():
        for parameter in dict.fromkeys(tree.parameters.values()):
            if parameter.is_floating_point():
                parameter.nan_to_num_(nan=0.02, posinf=0.02, neginf=-0.02)
                parameter.add_(torch.randn_like(parameter) * _JITTER)
                parameter.requires_grad_()
    return model


def _patterns(tree: ModelTree) -> set[str]:
    return {wildcard(path) for path in (*tree.modules, *tree.parameters)}


def _on_meta(tree: ModelTree) -> bool:
    buffers = (each for module in tree.modules.values() for each in own_buffers(module).values() if each is not None)
    return any(tensor.is_meta for tensor in (*tree.parameters.values(), *buffers))


def _numel(tree: ModelTree) -> int:
    return sum({id(parameter): parameter.numel() for parameter in tree.parameters.values()}.values())
