"""The loss of a dry run: token log-probabilities of rl-logprobs, or the user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from torch import Tensor, nn

from fsdp_runtime import forward_with_lm_head
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.steps.outputs.lm_head import LMHeadParameters, LogitsMap, assume_logits_map, logits_of

#: Runs the model on its inputs, ``input_ids`` among them, and returns the loss; calls the function before computing it.
Forward = Callable[[nn.Module, Mapping[str, Tensor], Callable[[], None]], Tensor]


def resolve_loss(loss: str | Callable[..., Any], lm_head: str | None) -> Forward:
    """Return the forward and the loss for ``"logits"``, ``"linear"``, or a function or its dotted path."""
    if loss == "logits":
        return _on_logits
    if loss == "linear":
        if lm_head is None:
            raise EstimateError("logprobs='linear' needs an LM head, and none was found in the model: use 'logits'")
        return _on_hidden
    function = loss if callable(loss) else _by_dotted_path(loss)

    def forward(model: nn.Module, inputs: Mapping[str, Tensor], begin_loss: Callable[[], None]) -> Tensor:
        result: Tensor = function(model, inputs)  # all of it counts as forward
        begin_loss()
        return result

    return forward


def clip_function() -> Any:
    """Return ``rl_logprobs.clip_grad_norm_``, ``None`` if the package is not installed."""
    with suppress(EstimateError):
        return _from_rl_logprobs("clip_grad_norm_")
    return None


def rl_logprobs_on_accelerator() -> AbstractContextManager[Callable[[], int]]:
    """Let rl-logprobs compute as on an accelerator, and run only the representative tiles of a loss."""
    # Otherwise a loss of ``T`` tokens would trace a number of operators in proportion to ``T``, and the gradient norm
    # one in proportion to the parameters. The context is a function that returns the number of tiles that an operator
    # represents.
    try:
        dry_run = import_module("rl_logprobs.dry_run")
    except ImportError:
        return nullcontext(lambda: 1)
    tile_multiplicity: AbstractContextManager[Callable[[], int]] = dry_run.traced_on_accelerator()
    return tile_multiplicity


def _on_logits(model: nn.Module, inputs: Mapping[str, Tensor], begin_loss: Callable[[], None]) -> Tensor:
    token_logprobs = _from_rl_logprobs("token_logprobs")
    output, targets = model(**inputs), inputs["input_ids"]
    logits = logits_of(output)
    if logits is None:
        raise EstimateError(
            f"the model returned a {type(output).__name__} without logits: pass logprobs=function(model, inputs)"
        )
    if logits.ndim != targets.ndim + 1:
        raise EstimateError(
            f"{type(model).__name__} gives logits of shape {[*logits.shape]}, not of every token: pass "
            "logprobs=function(model, inputs) that returns the loss"
        )
    begin_loss()
    loss: Tensor = -token_logprobs(logits, targets).mean()
    return loss


def _on_hidden(model: nn.Module, inputs: Mapping[str, Tensor], begin_loss: Callable[[], None]) -> Tensor:
    linear_token_logprobs = _from_rl_logprobs("linear_token_logprobs")

    def loss(hidden: Tensor, head: LMHeadParameters) -> Tensor:
        begin_loss()
        options = {"bias": head.bias, "logit_scale": head.logit_scale, "softcap": head.softcap}
        mean: Tensor = linear_token_logprobs(hidden, head.weight, inputs["input_ids"], **options).mean()
        return -mean

    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Fake tensors have no values to measure it on; a factor costs nothing.
    assume_logits_map(model, LogitsMap(softcap=getattr(text, "final_logit_softcapping", None)))
    result: Tensor = forward_with_lm_head(model, loss, **inputs)
    return result


def _from_rl_logprobs(name: str) -> Any:
    try:
        return getattr(import_module("rl_logprobs"), name)
    except ImportError as error:
        raise EstimateError(
            "logprobs='logits' and 'linear' need rl-logprobs: pip install rl-logprobs, or pass "
            "logprobs=function(model, inputs) that returns the loss"
        ) from error


def _by_dotted_path(path: str) -> Any:
    function = None
    with suppress(ImportError, AttributeError, ValueError):
        function = resolve_name(path)
    if not callable(function):
        raise EstimateError(f"logprobs={path!r}: write 'logits', 'linear' or package.module.function")
    return function
