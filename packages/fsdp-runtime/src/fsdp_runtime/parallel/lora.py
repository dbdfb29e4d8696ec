"""Low-rank adapters (peft) on a split model: their rules, and saving them alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from fsdp_runtime._peft_compat import BASE, adapter_config, base_model, is_peft_model, lora_layers
from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.collectives import mesh_or_world_ranks, raise_on_all
from fsdp_runtime.sharded.fsync import move_into_place
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, TensorHeader
from fsdp_runtime.weights.adapters import adapter_tensors
from tp_plans import Plan, Style, resolve_plan
from tp_plans.attributes import resolved
from tp_plans.lora import adapter_styles
from tp_plans.styles import ParallelAttention, PrepareInput, WholeSequence

_FILE = "adapter_model.safetensors"
#: Rules that bring the input of all layers below a module together.
_GATHERING = (PrepareInput, ParallelAttention, WholeSequence)


def resolve_adapted_plan(plan: object, model: nn.Module, *, sequence_parallel: bool) -> Plan:
    """As ``tp_plans.resolve_plan``, also for a ``PeftModel``: the plan is then its base model's, with the adapters'.

    Raises:
        OptionError: a layer carries adapters that cannot be split.
        tp_plans.TpPlansError: no plan is known, or a layer's style leaves no room for adapters.
    """
    if not is_peft_model(model):
        return resolve_plan(plan, model, sequence_parallel=sequence_parallel)
    base = base_model(model)
    return adapted_plan(resolve_plan(plan, base, sequence_parallel=sequence_parallel), base).with_prefix(BASE)


def adapted_plan(plan: Plan, model: nn.Module) -> Plan:
    """A plan for a model of which some layers carry low-rank adapters.

    Args:
        plan: the plan of the model as it was before.
        model: the model inside the ``PeftModel``, before anything is split.

    Raises:
        OptionError: a layer with a rule carries adapters of another kind than plain LoRA.
        tp_plans.PlanError: a layer's style leaves no room for adapters.
    """
    layers = {layer.path: layer for layer in lora_layers(model)}
    paths: dict[str, list[str]] = {}
    for path, _ in model.named_modules():
        for pattern in plan.match(path):
            paths.setdefault(pattern, []).append(path)
    rules: dict[str, Style] = {}
    for pattern, style in plan.items():
        carrying = [path for path in paths.get(pattern, ()) if path in layers]
        if odd := [path for path in carrying if not layers[path].plain]:
            raise OptionError(
                f"{odd[0]} carries adapters that are merged, or no plain LoRA on a linear layer (DoRA, a bias, an "
                "embedding): unmerge them, or leave it out of target_modules"
            )
        styles = {path: _adapted(style, path, plan, model) for path in carrying}
        if not carrying:
            rules[pattern] = style
        elif len(carrying) == len(paths[pattern]) and all(each == styles[carrying[0]] for each in styles.values()):
            rules |= _below(pattern, styles[carrying[0]])  # one rule for all blocks
        else:
            for path in paths[pattern]:
                rules |= _below(path, styles[path]) if path in styles else {path: style}
    return Plan(rules, name=f"{plan.name} with adapters", sequence_parallel=plan.sequence_parallel)


def save_adapter(model: nn.Module, directory: str | os.PathLike[str], *, adapter: str = "default") -> None:
    """Save one adapter of a ``PeftModel`` as peft does, which ``PeftModel.from_pretrained`` loads.

    Collective as ``save_weights``.  The weights take the place of older ones by one rename.

    Args:
        model: the ``PeftModel``, plain, split over ``tp``, sharded by FSDP2, or both.
        directory: made if it is not there.
        adapter: the adapter's name.

    Raises:
        OptionError: the model has no such adapter.
        OSError: on the first rank, when it cannot write.
        OtherRankError: on the other ranks.
    """
    entries = state_entries(model)
    ranks = mesh_or_world_ranks(entries)
    target = Path(directory)
    with raise_on_all(ranks):
        tensors = adapter_tensors(model, entries, adapter)
        if ranks.is_first:
            target.mkdir(parents=True, exist_ok=True)
    full = dict(zip(tensors, full_tensors(list(tensors.values())), strict=True))
    with raise_on_all(ranks):
        if ranks.is_first:
            fresh = target / f".{_FILE}.new"
            fresh.unlink(missing_ok=True)
            headers = [
                TensorHeader(name, tuple(tensor.shape), tensor.dtype, tensor.nbytes) for name, tensor in full.items()
            ]
            with SafetensorsWriter(fresh, headers) as file:
                for name, tensor in full.items():
                    file.write(name, tensor)
            adapter_config(model, adapter).save_pretrained(target)
            move_into_place(fresh, target / _FILE)


def _adapted(style: Style, path: str, plan: Plan, model: nn.Module) -> dict[str, Style]:
    """The styles of an adapted layer's parts, by their names in it."""
    parent = path.rpartition(".")[0]
    layer = resolved(style, model.get_submodule(parent))
    above = [above for depth in range(path.count(".") + 1) for above in plan.match(".".join(path.split(".")[:depth]))]
    arrives_cut = plan.sequence_parallel and not any(isinstance(plan[pattern], _GATHERING) for pattern in above)
    factors = adapter_styles(layer, sequence_dim=1 if arrives_cut else None)
    return {"base_layer": layer, "lora_A.*": factors.a, "lora_B.*": factors.b}


def _below(path: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    return {f"{path}.{name}": style for name, style in styles.items()}
