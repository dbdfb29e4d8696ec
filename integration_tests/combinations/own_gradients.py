"""Calls between two steps that run forwards and backwards of their own, and compare the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from combinations.events import Training

Within = Callable[[Any], AbstractContextManager[Any]]
#: Gives the loss of one model with each call.
Loss = Callable[[], Tensor]


def _plain(loss: Loss) -> None:
    loss().backward()


def _compared(
    at: Training, within: Within = lambda _: nullcontext(), backward: Callable[[Loss], None] = _plain
) -> None:
    """Compare the gradients that backwards compute within a context of each model, then drop them."""
    own = at.batch.rows(at.share.own)
    for model, loss in (
        (at.reference, at.reference_loss),
        (at.model, lambda: at.loss_of(at.logits_of(own), own)),
    ):
        with within(model):
            try:
                backward(loss)
            except RuntimeError as error:
                if model is at.reference and "does not require grad" in str(error):
                    return  # what trains was frozen
                raise
    at.compare_gradients(least_share=1e-3)  # a frozen part leaves gradients that are zero but for rounding
    at.model.zero_grad()
    at.reference.zero_grad()


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
    """Scale the results of norms and of split layers, and the gradients of blocks, by hooks of a user."""
    handles = []
    for name, module in model.named_modules():
        if name.endswith(("norm", "q_proj", "o_proj")) and not [*module.children()]:
            handles.append(module.register_forward_hook(lambda _, args, output: output * 2))
        if type(module).__name__.endswith("DecoderLayer"):
            handles.append(module.register_full_backward_hook(_doubled))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _doubled(_: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if each is None else each * 2 for each in inputs)


@contextmanager
def _recomputed(model: Any, *, use_reentrant: bool) -> Iterator[None]:
    """Let transformers checkpoint the blocks."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
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
