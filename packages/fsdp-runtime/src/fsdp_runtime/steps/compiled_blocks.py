"""The forward of a compiled block: one graph with plain inputs; hooks, FSDP2's among them, run around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import is_compiled_by_torch, set_compiled_call
from fsdp_runtime.runtime_state import RUNTIME_STATE, runtime_state
from fsdp_runtime.steps.recomputation import recomputes
from fsdp_runtime.wrap import Wrapper, wrap
from tp_plans.runtime import call_on_plain_tensors, mesh_of, plain_forward, plain_parameters


class CompiledBlock(Wrapper):
    """Runs the compiled forward of its class; under a plan it unwraps the block's DTensors before the graph."""

    #: The mesh of the plan's styles, or ``None``.
    plain_mesh: ClassVar[DeviceMesh | None] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward, or the forward itself inside of another graph and where outputs are recorded."""
        state = self.__dict__[RUNTIME_STATE]
        if state.compiled is None or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.plain_mesh is None:
            return state.compiled(self, *args, **kwargs)
        if state.plain_parameters is None:
            state.plain_parameters = plain_parameters(self, _keeps_dtensors)  # type: ignore[arg-type]
        run = partial(state.compiled, self)
        return call_on_plain_tensors(run, state.plain_parameters, self.plain_mesh, args, kwargs)

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward without a plan; the compiler traces this."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def on_plain_tensors(self, placed: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the forward under a plan; the compiler traces this."""
        return plain_forward(super().forward, self.plain_mesh, placed, args, kwargs)  # type: ignore[misc, arg-type]


def compile_blocks(blocks: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile the forwards of blocks with ``torch.compile``; blocks of one class share their graphs."""
    mesh = next(filter(None, map(mesh_of, blocks)), None)
    wrap(blocks, CompiledBlock, **({} if mesh is None else {"plain_mesh": mesh}))
    compiled = torch.compile(CompiledBlock.whole if mesh is None else CompiledBlock.on_plain_tensors, **options)
    for block in blocks:
        runtime_state(block).compiled = compiled


def _keeps_dtensors(module: nn.Module) -> bool:
    """Return whether a module inside a block gathers its parameters itself, or needs them again in backward."""
    if isinstance(module, FSDPModule):
        return not isinstance(module, CompiledBlock)
    return recomputes(module) and runtime_state(module).recomputes_in_python


def is_compiled(module: nn.Module) -> bool:
    """Return True for a compiled block, and for a module with a call of ``nn.Module.compile``."""
    state = module.__dict__.get(RUNTIME_STATE)
    return is_compiled_by_torch(module) or (state is not None and state.compiled is not None)


def leave_to_python(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[Any, Any]]:
    """Let compiled modules run without the compiler; return their calls for :func:`compile_again`."""
    calls = {}
    for module in filter(is_compiled, modules):
        state = runtime_state(module)
        calls[module] = state.compiled, set_compiled_call(module, None)
        state.compiled = None
    return calls


def compile_again(calls: Mapping[nn.Module, tuple[Any, Any]]) -> None:
    """Undo :func:`leave_to_python`."""
    for module, (compiled, call) in calls.items():
        runtime_state(module).compiled = compiled
        set_compiled_call(module, call)
