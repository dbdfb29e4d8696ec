"""Refuse the forward of a parallelized model while parameters are on the meta device.

torch computes on meta tensors without an error under tensor parallelism, and FSDP2 fails with an unusable state.  The
hooks remove themselves once all parameters have data, so later forwards do not run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import tree_leaves
from fsdp_runtime._transformers_compat.models import original_class
from fsdp_runtime.errors import ModelError
from fsdp_runtime.runtime_state import RUNTIME_STATE, runtime_state
from fsdp_runtime.wrap import hook_forward

_EFFECT = "refuses a forward until its parameters have data"
_FIX = (
    "load_weights(model, checkpoint) loads them, with new_modules={path: std} for a head that the checkpoint lacks; "
    "materialize(model) allocates them for initial values of your own"
)
#: Parameters that an error lists.
_LISTED = 4


def refuse_until_loaded(model: nn.Module, blocks: Iterable[str]) -> None:
    """Register the hooks on a model with parameters on meta, and on its submodules that contain blocks."""
    inside = tuple(blocks)
    for path, module in model.named_modules():
        owns_blocks = any(block.startswith(f"{path}.") for block in inside)
        if path and (not owns_blocks or isinstance(module, nn.ModuleList | nn.ModuleDict)):
            continue
        if any(parameter.is_meta for parameter in module.parameters()):
            runtime_state(module).unloaded = hook_forward(module, _EFFECT, before=_refuse, first=True)


def allow_loaded(model: nn.Module) -> None:
    """Remove the hooks of modules once all their parameters have data."""
    for module in model.modules():
        state = module.__dict__.get(RUNTIME_STATE)
        if state is not None and state.unloaded is not None and not _on_meta(module):
            state.unloaded.remove()
            state.unloaded = None


def require_loaded(names: Sequence[str], caller: str) -> None:
    """Raise :class:`ModelError` if there are parameters on the meta device."""
    if names:
        listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
        raise ModelError(f"{caller} with {len(names)} parameters on the meta device ({listed}): {_FIX}")


def _on_meta(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.is_meta]


def _refuse(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise for parameters on meta.  Without FSDP2 a forward on meta inputs is allowed: it computes shapes."""
    names = _on_meta(module)
    if not names:
        allow_loaded(module)
    elif not _computes_shapes((args, {**kwargs})) or any(isinstance(child, FSDPModule) for child in module.modules()):
        require_loaded(names, f"a forward of a {original_class(module).__name__}")


def _computes_shapes(inputs: Any) -> bool:
    return all(leaf.is_meta for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
