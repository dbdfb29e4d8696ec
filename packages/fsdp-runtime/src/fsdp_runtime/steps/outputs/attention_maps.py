"""Attention maps, as ``output_attentions=True`` asks for them: of all heads, where each rank of ``tp`` has some.

The maps of a rank's heads look like those of a model with fewer heads.  Which they are is known where they are
computed, so in a forward that was asked for maps each attention layer whose heads are sharded notes what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_runtime._peft_compat import unwrapped
from fsdp_runtime._transformers_compat.models import asks_for, is_transformers_model
from fsdp_runtime.wrap import hook_forward
from tp_plans import ColwiseParallel, GatherSequence
from tp_plans import Shard as ShardedFeatures
from tp_plans.runtime import plain_full_tensor
from tp_plans.styles import ParallelAttention

_HEADS = 1  # the dim of a map [batch, heads, queries, keys]


@dataclass(eq=False)
class _Noted:
    """What the attention layers below a model returned in this forward."""

    # Other members of a layer's output, such as a bias of the scores, are among the maps.
    model: nn.Module
    maps: list[tuple[Tensor, DeviceMesh]] = field(default_factory=list)
    hooks: ExitStack = field(default_factory=ExitStack)


_noted: ContextVar[_Noted | None] = ContextVar("noted", default=None)


def return_full_attention_maps(model: nn.Module) -> None:
    """Let every transformers model in a model that is sharded over ``tp`` return attention maps of all heads."""
    for module in model.modules():
        if is_transformers_model(module):
            hook_forward(module, "gathers attention maps", before=_begin, after=_end, always=True)


def _begin(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    if _noted.get() is not None or not asks_for(model, kwargs, "attentions"):
        return
    noted = _Noted(model)
    for layer, mesh in _layers_with_sharded_heads(model):
        noted.hooks.callback(hook_forward(layer, "notes attention maps", after=_noting(noted, mesh)).remove)
    _noted.set(noted)


def _noting(noted: _Noted, mesh: DeviceMesh) -> Any:
    def note(layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple | list):
            noted.maps += [(each, mesh) for each in output[1:] if isinstance(each, Tensor) and each.ndim == 4]

    return note


def _layers_with_sharded_heads(model: nn.Module) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Iterate over attention layers by their rule, and modules with local features of a column-wise layer (queries)."""
    for module in model.modules():
        if is_transformers_model(module):  # its children are a trunk and a head; its own hooks would end in their loop
            continue
        if isinstance(_rule(module), ParallelAttention):
            yield module, cast(Any, module).tp_mesh
            continue
        for child in map(unwrapped, module.children()):
            rule = _rule(child)
            if isinstance(rule, ColwiseParallel) and rule.output_layouts == ShardedFeatures(-1):
                yield module, cast(Any, child).tp_mesh
                break


def _rule(module: nn.Module) -> object:
    rule = getattr(getattr(module, "tp_style", None), "style", None)
    return rule.inner if isinstance(rule, GatherSequence) else rule


def _end(model: nn.Module, args: Any, output: Any) -> Any:
    noted = _noted.get()
    if noted is None or noted.model is not model:
        return output
    noted.hooks.close()
    _noted.set(None)
    if isinstance(output, Mapping):  # a ModelOutput, which keeps attributes and entries in step
        for name, value in output.items():
            output[name] = _full(value, noted)  # type: ignore[index]
        return output
    return tuple(_full(value, noted) for value in output) if type(output) is tuple else output


def _full(value: Any, noted: _Noted) -> Any:
    if type(value) is not tuple:
        return value
    meshes = {id(each): mesh for each, mesh in noted.maps}
    return tuple(_of_all_heads(each, meshes[id(each)]) if id(each) in meshes else each for each in value)


def _of_all_heads(of_rank: Tensor, mesh: DeviceMesh) -> Tensor:
    full: Tensor = plain_full_tensor(DTensor.from_local(of_rank, mesh, [Shard(_HEADS)], run_check=False), mesh)
    return full
