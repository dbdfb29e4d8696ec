"""From a rule, with the rules of its parameters and children, to the ``ParallelStyle`` that torch applies.

``parallelize_module`` hands a style one module and nothing else.  A rule for a bare parameter has no module, and a rule
with numbers that are attributes of the parent module cannot find them.  Both rules go to the parent module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans import styles
from tp_plans.errors import PlanError
from tp_plans.module_attrs import needs_parent, resolve_style
from tp_plans.styles import DispatchExperts, GatherSequence, ParameterStyle, Style
from tp_plans.torch_styles.activations import GatherSequenceImpl, ParallelAttentionImpl, PrepareModuleInputImpl
from tp_plans.torch_styles.base import LocalTensorStyle
from tp_plans.torch_styles.embedding import ColwiseEmbeddingImpl, VocabParallelEmbeddingImpl
from tp_plans.torch_styles.experts import AllReduceOutputImpl, ExpertsParallelImpl, ScaleInputImpl
from tp_plans.torch_styles.linear import ColwiseParallelImpl, MLAKVProjectionImpl, RowwiseParallelImpl
from tp_plans.torch_styles.replicated import GatheredParametersImpl, NoParallelImpl, SequenceParallelImpl

_IMPL: dict[type, type[LocalTensorStyle]] = {
    styles.ColwiseParallel: ColwiseParallelImpl,
    styles.RowwiseParallel: RowwiseParallelImpl,
    styles.MLAKVProjection: MLAKVProjectionImpl,
    styles.VocabParallelEmbedding: VocabParallelEmbeddingImpl,
    styles.ColwiseEmbedding: ColwiseEmbeddingImpl,
    styles.ExpertsParallel: ExpertsParallelImpl,
    styles.ScaleInput: ScaleInputImpl,
    styles.AllReduceOutput: AllReduceOutputImpl,
    styles.GatheredParameters: GatheredParametersImpl,
    styles.SequenceParallel: SequenceParallelImpl,
    styles.NoParallel: NoParallelImpl,
    styles.PrepareModuleInput: PrepareModuleInputImpl,
    styles.ParallelAttention: ParallelAttentionImpl,
}


@dataclass
class ParentRules:
    """The rules that a module carries for its parameters and children, by name or pattern of it."""

    parameter_rules: dict[str, ParameterStyle] = field(default_factory=dict)
    children: dict[str, Style] = field(default_factory=dict)

    def key(self) -> Hashable:
        """A key that is equal for modules with equal rules."""
        return frozenset(self.parameter_rules.items()), frozenset(self.children.items())


def group_by_parent(rules: Mapping[str, Style]) -> dict[str, tuple[Style | None, ParentRules]]:
    """Return the rules by module pattern, each with those moved up to it; ``None`` for a module without a rule."""
    # Modules that carry others' rules come first, since such a rule may change numbers that their parents read.
    owned: dict[str, ParentRules] = defaultdict(ParentRules)
    own: dict[str, Style] = {}
    for pattern, style in rules.items():
        owner, _, name = pattern.rpartition(".")
        if not pattern and (isinstance(style, ParameterStyle) or needs_parent(style)):
            raise PlanError(
                f"the rule '' is {style}, which belongs to a parameter or takes numbers from the module above, and "
                "stands for the model itself: name the parameter, or give the numbers"
            )
        if isinstance(style, ParameterStyle):
            owned[owner].parameter_rules[name] = style
        elif needs_parent(style):
            owned[owner].children[name] = style
        else:
            own[pattern] = style
    return {pattern: (own.get(pattern), owned.get(pattern, ParentRules())) for pattern in dict.fromkeys((*owned, *own))}


def style_to_torch(style: Style | None, owned: ParentRules | None = None) -> ParallelStyle:
    """One rule, with those that its module carries, as a ``ParallelStyle`` for parameters on any device."""
    owned = owned or ParentRules()
    own = _implementation(style, owned.parameter_rules)
    return ParentStyle(own, owned.children) if owned.children else own


def _implementation(style: Style | None, parameter_rules: Mapping[str, ParameterStyle]) -> LocalTensorStyle:
    if isinstance(style, GatherSequence):
        return GatherSequenceImpl(style, parameter_rules, _implementation(style.inner, parameter_rules))
    if isinstance(style, DispatchExperts):
        raise PlanError(
            "DispatchExperts is a style of the axis ep: apply plan.on_axis('tp') to the mesh of tp, and "
            "tp_plans.runtime.dispatch_styles(plan.by_path(model)) to the axis ep"
        )
    return LocalTensorStyle(None, parameter_rules) if style is None else _IMPL[type(style)](style, parameter_rules)


class ParentStyle(ParallelStyle):
    """A module's style, applied after its children's styles that take their numbers from it."""

    def __init__(self, own: LocalTensorStyle, children: dict[str, Style]) -> None:
        super().__init__()
        self.own, self.children = own, children
        self._resolved: dict[Style, ParallelStyle] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, child in module.named_children():
            style = next((style for pattern, style in self.children.items() if fnmatchcase(name, pattern)), None)
            if style is not None:
                self._for(resolve_style(style, module))._apply(child, device_mesh)
        own = self.own
        return own._apply(module, device_mesh) if own.style is not None or own.parameter_rules else module

    def _for(self, style: Style) -> ParallelStyle:
        """One style object for equal numbers, so that equal blocks share their classes and compiled graphs."""
        if style not in self._resolved:
            self._resolved[style] = style_to_torch(style)
        return self._resolved[style]
