"""Copies of parameters that FSDP2 leaves gathered after a forward, for the backward that most often follows.

torch keeps those of the root and of the last block.  Where another call comes first, readers of the modules would get
the copies: an optimizer that was built from them would train nothing, a norm would leave out their gradients, and a
forward after an optimizer's step would compute with the old values.  So:

- after a forward without gradients nothing stays gathered;
- after one with gradients modules hold their shards until the backward, so that ``module.weight`` can be written;
- ``named_parameters``, ``parameters`` and ``zero_grad`` give or clear the shards (``steps.guards``), which changes no
  communication, even on one rank alone;
- ``zero_grad`` of an optimizer drops what ``no_sync`` has accumulated of its parameters, and no shard has yet;
- the step of an optimizer frees the copies of what it has changed, and a step of one that holds copies raises, as do a
  step and a norm of gradients that are not reduced;
- a forward gathers again what was written since, and starts afresh after a pass that raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._torch_compat import (
    copied_versions,
    drop_unreduced_gradients,
    gather_before_gradient,
    gathered_copies,
    gathered_units,
    has_gradient_hooks,
    in_backward,
    in_forward,
    initialize_root,
    modules_of,
    move_root,
    parameter_hooks,
    parameter_owners,
    replaced_parameters,
    reset_after_error,
    sharded_parameters,
    show_shards,
    tree_leaves,
    unreduced_gradients,
    watch_clipping,
    watch_inputs,
    watch_zero_grad,
)
from fsdp_runtime._transformers_compat.models import given_cache
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.unshard import is_held
from fsdp_runtime.model.inference_mode import gather_outside_inference_mode
from fsdp_runtime.runtime_state import RUNTIME_STATE, runtime_state
from fsdp_runtime.wrap import hook_forward

#: The roots of this process's models.
_roots: WeakSet[nn.Module] = WeakSet()


def keep_readers_on_shards(root: nn.Module) -> None:
    """Keep whatever reads the parameters of a root FSDP module on its shards, between any two calls."""
    units = _units(root)
    for unit in units:
        for module in parameter_owners(unit):
            runtime_state(module).fsdp_module = unit

    states, known = [runtime_state(unit) for unit in units], set(root.modules())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(_module: nn.Module, _args: Any, kwargs: Any) -> None:
        if not in_backward():
            _refresh(root)
            if torch.is_grad_enabled():
                _refuse_new_modules(root, known)
                kept = getattr(given_cache(kwargs), "layers", ())
                for tensor in _trained_tensors([vars(layer) for layer in kept]):  # by the forward that filled a cache
                    gather_before_gradient(root, tensor)  # type: ignore[arg-type]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        if in_backward():
            return
        for tensor in _trained_tensors(output):
            tensor.register_hook(_refuse_second_gradients)  # type: ignore[no-untyped-call]
        reset_after_error(root)  # type: ignore[arg-type]  # the forward raised
        for state in states:
            state.versions = ()
        for unit in gathered_units(root):  # type: ignore[arg-type]
            if not is_held(unit):
                show_shards(unit) if torch.is_grad_enabled() else unit.reshard()
            runtime_state(unit).versions = copied_versions(unit)

    hook_forward(root, "gathers again what was written since the last forward", before=refresh, first=True)
    hook_forward(root, "frees what a forward without gradients gathered", after=leave, always=True)
    _roots.add(root)
    _watch_optimizers()


def _trained_tensors(values: Any) -> Iterator[Tensor]:
    if torch.is_grad_enabled():
        yield from (each for each in tree_leaves(values) if isinstance(each, Tensor) and each.requires_grad)


def _refuse_second_gradients(_gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise ModelError(
            "gradients of gradients (create_graph=True) of a model under FSDP2, which frees what they are computed "
            "from: leave create_graph out, and take differences of two backwards, or a model in one process"
        )


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients, which FSDP2 does not run."""
    hooked = [name for name, parameter in model.named_parameters() if parameter_hooks(parameter)[0]]
    if hooked:
        raise ModelError(
            f"{len(hooked)} parameters have hooks of register_hook, first {hooked[0]}, which FSDP2 does not run: "
            "remove them and use register_post_accumulate_grad_hook, which gets the parameter with its reduced gradient"
        )


def _refuse_new_modules(root: nn.Module, known: set[nn.Module]) -> None:
    for module in modules_of(root):
        if module not in known and any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            path = next(path for path, each in root.named_modules() if each is module)
            raise ModelError(
                f"{path} was added after parallelize, so its parameters are not sharded and its gradients would stay "
                "those of one rank: add modules before parallelize"
            )


def _units(root: nn.Module) -> list[Any]:
    return [module for module in modules_of(root) if isinstance(module, FSDPModule)]


def _refuse_replaced(root: Any) -> None:
    for module, name in replaced_parameters(root):
        path = next((path for path, each in root.named_modules() if each is module), type(module).__name__)
        raise ModelError(
            f"{path}.{name} is another tensor than FSDP2 gathers, which would compute with the one before: write its "
            "values in place, under no_grad with parameter.copy_(values), instead of a new parameter, swap_tensors or "
            "functional_call"
        )


def _refresh(root: Any) -> None:
    _refuse_replaced(root)
    initialize_root(root)
    reset_after_error(root)
    if torch.is_grad_enabled() and has_gradient_hooks(root):
        refuse_gradient_hooks(root)
    for unit in gathered_units(root):
        if runtime_state(unit).versions not in (None, copied_versions(unit)):
            unit.reshard()
        for copy, shard in gathered_copies(unit).items():
            copy.requires_grad_(shard.requires_grad)


