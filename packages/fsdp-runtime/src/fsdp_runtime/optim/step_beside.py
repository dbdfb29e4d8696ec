"""A step on the host beside a forward of the model: each block waits for the parameters that it reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import prefetched_shards
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.host_copies import HostCopies
from fsdp_runtime.model import inspect_model
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.wrap import hook_forward

_EFFECT = "waits for parameters of a step beside the forward"


class StepBeside:
    """A step that another thread computes in chunks, in order, while this thread runs a model's forward."""

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        blocks = [model.get_submodule(path) for path in inspect_model(model).blocks]
        inside = {module for block in blocks for module in block.modules()}
        in_blocks = {parameter for block in blocks for parameter in block.parameters()}
        others: list[Tensor] = [parameter for parameter in model.parameters() if parameter not in in_blocks]
        if missing := len(set(parameters) - in_blocks - set(others)):
            raise ModelError(
                f"{missing} parameters of the optimizer are not in the model: give step_during the model of the "
                "optimizer, outside of unsharded(...)"
            )
        # The parameters that a module's forward reads. Submodules of a block get no hooks, which a compiled block would
        # trace.
        self._reads: dict[nn.Module, list[Tensor]] = {
            module: others for module in model.modules() if module not in inside
        }
        self._reads |= {block: [*block.parameters(), *_gathered_ahead(block)] for block in blocks}
        self._last: dict[Tensor, int] = {}  # by parameter, the number of its last chunk
        self._events: list[Any] = []  # behind the parameters of each finished chunk
        self._changed = threading.Condition()
        self._result: Future[None] = Future()
        self._copies = HostCopies()

    def run(
        self,
        chunks: Sequence[Iterable[Tensor]],
        step: Callable[[Callable[[], None]], None],
        forward: Callable[[], Any],
        copies: HostCopies,
    ) -> Future[Any]:
        """Run both; return the future of ``forward`` when both are complete, or raise the error of the step.

        ``step`` gets a function to call after each chunk.
        """
        output: Future[Any] = Future()
        self._copies = copies
        self._last = {parameter: number for number, chunk in enumerate(chunks) for parameter in chunk}
        hooks: list[Any] = []
        for module, read in self._reads.items():
            runtime_state(module).arriving = partial(self._wait, self._last)
            hooks += [module.register_state_dict_pre_hook(lambda *_: self._wait(self._last))]  # type: ignore[no-untyped-call]
            hooks += [hook_forward(module, _EFFECT, before=lambda *_, read=read: self._wait(read), first=True)]
        try:
            with ThreadPoolExecutor(1, initializer=copies.enter_thread) as pool:
                self._result = pool.submit(torch.no_grad()(step), self._sent)
                self._result.add_done_callback(self._notify)
                output.set_result(forward())
        except BaseException as error:  # noqa: BLE001  # the step ends first
            output.set_exception(error)
        finally:
            for module in self._reads:
                runtime_state(module).arriving = None
            for hook in hooks:
                hook.remove()
        self._result.result()
        return output

    def _sent(self) -> None:
        """Note that a chunk's parameters are on their way to the device."""
        self._events.append(self._copies.record())
        self._notify()

    def _notify(self, _result: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, parameters: Iterable[Tensor]) -> None:
        """Let the host wait until parameters are on the device; raise the error of a failed step."""
        # FSDP2 gathers on other streams, which an event on the current stream would not reach.
        number = max((self._last.get(parameter, -1) for parameter in parameters), default=-1)
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > number or self._result.done())
        if self._result.done():
            self._result.result()
        if number >= 0:
            self._copies.synchronize(self._events[number])


def _gathered_ahead(block: nn.Module) -> Iterator[Tensor]:
    """Yield the shards of later blocks that FSDP2 gathers in a block's forward."""
    for module in block.modules():
        if isinstance(module, FSDPModule):
            yield from prefetched_shards(module)
