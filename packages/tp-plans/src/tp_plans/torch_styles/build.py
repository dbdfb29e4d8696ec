"""From a rule, with those of its parameters and children, to the ``ParallelStyle`` that torch applies."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans.errors import PlanError
from tp_plans.module_attrs import resolve_style
from tp_plans.styles import (
    AllReduceOutput,
    ColwiseEmbedding,
    ColwiseParallel,
    DispatchExperts,
    ExpertsParallel,
    GatheredParameters,
    GatherSequence,
    MLAKVProjection,
    NoParallel,
    ParallelAttention,
    ParameterStyle,
    PrepareModuleInput,
    RowwiseParallel,
    ScaleInput,
    SequenceParallel,
    Style,
    VocabParallelEmbedding,
)
from tp_plans.torch_styles.activations import GatherSequenceImpl, PrepareModuleInputImpl
from tp_plans.torch_styles.attention import ParallelAttentionImpl
from tp_plans.torch_styles.base import LocalTensorStyle
from tp_plans.torch_styles.embedding import ColwiseEmbeddingImpl, VocabParallelEmbeddingImpl
from tp_plans.torch_styles.experts import AllReduceOutputImpl, ExpertsParallelImpl, ScaleInputImpl
from tp_plans.torch_styles.gathered import GatheredParametersImpl
from tp_plans.torch_styles.linear import ColwiseParallelImpl, MLAKVProjectionImpl, RowwiseParallelImpl
from tp_plans.torch_styles.parent_rules import ParentRules
from tp_plans.torch_styles.replicated import NoParallelImpl, SequenceParallelImpl

_IMPL: dict[type, type[LocalTensorStyle]] = {
    ColwiseParallel: ColwiseParallelImpl,
    RowwiseParallel: RowwiseParallelImpl,
    MLAKVProjection: MLAKVProjectionImpl,
    VocabParallelEmbedding: VocabParallelEmbeddingImpl,
    ColwiseEmbedding: ColwiseEmbeddingImpl,
    ExpertsParallel: ExpertsParallelImpl,
    ScaleInput: ScaleInputImpl,
    AllReduceOutput: AllReduceOutputImpl,
    GatheredParameters: GatheredParametersImpl,
    SequenceParallel: SequenceParallelImpl,
    NoParallel: NoParallelImpl,
    PrepareModuleInput: PrepareModuleInputImpl,
    ParallelAttention: ParallelAttentionImpl,
}


def style_to_torch(style: Style | None, owned: ParentRules | None = None) -> ParallelStyle:
    """One rule as a ``ParallelStyle``, for modules whose parameters are on any device, meta included.

    Args:
        style: the module's own rule, or ``None``.
        owned: the rules that it carries for its parameters and children.
    """
    owned = owned or ParentRules()
    own = _implementation(style, owned.parameter_rules)
    return ParentStyle(own, owned.children) if owned.children else own


def _implementation(style: Style | None, parameter_rules: Mapping[str, ParameterStyle]) -> LocalTensorStyle:
    if isinstance(style, GatherSequence):
        return GatherSequenceImpl(style, parameter_rules, _implementation(style.inner, parameter_rules))
    if isinstance(style, DispatchExperts):
        raise PlanError(
            "DispatchExperts is a style of the axis ep: apply plan.on_axis('tp') to the mesh of tp, and "
            "expert_styles_by_path(plan, model) to that of ep"
        )
    return LocalTensorStyle(None, parameter_rules) if style is None else _IMPL[type(style)](style, parameter_rules)


class ParentStyle(ParallelStyle):
    """A module's own style, after those of its children that take their numbers from it."""

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
