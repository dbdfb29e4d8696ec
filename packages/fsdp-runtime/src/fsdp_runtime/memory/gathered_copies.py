"""Gathered parameters that FSDP2 keeps after a forward for the backward, and the root's modules called alone.

FSDP2 keeps the parameters of the root and the last block gathered.  A call between forward and backward would read the
gathered copies.  An optimizer built from copies would train nothing, a norm would leave out their gradients, and
a forward after an optimizer's step would compute with the old values.  Therefore:

- After a forward without gradients nothing stays gathered.
- After a forward with gradients the modules hold their shards until the backward.
- ``named_parameters`` and ``parameters`` give shards between passes (``steps.guards``), without communication.
- A backward drops accumulated gradients that ``zero_grad`` or ``parameter.grad = None`` has cleared.
- An optimizer's step frees the copies.  It raises if the optimizer holds copies or gradients are not reduced.
- A forward gathers changed parameters again, and resets FSDP2 after a pass that raised.
- A call of the embedding, the norm or the head outside of the model's forward gathers the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime import _torch_compat as fsdp2
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.gradient_accumulation import drop_cleared_gradients, watch_accumulation
from fsdp_runtime.memory.unshard import is_held
from fsdp_runtime.model.inference_mode import leave_inference_mode
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.wrap import hook_forward

#: The root FSDP modules of this process.
_roots: WeakSet[Any] = WeakSet()


def keep_readers_on_shards(root: Any) -> None:
    """Give every reader of a root's parameters the shards between passes."""
    units = runtime_state(root).units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    states = [runtime_state(unit) for unit in units]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if not fsdp2.in_backward():
            _refresh(root)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(_module: nn.Module, _args: Any, outputs: Any) -> None:
        if fsdp2.in_backward():
            return
        fsdp2.reset_after_error(root)  # the forward raised
        if torch.is_grad_enabled():
            watch_accumulation(root, [leaf for leaf in fsdp2.tree_leaves(outputs) if isinstance(leaf, Tensor)])
        for state in states:
            state.versions = ()
        for unit in fsdp2.gathered_units(root):
            if not is_held(unit):
                fsdp2.show_shards(unit) if torch.is_grad_enabled() else unit.reshard()
            runtime_state(unit).versions = fsdp2.copied_versions(unit)

    hook_forward(root, "gathers parameters that changed since the last forward", before=refresh, first=True)
    hook_forward(root, "frees the parameters of a forward without gradients", after=leave, always=True)
    _roots.add(root)


def _refresh(root: Any) -> None:
    for module, name in fsdp2.replaced_parameters(root):
        path = next((path for path, other in root.named_modules() if other is module), type(module).__name__)
        raise ModelError(
            f"{path}.{name} was replaced after parallelize, and FSDP2 would compute with the earlier tensor: write the "
            "new values in place, under no_grad with parameter.copy_(values)"
        )
    fsdp2.initialize_root(root)
    fsdp2.reset_after_error(root)
    if torch.is_grad_enabled() and fsdp2.has_gradient_hooks(root):
        refuse_gradient_hooks(root)
    for unit in fsdp2.gathered_units(root):
        if runtime_state(unit).versions not in (None, fsdp2.copied_versions(unit)):
            unit.reshard()
        for copy, shard in fsdp2.gathered_copies(unit).items():
            copy.requires_grad_(shard.requires_grad)


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients, because FSDP2 does not run them."""
    hooked = [name for name, parameter in model.named_parameters() if fsdp2.parameter_hooks(parameter)[0]]
    if hooked:
        raise ModelError(
            f"{len(hooked)} parameters have hooks of register_hook, first {hooked[0]}, which FSDP2 does not run: "
            "remove them and use register_post_accumulate_grad_hook, which gets the parameter with its reduced gradient"
        )


def shards_of_copies() -> dict[nn.Parameter, nn.Parameter]:
    """Return the shard of each gathered copy that modules hold between passes."""
    # A write to ``parameter.data`` changes no version, so the next forward gathers again.
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for unit in () if fsdp2.in_backward() else _units():
        if not is_held(unit) and (copies := fsdp2.gathered_copies(unit)) and not fsdp2.in_forward(unit):
            shards.update(copies)
            runtime_state(unit).versions = ()
    return shards


def free_copies(module: nn.Module) -> bool:
    """Free the gathered copies of a module's model; return ``False`` if a pass or ``unsharded`` needs them."""
    for root in [root for root in _roots if module in fsdp2.modules_of(root)]:
        units = runtime_state(root).units
        if fsdp2.in_backward() or fsdp2.in_forward(root) or any(map(is_held, units)):
            return False
        for unit in units:
            unit.reshard()
    return True


def _units() -> Iterator[Any]:
    for root in _roots:
        yield from runtime_state(root).units


def _parameters(optimizer: Optimizer) -> set[nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def before_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step of gathered copies, or without unreduced gradients."""
    parameters, name = _parameters(optimizer), type(optimizer).__name__
    copies = [copy for unit in _units() for copy in fsdp2.gathered_copies(unit, now=False) if copy in parameters]
    if copies:
        raise ModelError(
            f"this {name} holds {len(copies)} gathered copies of FSDP2's parameters (first of shape "
            f"{tuple(copies[0].shape)}), which modules hold inside of 'with unsharded(model):', so its step would "
            "change nothing: build the optimizer from model.parameters()"
        )
    if fsdp2.in_backward():
        return
    for root in _roots:
        if not parameters.isdisjoint(shard for shard, _ in runtime_state(root).marks):
            drop_cleared_gradients(root)
    if waiting := parameters.intersection(shard for unit in _units() for shard in fsdp2.unreduced_gradients(unit)):
        raise ModelError(
            f"{len(waiting)} parameters have gradients that are not reduced, and a step of this {name} would leave "
            "them out: run the last backward of a step outside of 'with no_sync(model):'"
        )


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """Free the gathered copies of changed parameters."""
    if fsdp2.in_backward():  # one step per parameter; FSDP2 has sharded the parameter already
        return
    written = _parameters(optimizer)
    for root in _roots:
        units = runtime_state(root).units
        if any(not written.isdisjoint(fsdp2.gathered_copies(unit).values()) for unit in units):
            fsdp2.reset_after_error(root)
            for unit in units:
                unit.reshard()


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
        meshes = {
            name: getattr(parameter, "device_mesh", None) for name, parameter in fsdp2.own_parameters(module).items()
        }
        if not any(mesh is not None and mesh.ndim == self.sharded.get(name) for name, mesh in meshes.items()):
            return  # gathered parameters lack FSDP2's axes
        if torch.is_grad_enabled():
            raise ModelError(
                f"{self.path} is called outside of the model's own forward, where FSDP2 keeps its parameters sharded: "
                "call the model, or forward_with_lm_head(model, function, ...) for a loss on hidden states, or call it "
                "without gradients"
            )
        fsdp2.initialize_root(self.root)
        self.gathered_here = True
        with leave_inference_mode():  # FSDP2 keeps the tensors that it allocates
            self.root.unshard()

    def free(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.gathered_here:
            self.gathered_here = False
            self.root.reshard()
