"""Calls between two steps that run forwards and backwards of their own, and compare the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from combinations.batches import full, outputs_of
from combinations.events import Training, Wrong
from harness.parity import GRADIENT_BOUND, gradient_errors

Within = Callable[[Any], AbstractContextManager[Any]]
#: Gives the loss of one model with each call.
Loss = Callable[[], Tensor]


def _plain(loss: Loss) -> None:
    loss().backward()


def _compared(
    at: Training, within: Within = lambda _: nullcontext(), backward: Callable[[Loss], None] = _plain
) -> None:
    """Compare the gradients that backwards compute within a context of each model, then drop them."""
    for model, loss in ((at.reference, partial(_reference_loss, at)), (at.model, partial(_loss, at))):
        with within(model):
            try:
                backward(loss)
            except RuntimeError as error:
                if model is at.reference and "does not require grad" in str(error):
                    return  # what trains was frozen
                raise
    wanted = {name: parameter.grad for name, parameter in at.reference.named_parameters()}
    # A frozen part leaves gradients that are zero but for rounding.
    for name, error in gradient_errors(wanted, at.model, least_share=1e-3).items():
        if not error <= GRADIENT_BOUND:
            raise Wrong(f"gradient of {name} off by {error:.1e} of its largest element")
    at.model.zero_grad()
    at.reference.zero_grad()


def _reference_loss(at: Training) -> Tensor:
    return (outputs_of(at.reference, at.batch) * at.batch.weights).sum()


def _loss(at: Training) -> Tensor:
    own = at.batch.rows(at.share.own)
    logits = full(at.model(**at.share.inputs(own), use_cache=False).logits)
    return (logits * at.tokens_of(own.weights)).sum() * at.share.ranks


def _first_in_first_out(loss: Loss) -> None:
    one, two = loss(), loss() * 0.5
    one.backward()
    two.backward()


def _last_in_first_out(loss: Loss) -> None:
    one, two = loss(), loss() * 0.5
    two.backward()
    one.backward()


def _sum_of_two(loss: Loss) -> None:
    (loss() + loss() * 0.5).backward()


def _twice(loss: Loss) -> None:
    once = loss()
    once.backward(retain_graph=True)
    once.backward()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freeze the embeddings, the norms and the queries for one backward."""
    parts = ("embed", "norm", "q_proj")
    chosen = [p for name, p in model.named_parameters() if p.requires_grad and any(part in name for part in parts)]
    for parameter in chosen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)


@contextmanager
def _hooked(model: nn.Module) -> Iterator[None]:
    """Scale the results of norms and of split layers by hooks of a user, and look at gradients of blocks."""
    seen: list[str] = []
    handles = []
    for name, module in model.named_modules():
        if name.endswith(("norm", "q_proj", "o_proj")) and not [*module.children()]:
            handles.append(module.register_forward_hook(lambda _, args, output: output * 2))
        if type(module).__name__.endswith("DecoderLayer"):
            handles.append(module.register_full_backward_hook(lambda *_, name=name: seen.append(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _recomputed(model: Any, *, use_reentrant: bool) -> Iterator[None]:
    """Let transformers checkpoint the blocks."""
    inner = getattr(model, "base_model", model) if hasattr(model, "disable_adapter") else model
    inner.train()
    inner.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    inner.enable_input_require_grads()
    try:
        yield
    finally:
        inner.disable_input_require_grads()
        inner.gradient_checkpointing_disable()
        inner.eval()


def _on_host(_: nn.Module) -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu()


#: Calls by name.
OWN_GRADIENTS: dict[str, Callable[[Training], None]] = {
    "two losses, the first first": partial(_compared, backward=_first_in_first_out),
    "two losses, the last first": partial(_compared, backward=_last_in_first_out),
    "the sum of two losses": partial(_compared, backward=_sum_of_two),
    "two backwards": partial(_compared, backward=_twice),
    "frozen once": partial(_compared, within=_frozen),
    "hooks of modules": partial(_compared, within=_hooked),
    "saved on the host": partial(_compared, within=_on_host),
    "recomputed by transformers": partial(_compared, within=partial(_recomputed, use_reentrant=False)),
    "recomputed, reentrant": partial(_compared, within=partial(_recomputed, use_reentrant=True)),
}
