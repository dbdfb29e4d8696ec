"""From a rule, with those folded onto it, to the style that torch applies."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tp_plans.module_attrs import resolve_style
from tp_plans.styles import (
    AllReduceOutput,
    ColwiseEmbedding,
    ColwiseParallel,
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
from tp_plans.torch_styles.activations import LocalWhole, PreparedInput
from tp_plans.torch_styles.attention import LocalAttention
from tp_plans.torch_styles.base import LocalStyle
from tp_plans.torch_styles.embedding import LocalEmbedding, LocalFeatures
from tp_plans.torch_styles.experts import LocalDivided, LocalExperts, LocalSum
from tp_plans.torch_styles.gathered import LocalGathered
from tp_plans.torch_styles.linear import LocalColwise, LocalLatent, LocalRowwise
from tp_plans.torch_styles.parent_rules import Owned
from tp_plans.torch_styles.replicated import LocalReplicated, LocalSequenceParallel

_LOCAL: dict[type, type[LocalStyle]] = {
    ColwiseParallel: LocalColwise,
    RowwiseParallel: LocalRowwise,
    MLAKVProjection: LocalLatent,
    VocabParallelEmbedding: LocalEmbedding,
    ColwiseEmbedding: LocalFeatures,
    ExpertsParallel: LocalExperts,
    ScaleInput: LocalDivided,
    AllReduceOutput: LocalSum,
    GatheredParameters: LocalGathered,
    SequenceParallel: LocalSequenceParallel,
    NoParallel: LocalReplicated,
    PrepareModuleInput: PreparedInput,
    ParallelAttention: LocalAttention,
}


def style_to_torch(style: Style | None, owned: Owned | None = None) -> ParallelStyle:
    """One rule as a ``ParallelStyle``, for modules whose parameters are on any device, meta included.

    Args:
        style: the module's own rule, or ``None``.
        owned: the rules folded onto it.
    """
    owned = owned or Owned()
    own = _local(style, owned.bare)
    return OwnerStyle(own, owned.children) if owned.children else own


def _local(style: Style | None, bare: Mapping[str, ParameterStyle]) -> LocalStyle:
    if isinstance(style, GatherSequence):
        return LocalWhole(style, bare, _local(style.inner, bare))
    return LocalStyle(None, bare) if style is None else _LOCAL[type(style)](style, bare)


class OwnerStyle(ParallelStyle):
    """A module's own style, after those of its children that take their numbers from it."""

    def __init__(self, own: LocalStyle, children: dict[str, Style]) -> None:
        super().__init__()
        self.own, self.children = own, children
        self._resolved: dict[Style, ParallelStyle] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, child in module.named_children():
            style = next((style for pattern, style in self.children.items() if fnmatchcase(name, pattern)), None)
            if style is not None:
                self._for(resolve_style(style, module))._apply(child, device_mesh)
        own = self.own
        return own._apply(module, device_mesh) if own.style is not None or own.bare else module

    def _for(self, style: Style) -> ParallelStyle:
        """One style object for equal numbers, so that equal blocks share their classes and compiled graphs."""
        if style not in self._resolved:
            self._resolved[style] = style_to_torch(style)
        return self._resolved[style]
