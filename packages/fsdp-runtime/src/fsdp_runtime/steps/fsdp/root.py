"""Modules of FSDP2's root (embedding, norm, head) that are called outside of the model's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import initialize_root, own_parameters
from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.inference_mode import leave_inference_mode
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.wrap import hook_forward


def gather_root_modules(model: nn.Module, structure: ModelStructure, replicated: set[nn.Parameter]) -> None:
    """Gather the root for a call of one of its modules alone (embedding, norm, head); refuse a call with gradients."""
    # Modules inside blocks get no hooks, so compiled blocks do not trace the check.
    blocks = {module for path in structure.blocks for module in model.get_submodule(path).modules()}
    for path, module in model.named_modules():
        sharded = {
            name: parameter.device_mesh.ndim
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor) and parameter not in replicated
        }
        if sharded and module is not model and module not in blocks:
            hooks = _RootHooks(model, path, sharded)
            effect = "gathers FSDP2's root where it is called alone"
            hook_forward(module, effect, before=hooks.gather, after=hooks.free, first=True, always=True)


class _RootHooks:
    """Hooks around a module of the root.  ``generate`` may call it before the model's forward has gathered the root."""

    def __init__(self, root: Any, path: str, sharded: dict[str, int]) -> None:
        self.root, self.path = root, path
        self.sharded = sharded  # mesh axes per parameter: a gathered parameter keeps only the axis ``tp``
        self.gathered_here = False

    def gather(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        parameters = own_parameters(module)
        if not any(_mesh_ndim(parameters.get(name)) == ndim for name, ndim in self.sharded.items()):
            return  # gathered parameters lack FSDP2's axes
        if torch.is_grad_enabled():
            raise ModelError(
                f"{self.path} is called outside of the model's own forward, where FSDP2 keeps its parameters sharded: "
                "call the model, or forward_with_lm_head(model, function, ...) for a loss on hidden states, or call it "
                "without gradients"
            )
        initialize_root(self.root)
        self.gathered_here = True
        with leave_inference_mode():  # FSDP2 keeps the tensors that it allocates
            self.root.unshard()

    def free(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.gathered_here:
            self.gathered_here = False
            self.root.reshard()


def _mesh_ndim(parameter: Any) -> int:
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
