"""Adapters (peft) on a sharded model: their styles, and saving an adapter alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._peft_compat import (
    BASE,
    LoraLayer,
    Place,
    base_model,
    kind_of,
    learned_prompts,
    lora_layers,
    places,
    save_adapter_config,
    without_adapters,
)
from fsdp_runtime._torch_compat import own_parameters
from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.collectives import raise_on_all
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, WeightInfo
from fsdp_runtime.sharded.saved_files import (
    fsync_path,
    move_into_place,
    naming_write_errors,
    remove_work,
    require_path,
    work_directory,
)
from fsdp_runtime.steps.refused_adapters import refuse_adapters
from fsdp_runtime.weights.adapters import saved_tensors
from tp_plans import (
    DispatchExperts,
    ExpertsParallel,
    GatherSequence,
    NoParallel,
    Plan,
    PrepareModuleInput,
    Style,
    plan_for,
)
from tp_plans.model_tree import ancestors, is_at_or_below, join, parent
from tp_plans.runtime import adapter_styles, resolve_style
from tp_plans.styles import GatheredParameters, ParallelAttention

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
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
    """Resolve a plan as ``tp_plans.plan_for`` does; for a ``PeftModel``, add styles for its adapters."""
    # A plan for a ``PeftModel`` has its paths, or paths of the base model.
    base = base_model(model)
    if base is not model and isinstance(plan, Mapping):
        plan = _inside_wrapper(plan)
    bare = model if base is model else without_adapters(base)
    resolved = plan_for(bare, plan, sequence_parallel=sequence_parallel, mesh=mesh, towers_tp=towers_tp)
    if base is not model:
        _require_prompts_fit(model, resolved)
        # The path of the base model differs between prompt learning and other kinds.
        return adapted_plan(resolved, base).with_prefix(
            next(path for path, module in model.named_modules() if module is base)
        )
    if plan == "auto" and (layer := next(lora_layers(model), None)) is not None:
        raise OptionError(
            f"{layer.path} of {type(model).__name__} carries adapters, and the model is no PeftModel: give the "
            "outermost module to peft.get_peft_model, or give a plan"
        )
    return resolved


def adapted_plan(plan: Plan, model: nn.Module) -> Plan:
    """Translate a plan of the base model to the unsharded adapted model, with rules for low-rank factors."""
    # The rule of a module holds for each of its copies that an adapter trains in full (``modules_to_save``, LN tuning).
    adapted = _AdaptedModel.of(model, plan)
    adapted.check_stacked()
    matched: dict[str, list[str]] = {pattern: [] for pattern in plan}
    for base, copies in adapted.places.items():
        owned = {join(base, name) for place in copies if not place.wrapper for name in own_parameters(place.module)}
        for path in (base, *sorted(owned)):
            for pattern in plan.match(path):
                matched[pattern].append(path)
    rules: dict[str, Style] = {}
    for pattern, style in plan.items():
        moved = {path: adapted.rules_of(path, pattern, style) for path in matched[pattern]}
        if all(each == moved[matched[pattern][0]] for each in moved.values()):  # one rule for all blocks
            rules |= moved[matched[pattern][0]] if moved else {pattern: style}
        else:
            for path in matched[pattern]:
                rules |= adapted.rules_of(path, path, style)
    return Plan(rules, name=f"{plan.name} with adapters", sequence_parallel=plan.sequence_parallel)


def save_adapter(model: nn.Module, directory: str | os.PathLike[str], *, adapter: str = "default") -> None:
    """Save one adapter of a ``PeftModel`` in peft's format, for ``PeftModel.from_pretrained``.

    The file has all that peft's ``save_pretrained`` writes: trained biases, modules of ``modules_to_save``, trainable
    tokens, and embedding and head where they are adapted or resized.

    Collective: call it on every rank of the model.  One rename replaces older weights of the same config.  Weights of
    another config are removed first, so a process killed at any time leaves no weights with the wrong config.

    Args:
        model: the ``PeftModel``, plain, sharded over ``tp``, by FSDP2, or both.
        directory: the directory to write, created if it does not exist.
        adapter: the adapter's name.

    Raises:
        OptionError: the model has no such adapter, or the directory or the adapter is not the same on every rank.
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
    state = ModelState(model)
    ranks = state.writers
    with raise_on_all(ranks) as step:
        target = require_path("directory", directory)
        tensors, names = saved_tensors(model, state.whole, adapter, embeddings=True), []
        if ranks.is_first:  # which alone looks up the base model's config
            names = list(saved_tensors(model, state.whole, adapter, embeddings="auto"))
        step.options = {"directory": os.path.normpath(target), "adapter": adapter}
        step.value = names
    tensors = {name: tensors[name] for name in step.values[ranks.global_first]}
    full = dict(zip(tensors, state.full_tensors(list(tensors.values())), strict=True))
    headers = [WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in full.items()]
    with work_directory(target, ranks) as work, raise_on_all(ranks):
        if ranks.is_first:
            with SafetensorsWriter(work / _FILE, headers) as file:
                for name, tensor in full.items():
                    file.write(name, tensor)
            with naming_write_errors(work / _CONFIG):
                save_adapter_config(model, adapter, str(work))
            if _settings(target / _CONFIG) != _settings(work / _CONFIG):
                (target / _FILE).unlink(missing_ok=True)
                fsync_path(target)
            for name in sorted(path.name for path in work.iterdir() if path.name != _FILE):
                move_into_place(work / name, target / name)
            move_into_place(work / _FILE, target / _FILE)
            remove_work(work)


