"""Attention layers that see this rank's head counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_plans._validate import is_integer
from tp_plans.module_attrs import getattr_path, key_value_heads
from tp_plans.styles import ParallelAttention
from tp_plans.torch_styles.activations import PrepareModuleInputImpl


class ParallelAttentionImpl(PrepareModuleInputImpl):
    """``ParallelAttention``: prepares the input as ``PrepareModuleInput`` does, and gives the layer its own counts.

    The counts change once, when the plan is applied.  A config that other modules read too stays as it is: the
    layer gets a view of it.
    """

    style: ParallelAttention

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        counts = self._local_counts(module, mesh.size())
        of_config = {path.partition(".")[2]: count for path, count in counts.items() if "." in path}
        if of_config and not isinstance(module.config, LocalHeadCountConfig):
            module.config = LocalHeadCountConfig(module.config, of_config)  # type: ignore[assignment]
        for name, count in counts.items():
            if "." not in name:
                setattr(module, name, count)

    def _local_counts(self, module: nn.Module, tp: int) -> dict[str, int]:
        style = self.style
        found = {
            path: value for path in style.head_count_attrs if is_integer(value := getattr_path(module, path), least=1)
        }
        own = {path: max(1, value // tp) for path, value in found.items()}
        groups, kv_heads = getattr_path(module, style.kv_groups_attr), key_value_heads(module, style)
        if is_integer(groups, least=1) and kv_heads is not None and kv_heads < tp:
            own[style.kv_groups_attr] = groups * kv_heads // tp
        return own


class LocalHeadCountConfig:
    """A config with some numbers of its own, and for all else the one behind it."""

    def __init__(self, config: Any, counts: Mapping[str, int]) -> None:
        self.__dict__.update(counts, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # so that copy and pickle find nothing of the config's
            raise AttributeError(name)
        return getattr(self._config, name)
