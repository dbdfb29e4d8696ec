"""A module's own parameters, buffers, children and hooks, and the hooks of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module that are part of its state dict."""
    # Public API distinguishes them from other buffers only through ``state_dict()``; its hooks drop FSDP2's gathered
    # parameters.
    hidden = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in hidden}


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return a module's own parameters, including absent ones and plain tensors in their place."""
    # ``named_parameters`` hides both, and ``getattr`` runs the parametrisations of a module.
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Return a module's own buffers, including absent ones."""
    return module._buffers


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return every module of a model once, the model itself first."""
    # Every forward calls this: ``Module.modules`` takes ten times as long on the host.
    modules: dict[nn.Module, None] = {model: None}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                waiting.append(child)
    return list(modules)


def fingerprint(model: nn.Module) -> list[tuple[nn.Module, type, list[str]]]:
    """Return a key that stays equal while a model has the same modules with the same classes and names."""
    return [(module, type(module), list(module._modules)) for module in modules_of(model)]


def hooked_before(model: nn.Module) -> list[nn.Module]:
    """The modules of a model with hooks that run before their forward."""
    return [module for module in modules_of(model) if module._forward_pre_hooks]


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own dict of its children: replacing a child there keeps the order."""
    return module._modules


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """The hooks that run before a module's forward."""
    return list(module._forward_pre_hooks.values())


def is_compiled_by_torch(module: nn.Module) -> bool:
    """Return True if ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def set_compiled_call(module: nn.Module, call: Any) -> Any:
    """Give a module another compiled call, ``None`` to run uncompiled; return its earlier compiled call."""
    # ``torch.compiler.set_stance`` applies to the whole process.
    before, module._compiled_call_impl = module._compiled_call_impl, call
    return before


def has_forward(module: nn.Module) -> bool:
    """Return True if a module's class has a forward; torch gives ``nn.Module`` a forward that raises."""
    return type(module).forward is not nn.Module.forward


def parameter_hooks(parameter: Tensor) -> tuple[Any, Any]:
    """The hooks of ``register_hook`` and ``register_post_accumulate_grad_hook``."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def hook_gradient(parameter: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    """Register a hook on a parameter's gradient, also for a frozen parameter, which torch refuses."""
    trains = parameter.requires_grad
    parameter.requires_grad_()
    parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)


def set_parameter_hooks(parameter: Tensor, hooks: tuple[Any, Any]) -> None:
    """Let a parameter run hooks of :func:`parameter_hooks`; their handles stay valid."""
    # Also for a parameter with swapped content: it keeps its hooks as an attribute that autograd does not know.
    before, after = hooks
    if before:
        parameter._backward_hooks = before
    if after:
        parameter._post_accumulate_grad_hooks = after
