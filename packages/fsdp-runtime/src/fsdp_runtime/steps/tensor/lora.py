"""Low-rank adapters (peft) on a sharded model: their styles, and saving an adapter alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._peft_compat import (
    BASE,
    LoraLayer,
    adapter_config,
    base_model,
    is_peft_model,
    lora_layers,
    unwrapped,
    without_adapters,
)
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.collectives import mesh_or_world_ranks, raise_on_all
from fsdp_runtime.sharded.fsync import move_into_place
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sharded.paths import require_path
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, TensorHeader
from fsdp_runtime.sharded.work_directory import work_directory
from fsdp_runtime.weights.adapters import saved_tensors
from tp_plans import (
    DispatchExperts,
    ExpertsParallel,
    GatherSequence,
    NoParallel,
    Plan,
    PrepareModuleInput,
    Style,
    resolve_plan,
)
from tp_plans.runtime import adapter_styles, resolve_style
from tp_plans.styles import GatheredParameters, ParallelAttention

_FILE = "adapter_model.safetensors"
#: Styles that gather the input of all layers below a module.
_GATHERING = (PrepareModuleInput, ParallelAttention, GatherSequence)


def resolve_adapted_plan(
    plan: object,
    model: nn.Module,
    *,
    sequence_parallel: bool,
    mesh: DeviceMesh | None = None,
    towers_tp: int | None = None,
) -> Plan:
    """Resolve a plan as ``tp_plans.resolve_plan`` does; for a ``PeftModel``, add styles for its adapters.

    Args:
        plan: what the user gave as a plan; the paths of a plan for a ``PeftModel`` are its own, or those in the model
            inside.
        model: the model.
        sequence_parallel: wanted of ``"auto"``.
        mesh: the axis ``tp``, whose ranks verify an inferred plan.
        towers_tp: the size of ``tp`` where vision and audio towers are to be sharded too, else ``None``.

    Raises:
        OptionError: a layer has adapters that cannot be sharded, or that no ``PeftModel`` is around.
        tp_plans.TpPlansError: no plan is known, or a layer's style does not support adapters.
    """
    base = base_model(model) if is_peft_model(model) else model
    if base is not model and isinstance(plan, Mapping):
        plan = _inside_wrapper(plan)
    bare = model if base is model else without_adapters(base)
    resolved = resolve_plan(plan, bare, sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
    if base is not model:
        return adapted_plan(resolved, base).with_prefix(BASE)
    if plan == "auto" and (layer := next(lora_layers(model), None)) is not None:
        raise OptionError(
            f"{layer.path} of {type(model).__name__} carries adapters, and the model is no PeftModel: give the "
            "outermost module to peft.get_peft_model, or give a plan"
        )
    return resolved


def adapted_plan(plan: Plan, model: nn.Module) -> Plan:
    """Add styles for low-rank adapters to a plan.

    Args:
        plan: the plan of the base model.
        model: the model inside the ``PeftModel``, before it is sharded.

    Raises:
        OptionError: a layer of the plan has adapters other than plain LoRA, or adapted experts are sharded otherwise
            than by expert.
        tp_plans.PlanError: a layer's style does not support adapters.
    """
    layers = {layer.path: layer for layer in lora_layers(model)}
    plan = _below_wrappers(plan, model, layers)
    _check_stacked(plan, layers)
    paths: dict[str, list[str]] = {}
    for path, _ in model.named_modules():
        for pattern in plan.match(path):
            paths.setdefault(pattern, []).append(path)
    rules: dict[str, Style] = {}
    for pattern, style in plan.items():
        carrying = [path for path in paths.get(pattern, ()) if path in layers]
        if odd := [path for path in carrying if not layers[path].plain or layers[path].matrix is not None]:
            raise OptionError(
                f"{odd[0]} carries adapters that are merged, or not plain LoRA on a linear layer or on stacked experts "
                "(DoRA, a bias, an embedding): unmerge them, or leave it out of target_modules"
            )
        styles = {
            path: _adapted_experts(style, path, model)
            if layers[path].experts is not None
            else _adapted(style, path, plan, model)
            for path in carrying
        }
        if not carrying:
            rules[pattern] = style
        elif len(carrying) == len(paths[pattern]) and all(each == styles[carrying[0]] for each in styles.values()):
            rules |= _below(pattern, styles[carrying[0]])  # one rule for all blocks
        else:
            for path in paths[pattern]:
                rules |= _below(path, styles[path]) if path in styles else {path: style}
    return Plan(rules, name=f"{plan.name} with adapters", sequence_parallel=plan.sequence_parallel)


def save_adapter(model: nn.Module, directory: str | os.PathLike[str], *, adapter: str = "default") -> None:
    """Save one adapter of a ``PeftModel`` in peft's format, for ``PeftModel.from_pretrained``.

    The modules of its ``modules_to_save``, as a value head, are saved with it.

    Collective: call it on every rank of the model.  One rename replaces an older file.

    Args:
        model: the ``PeftModel``, plain, sharded over ``tp``, by FSDP2, or both.
        directory: the directory to write, created if it does not exist.
        adapter: the adapter's name.

    Raises:
        OptionError: the model has no such adapter.
        OSError: on the first rank, when it cannot write.
        OtherRankError: on the other ranks.

    Example:
        >>> import peft
        >>> from torch import nn
        >>> from fsdp_runtime import save_adapter
        >>> base = nn.Sequential(nn.Linear(4, 4))
        >>> model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
        >>> save_adapter(model, "adapter")
        >>> from pathlib import Path
        >>> sorted(path.name for path in Path("adapter").iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    entries = state_entries(model)
    ranks = mesh_or_world_ranks(entries)
    target = require_path("directory", directory)
    with raise_on_all(ranks):
        tensors = saved_tensors(model, entries, adapter)
    full = dict(zip(tensors, full_tensors(list(tensors.values())), strict=True))
    headers = [TensorHeader(name, tuple(tensor.shape), tensor.dtype, tensor.nbytes) for name, tensor in full.items()]
    with work_directory(target, ranks) as work, raise_on_all(ranks):
        if ranks.is_first:
            with SafetensorsWriter(work / _FILE, headers) as file:
                for name, tensor in full.items():
                    file.write(name, tensor)
            adapter_config(model, adapter).save_pretrained(work)
            for name in sorted(path.name for path in work.iterdir() if path.name != _FILE):
                move_into_place(work / name, target / name)
            move_into_place(work / _FILE, target / _FILE)


def _inside_wrapper(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plan that was made for a ``PeftModel`` by the paths in the model inside; any other plan itself."""
    if not all(pattern == BASE or pattern.startswith(f"{BASE}.") for pattern in plan):
        return plan
    rules = {pattern.removeprefix(BASE).removeprefix("."): rule for pattern, rule in plan.items()}
    return Plan(rules, name=plan.name, sequence_parallel=plan.sequence_parallel) if isinstance(plan, Plan) else rules


def _adapted(style: Style, path: str, plan: Plan, model: nn.Module) -> dict[str, Style]:
    """Return the styles of an adapted layer's parts, by their names in the layer."""
    parent = path.rpartition(".")[0]
    layer = resolve_style(style, model.get_submodule(parent))
    above = [above for depth in range(path.count(".") + 1) for above in plan.match(".".join(path.split(".")[:depth]))]
    sharded_input = plan.sequence_parallel and not any(isinstance(plan[pattern], _GATHERING) for pattern in above)
    factors = adapter_styles(layer, sequence_dim=1 if sharded_input else None)
    return {"base_layer": layer, "lora_A.*": factors.a, "lora_B.*": factors.b}


def _below_wrappers(plan: Plan, model: nn.Module, layers: Mapping[str, LoraLayer]) -> Plan:
    """Return a plan whose rules for parameters of adapted layers have the paths below peft's wrappers.

    A matrix to which peft adds adapters where the layer's code reads it stays replicated: the sum is of plain tensors.
    """
    adapted = {path for path, layer in layers.items() if layer.parameter is None}
    summed = {layer.matrix for layer in layers.values()}
    placed: dict[str, dict[str, Style]] = {pattern: {} for pattern in plan}
    moved: set[str] = set()
    for path, _ in model.named_modules():
        for pattern in plan.match(path):
            style = plan[pattern] if path in adapted else _with_moved_names(plan[pattern], path, adapted)
            moved |= {pattern} if style != plan[pattern] else set()
            placed[pattern][path] = style
    for path, _ in model.named_parameters():
        layer, _, name = path.rpartition(".")
        original = f"{layer.removesuffix('.base_layer')}.{name}" if layer.endswith(".base_layer") else path
        for pattern in plan.match(original):
            moved |= {pattern} if original != path else set()
            if path not in summed:
                placed[pattern][path] = plan[pattern]
            elif not getattr(plan[pattern], "gathered", False):
                raise OptionError(
                    f"{original} carries adapters, and each rank computes with its part of it: leave it out of "
                    "target_parameters"
                )
    rules: dict[str, Style] = {}
    for pattern, style in plan.items():
        rules |= placed[pattern] if pattern in moved else {pattern: style}
    return Plan(rules, name=plan.name, sequence_parallel=plan.sequence_parallel)


def _with_moved_names(style: Style, path: str, adapted: Set[str]) -> Style:
    match style:
        case GatherSequence(inner=GatheredParameters() as inner):
            return replace(style, inner=_of_moved(inner, path, adapted))
        case GatheredParameters():
            return _of_moved(style, path, adapted)
    return style


def _of_moved(style: GatheredParameters, path: str, adapted: Set[str]) -> GatheredParameters:
    names = (_moved(f"{path}.{name}", adapted).removeprefix(f"{path}.") for name in style.names)
    return replace(style, names=tuple(names))


def _moved(parameter: str, adapted: Set[str]) -> str:
    """Return the path of a parameter in the adapted model."""
    layer, _, name = parameter.rpartition(".")
    return f"{layer}.base_layer.{name}" if layer in adapted else parameter


def _check_stacked(plan: Plan, layers: Mapping[str, LoraLayer]) -> None:
    """Refuse adapters on stacked experts that a plan shards otherwise than by expert, and others around them."""
    for layer in layers.values():
        if layer.parameter is None:
            continue
        experts = unwrapped(layer.path)
        styles = [plan[pattern] for pattern in plan.match(experts)]
        inner = [style.inner if isinstance(style, GatherSequence) else style for style in styles]
        by_expert = all(isinstance(style, ExpertsParallel | DispatchExperts) for style in inner)
        if not by_expert or plan.match(f"{experts}.{layer.parameter}"):
            raise OptionError(
                f"{experts}.{layer.parameter} carries adapters and is not sharded by expert: give {experts} a rule "
                "ExpertsParallel, or leave it out of target_parameters"
            )
        if odd := next((path for path in layers if unwrapped(path) == experts and not layers[path].plain), None):
            raise OptionError(
                f"{odd} adapts experts with adapters that are merged, or not plain LoRA on a stacked weight: unmerge "
                "them, or leave the parameter out of target_parameters"
            )


def _adapted_experts(style: Style, path: str, model: nn.Module) -> dict[str, Style]:
    """Return the styles of adapted stacked experts, below all their wrappers, and of the factors, by their names."""
    rules: dict[str, Style] = {}
    prefix, layer = "", model.get_submodule(path)
    while isinstance(inner := getattr(layer, "base_layer", None), nn.Module):
        rules |= {f"{prefix}{factor}.*": NoParallel(gradient="partial") for factor in ("lora_A", "lora_B")}
        prefix, layer = f"{prefix}base_layer.", inner
    return {prefix.removesuffix("."): style} | rules


def _below(path: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    return {f"{path}.{name}": style for name, style in styles.items()}