def shards_of_copies(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return the gathered copies that a module and those below it hold, each with its shard."""
    # In a forward, a backward or ``unsharded`` nothing is returned: what a module computes with are the copies. The
    # next forward gathers anew, since what is written to ``parameter.data`` changes no version.
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for unit in () if in_backward() else gathered_by(module):
        if not is_held(unit) and not in_forward(unit) and (copies := gathered_copies(unit)):
            shards.update(copies)
            runtime_state(unit).versions = ()
    return shards


def free_copies(module: nn.Module) -> bool:
    """Free the copies of a module and those below it; return False where a pass or ``unsharded`` keeps them."""
    units = gathered_by(module)
    if units and (in_backward() or any(is_held(unit) or in_forward(unit) for unit in units)):
        return False
    for unit in units:
        unit.reshard()
    return True


def leave_out_peft_model(tuner: nn.Module, unload: Callable[[], Any]) -> Any:
    """Take the adapters out of a model; where its ``PeftModel`` is a root of FSDP2, the model inside becomes it."""
    root: Any = next((root for root in _roots if tuner in root.modules()), None)
    model = unload()
    if root is None or base_model(root) is not model:
        return model
    state = runtime_state(model)
    move_root(root, model)
    gather_outside_inference_mode(model)
    keep_readers_on_shards(model)
    state.reshard_after_forward = runtime_state(root).reshard_after_forward
    model.set_reshard_after_forward(state.reshard_after_forward, recurse=False)
    state.is_fsdp_root, runtime_state(root).is_fsdp_root = True, False
    state.one_rank = runtime_state(root).one_rank
    _roots.discard(root)
    return model


def drop_unreduced(module: nn.Module) -> None:
    """Drop the gradients of a module and those below it that ``no_sync`` has not reduced yet."""
    for unit in _units(module):
        drop_unreduced_gradients(unit)


def gathered_by(module: nn.Module) -> set[Any]:
    """Return the FSDP modules that gather the parameters of a module and those below it."""
    states = (part.__dict__.get(RUNTIME_STATE) for part in module.modules())
    return {state.fsdp_module for state in states if state is not None and state.fsdp_module is not None}


@cache
def _watch_optimizers() -> None:
    """Check every optimizer at its steps, once per process."""
    register_optimizer_step_pre_hook(_refuse_copies)
    register_optimizer_step_post_hook(_free_copies)
    watch_zero_grad(_drop_unreduced_of)
    watch_clipping(_refuse_unreduced)
    watch_inputs(_refuse_inputs)


def _parameters(optimizer: Optimizer) -> set[nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _refuse_copies(optimizer: Optimizer, *_: Any) -> None:
    held = _parameters(optimizer)
    for root in _roots:
        copies = [copy for unit in _units(root) for copy in gathered_copies(unit, now=False) if copy in held]
        if copies:
            raise ModelError(
                f"this {type(optimizer).__name__} holds {len(copies)} gathered copies of FSDP2's parameters (first of "
                f"shape {tuple(copies[0].shape)}), which modules hold inside of 'with unsharded(model):', so its step "
                "would change nothing: build the optimizer from model.parameters()"
            )
    _refuse_unreduced(held, f"a step of this {type(optimizer).__name__}")


def _refuse_unreduced(parameters: Iterable[Tensor], reader: str = "the norm of clip_grad_norm_") -> None:
    units = [] if in_backward() else [unit for root in _roots for unit in _units(root)]
    waiting = {shard for unit in units for shard in unreduced_gradients(unit)}.intersection(parameters)
    if waiting:
        raise ModelError(
            f"{len(waiting)} parameters have gradients that are not reduced, which {reader} would leave out: run the "
            "last backward of a step outside of 'with no_sync(model):'"
        )


def _refuse_inputs(inputs: Iterable[Any]) -> None:
    wanted = {each for each in inputs if isinstance(each, DTensor)}
    if shards := wanted and wanted.intersection(each for root in _roots for each in sharded_parameters(root).values()):
        raise ModelError(
            f"autograd.grad, or backward(inputs=), of {len(shards)} parameters under FSDP2, which puts gradients in "
            "parameter.grad alone: call loss.backward(), with requires_grad_(False) for the other parameters"
        )


def _drop_unreduced_of(optimizer: Optimizer) -> None:
    """Drop what ``no_sync`` has accumulated of an optimizer's parameters, which has no place in their ``grad`` yet."""
    if in_backward():
        return
    held = _parameters(optimizer)
    dropped = [drop_unreduced_gradients(unit, held) for root in _roots for unit in _units(root)]
    if not all(dropped):
        raise ModelError(
            f"zero_grad of this {type(optimizer).__name__} clears some of the gradients that no_sync(reduce_scatter="
            "True) keeps together: call model.zero_grad()"
        )


def _free_copies(optimizer: Optimizer, *_: Any) -> None:
    if in_backward():  # a step for each parameter, which FSDP2 has sharded again by then
        return
    written = _parameters(optimizer)
    for root in _roots:
        units = _units(root)
        if any(not written.isdisjoint(gathered_copies(unit).values()) for unit in units):
            reset_after_error(root)  # type: ignore[arg-type]
            for unit in units:
                unit.reshard()
                runtime_state(unit).versions = ()
