"""The one place that puts code around the forward of a user's module; ``describe_parallelism`` lists it.

A submodule's wrapper is a class that is mixed in before the module's class.  Hooks do not serve here: ``torch.compile``
guards on their ids, which differ from block to block, and an interrupt skips them.  ``deepcopy`` keeps a class and
copies no state with it.  Tensor parallelism and FSDP2 add classes in the same way, so the order of the steps is the
order of the wrappers.

The whole model is not compiled.  Its inputs and outputs pass through torch's hooks, so that the user's hooks run in the
order of their registration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.runtime_state import RUNTIME_STATE, runtime_state


class Wrapper:
    """Mixed in before a module's class; its ``forward`` calls ``super().forward``."""

    #: The effect on the module, for ``describe_parallelism``.
    effect: ClassVar[str] = ""


def wrap(modules: Iterable[nn.Module], wrapper: type[Wrapper], **attributes: Any) -> None:
    """Mix a wrapper in before the classes of modules that do not have it yet, in place."""
    # Modules of one class get one new class, so that equal blocks are compiled once. The new class keeps the
    # old name, by which transformers finds the modules to record.
    made: dict[type, type[nn.Module]] = {}
    for module in modules:
        cls: Any = type(module)
        if cls not in made:
            made[cls] = _with_wrapper(cls, wrapper, attributes) if attributes else _shared(cls, wrapper)  # type: ignore[arg-type]  # mypy: a class is hashable
        module.__class__ = made[cls]


def effects_of(module: nn.Module) -> tuple[str, ...]:
    """Return the effects of the code around a module's forward, outermost first: of hooks, then of wrappers."""
    state = module.__dict__.get(RUNTIME_STATE)
    hooks = [] if state is None else state.hook_effects
    wrappers = (vars(cls).get("effect") for cls in type(module).__mro__ if issubclass(cls, Wrapper))
    return (*hooks, *(effect for effect in wrappers if effect))


class Hooks:
    """The hooks of :func:`hook_forward`, with their effect and torch's handles."""

    def __init__(self, module: nn.Module, effect: str, handles: list[RemovableHandle]) -> None:
        self.module, self.effect, self.handles = module, effect, handles

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        runtime_state(self.module).hook_effects.remove(self.effect)


def hook_forward(
    module: nn.Module,
    effect: str,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    first: bool = False,
    always: bool = False,
) -> Hooks:
    """Register hooks around a module's forward; ``effect`` is for ``describe_parallelism``."""
    # ``before`` gets the module, its arguments and keywords; ``after`` gets the module, its arguments and its output.
    # ``first`` puts both ahead of the other hooks.  ``always`` calls ``after`` also if the forward has raised.
    handles = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=first))
    if after is not None:
        handles.append(module.register_forward_hook(after, prepend=first, always_call=always))
    runtime_state(module).hook_effects.append(effect)
    return Hooks(module, effect, handles)


def hook_model(
    model: nn.Module,
    effect: str,
    before: Callable[..., Any],
    after: Callable[..., Any] | None = None,
    *,
    first: bool = False,
) -> None:
    """Register hooks that run once per forward of a model, by any caller; ``after`` also runs after an error."""
    # ``PeftModel.generate`` calls the base model.  ``PeftModel.forward`` calls it in some classes, and in other classes
    # runs the base model's forward without its hooks.
    base = base_model(model)
    if base is not model:
        inside = _Inside(before, after)
        hook_forward(base, effect, before=inside.before, after=inside.after, first=first, always=True)
        model.register_forward_pre_hook(inside.enter, prepend=True)
        model.register_forward_hook(inside.leave, always_call=True)
    hook_forward(model, effect, before=before, after=after, first=first, always=True)


class _Inside:
    """The hooks of a ``PeftModel``'s base model; they do nothing during a forward of the ``PeftModel``."""

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any] | None) -> None:
        self.hooks = before, after
        self.depth = 0

    def enter(self, module: nn.Module, args: Any) -> None:
        self.depth += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.depth else self.hooks[0](module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self.depth or self.hooks[1] is None else self.hooks[1](module, args, output)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Set the forward of one instance, not of its class; return the instance's earlier forward, if it had one."""
    replaced: Callable[..., Any] | None = module.__dict__.get("forward")
    module.forward = forward
    return replaced


def restore_forward(module: nn.Module, replaced: Callable[..., Any] | None) -> None:
    """Undo :func:`replace_forward`, which returned ``replaced``."""
    del module.__dict__["forward"]
    if replaced is not None:
        module.forward = replaced


@cache
def _shared(cls: Any, wrapper: type[Wrapper]) -> type[nn.Module]:
    return _with_wrapper(cls, wrapper, {})


def _with_wrapper(cls: type, wrapper: type[Wrapper], attributes: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (wrapper, cls), {**names, **attributes})