def _settings(config: Path) -> dict[str, Any] | None:
    """Return an adapter's config, ``None`` without a file; lists are sorted, since peft writes them in any order."""
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        return {name: sorted(map(str, each)) if isinstance(each, list) else each for name, each in settings.items()}
    except (OSError, ValueError, AttributeError):
        return None


def _require_prompts_fit(model: nn.Module, plan: Plan) -> None:
    """Check prompt learning: peft reads embeddings and makes keys and values outside of the modules of the plan."""
    kind = learned_prompts(model)
    if kind == "keys":
        raise OptionError(
            f"{type(model).__name__} learns keys and values of all heads (prefix tuning), and a rank of tp has some: "
            "take prompt tuning or LoRA, or use tp=1"
        )
    if kind is not None and plan.sequence_parallel:
        raise OptionError(
            f"{type(model).__name__} puts learned embeddings in front of the token embeddings, which are sharded on "
            "the sequence: use sequence_parallel=False"
        )


def _inside_wrapper(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plan that was made for a ``PeftModel`` by paths in the base model; any other plan unchanged."""
    if not all(pattern == BASE or pattern.startswith(f"{BASE}.") for pattern in plan):
        return plan
    rules = {pattern.removeprefix(BASE).removeprefix("."): rule for pattern, rule in plan.items()}
    return Plan(rules, name=plan.name, sequence_parallel=plan.sequence_parallel) if isinstance(plan, Plan) else rules


@dataclass(frozen=True)
class _AdaptedModel:
    """A model with adapters; it rewrites a plan of its base model."""

    plan: Plan
    places: Mapping[str, Sequence[Place]]  # of each module, by its path in the base model
    layers: Mapping[str, LoraLayer]  # with low-rank adapters, by path in the adapted model

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> _AdaptedModel:
        by_base: dict[str, list[Place]] = {}
        seen: set[nn.Module] = set()
        for place in places(model):
            if place.module not in seen:
                seen.add(place.module)
                by_base.setdefault(place.base, []).append(place)
        return cls(plan, by_base, {layer.path: layer for layer in lora_layers(model)})

    def rules_of(self, path: str, pattern: str, style: Style) -> dict[str, Style]:
        """Return the rules of the adapted model for one rule of the base model, written with a pattern."""
        if path not in self.places:
            return self._rules_of_parameter(path, pattern, style)
        rules: dict[str, Style] = {}
        for place in self.places[path]:
            at = place.moved(pattern)
            if place.wrapper is None:
                rules[at] = self._style_at(place, style)
            elif place.wrapper == "lora":
                rules |= {join(at, name): factor for name, factor in self._factors(place, style).items()}
            else:
                _refuse_other(place)
        return rules

    def _rules_of_parameter(self, path: str, pattern: str, style: Style) -> dict[str, Style]:
        # A matrix to which peft adds adapters where the layer's code reads it stays replicated: the sum is of plain
        # tensors.
        summed = {layer.matrix for layer in self.layers.values()}
        base, _, name = path.rpartition(".")
        above, _, last = pattern.rpartition(".")
        rules: dict[str, Style] = {}
        for place in self.places[base]:
            if place.wrapper is not None:
                _refuse_other(place)
            elif join(place.path, name) not in summed:
                rules[join(place.moved(above), last)] = style
            elif not getattr(style, "gathered", False):
                raise OptionError(
                    f"{path} carries adapters, and each rank computes with its part of it: leave it out of "
                    "target_parameters"
                )
        return rules

    def _style_at(self, place: Place, style: Style) -> Style:
        """Return a rule with the adapted model's names of its parameters."""
        if isinstance(style, GatherSequence) and isinstance(style.inner, GatheredParameters):
            return replace(style, inner=self._style_at(place, style.inner))  # type: ignore[arg-type]
        if isinstance(style, GatheredParameters):
            return replace(style, names=tuple(each for name in style.names for each in self._names_below(place, name)))
        is_below_wrapper = bool(place.parts) and place.parts[-1] is not None
        return resolve_style(style, self._parent(place)) if is_below_wrapper else style

    def _names_below(self, place: Place, parameter: str) -> Iterator[str]:
        """Iterate over the names of a parameter below a module: an adapted layer's is below peft's wrapper."""
        owner, _, name = parameter.rpartition(".")
        for inner in self.places.get(join(place.base, owner) if owner else place.base, ()):
            if inner.wrapper is None and is_at_or_below(inner.path, place.path):
                yield join(inner.path.removeprefix(place.path).removeprefix("."), name)

    def _parent(self, place: Place) -> nn.Module:
        """Return the module of the base model that has the layer; a style may name its attributes."""
        return next(each.module for each in self.places[parent(place.base)] if each.wrapper is None)

    def _factors(self, place: Place, style: Style) -> dict[str, Style]:
        """Return the styles of the two factors of a layer, by their names in peft's wrapper."""
        layer = self.layers[place.path]
        if layer.experts is not None:
            return {f"{factor}.*": NoParallel(gradient="partial") for factor in ("lora_A", "lora_B")}
        if layer.odd or layer.matrix is not None:
            refuse_adapters(place.path, layer.odd or "on a parameter")
        plan, base = self.plan, place.base
        rules = [plan[pattern] for above in (base, *ancestors(base)) for pattern in plan.match(above)]
        sharded_input = plan.sequence_parallel and not any(isinstance(rule, _GATHERING) for rule in rules)
        # The second dim from the end: towers and pooling heads hand plain ``[tokens, hidden]`` to their layers.
        factors = adapter_styles(resolve_style(style, self._parent(place)), sequence_dim=-2 if sharded_input else None)
        return {"lora_A.*": factors.a, "lora_B.*": factors.b}

    def check_stacked(self) -> None:
        """Refuse adapters on stacked experts that are not sharded by expert, and odd adapters around them."""
        for experts, copies in self.places.items():
            around = [self.layers[place.path] for place in copies if place.path in self.layers]
            for layer in around:
                if layer.parameter is None:
                    continue
                styles = [self.plan[pattern] for pattern in self.plan.match(experts)]
                inner = [style.inner if isinstance(style, GatherSequence) else style for style in styles]
                by_expert = all(isinstance(style, ExpertsParallel | DispatchExperts) for style in inner)
                if not by_expert or self.plan.match(f"{experts}.{layer.parameter}"):
                    raise OptionError(
                        f"{experts}.{layer.parameter} carries adapters and is not sharded by expert: give {experts} a "
                        "rule ExpertsParallel, or leave it out of target_parameters"
                    )
                if odd := next((each for each in around if each.odd), None):
                    refuse_adapters(odd.path, odd.odd)


def _refuse_other(place: Place) -> None:
    """Refuse a wrapper of peft that reads the weight or the activations of a module with a rule."""
    if place.wrapper == "other":
        raise OptionError(
            f"{place.path} is adapted by peft's {kind_of(place.module)}, which reads full weights and "
            "activations, and the plan shards them over tp: take LoRA, modules_to_save or LN tuning, or use tp=1"
        )
