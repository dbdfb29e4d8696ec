"""The loss of a dry run: token log-probabilities, by rl-logprobs where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from fsdp_runtime._torch_compat import children
from fsdp_runtime.errors import EstimateError

#: Called with the model and its inputs, token ids among them; runs forward and returns a function for the loss.
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Callable[[], Tensor]]


def loss_named(told: str | Callable[..., Any], head: str | None) -> Forward:
    """The forward and the loss that a name, a dotted path or a function stands for.

    Args:
        told: ``"logits"``, ``"linear"``, the dotted path of a function of model and inputs, or the function.
        head: the path of the layer that makes logits, which ``"linear"`` leaves out.

    Raises:
        EstimateError: the package or the function is not there.
    """
    if told == "logits":
        return _on_logits(_rl_logprobs("token_logprobs"))
    if told == "linear":
        if head is None:
            raise EstimateError("logprobs='linear' needs a head to be found, and the model has none: use 'logits'")
        return _on_hidden(_rl_logprobs("linear_token_logprobs"), head)
    function = told if callable(told) else _by_dotted_path(told)
    return _as_one(function)


def clipping() -> Callable[[Any, float], Any] | None:
    """``rl_logprobs.clip_grad_norm_``, or ``None`` where the package is not installed."""
    try:
        return _rl_logprobs("clip_grad_norm_")
    except EstimateError:
        return None


def accelerator_workspaces() -> AbstractContextManager[None]:
    """Lets rl-logprobs take the workspaces of a device; with a CPU's it would take a hundred thousand small steps."""
    try:
        row_blocks = import_module("rl_logprobs.softmax.row_blocks")
    except ImportError:
        return nullcontext()
    workspaces: AbstractContextManager[None] = row_blocks.assume_accelerator()
    return workspaces


def _as_one(function: Callable[..., Tensor]) -> Forward:
    """A function that runs the model and returns the loss: all of it counts as forward."""

    def forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        loss = function(model, inputs)
        return lambda: loss

    return forward


def _on_logits(token_logprobs: Callable[..., Tensor]) -> Forward:
    def forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        logits = _logits(model(**inputs))
        return lambda: -token_logprobs(logits, inputs["input_ids"]).mean()

    return forward


def _on_hidden(linear_token_logprobs: Callable[..., Tensor], head: str) -> Forward:
    def forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        owner_path, _, name = head.rpartition(".")
        owner = model.get_submodule(owner_path)
        layer: Any = children(owner)[name]
        children(owner)[name] = nn.Identity()  # what would be logits are the hidden states that the head would see
        try:
            hidden = _logits(model(**inputs))
        finally:
            children(owner)[name] = layer
        return lambda: -linear_token_logprobs(hidden, layer.weight, inputs["input_ids"], bias=layer.bias).mean()

    return forward


def _logits(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)):
        found = output[0]
    if not isinstance(found, Tensor):
        raise EstimateError(
            f"the model returned a {type(output).__name__} without logits: pass logprobs=function(model, inputs)"
        )
    return found


def _rl_logprobs(name: str) -> Callable[..., Any]:
    try:
        module = import_module("rl_logprobs")
    except ImportError as error:
        raise EstimateError(
            "logprobs='logits' and 'linear' are rl-logprobs': pip install rl-logprobs, or pass "
            "logprobs=function(model, inputs) that returns the loss"
        ) from error
    function: Callable[..., Any] = getattr(module, name)
    return function


def _by_dotted_path(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        function = getattr(import_module(module), name) if module else None
    except (ImportError, AttributeError):
        function = None
    if not callable(function):
        raise EstimateError(f"logprobs={path!r}: write 'logits', 'linear', or package.module.function")
    found: Callable[..., Any] = function
    return found
