"""A step on the host: parameters on their way through chunks of pinned memory, and a forward beside the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import local_tensor, prefetched_shards
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.host_copies import HostCopies
from fsdp_runtime.model import inspect_model
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.wrap import hook_forward

#: Elements of a chunk: 64 MiB of float32.
CHUNK_ELEMENTS = 2**24
#: Offsets of pieces in a chunk, in bytes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter's shard, with the same rows of its gradient and its state."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    reads_parameter: bool  # the parameter is the master, or was written since the last step
    whole: Tensor  # the parameter of the rows


def pieces_of(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *, reads_parameter: bool
) -> Iterator[Piece]:
    """Yield a parameter's rows in pieces of at most a chunk, or of one row."""
    tensors = {name: local_tensor(value) for name, value in state.items()}
    local, grad = local_tensor(parameter).detach(), local_tensor(gradient)
    count = local.shape[0] if local.ndim else 1
    rows = max(1, CHUNK_ELEMENTS * count // max(1, local.numel()))
    for start in range(0, count, rows) if local.numel() else ():
        part = slice(start, start + rows) if local.ndim else ...
        # A fused step counts in place: each piece has its own count.
        cut = {name: value.clone() if name == "step" else value[part] for name, value in tensors.items()}
        yield Piece(local[part], grad[part], cut, reads_parameter, parameter)


def chunks_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield consecutive pieces of together at most a chunk."""
    chunk: list[Piece] = []
    for piece in pieces:
        if chunk and sum(each.parameter.numel() for each in (*chunk, piece)) > CHUNK_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(piece)
    if chunk:
        yield chunk


class Staging:
    """Host memory of one chunk: gradients and parameters arrive, and the new parameters leave."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[tuple[Tensor, Tensor]] = []
        self._arrived: Any = None

    def fetch(self, chunk: Sequence[Piece], copies: HostCopies) -> None:
        """Begin to copy a chunk's gradients and parameters to the host; earlier copies of this memory come first."""
        self._copies = copies
        tensors = [tensor for piece in chunk for tensor in (piece.gradient, piece.parameter)]
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if starts[-1] > self._memory.numel():
            self._copies.synchronize(self._copies.record())
            self._memory = self._copies.empty(starts[-1])
        views = [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=False)
        ]
        self._views = list(zip(views[::2], views[1::2], strict=True))
        for piece, (gradient, parameter) in zip(chunk, self._views, strict=True):
            self._copies.copy(gradient, piece.gradient)
            if piece.reads_parameter:
                self._copies.copy(parameter, piece.parameter)
        self._arrived = self._copies.record()

    def arrived(self) -> list[tuple[Tensor, Tensor]]:
        """Return the gradient and the parameter of each piece; the host waits for them."""
        self._copies.synchronize(self._arrived)
        return self._views

    def send(self, chunk: Sequence[Piece]) -> None:
        """Begin to copy the parameters to the device."""
        for piece, (_, parameter) in zip(chunk, self._views, strict=True):
            self._copies.copy(piece.parameter, parameter)


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
        # The parameters that a module's forward reads. FSDP2 gathers shards of later blocks in it. Submodules of a
        # block get no hooks, which a compiled block would trace.
        self._reads: dict[nn.Module, list[Tensor]] = {
            module: others for module in model.modules() if module not in inside
        }
        for block in blocks:
            units = [module for module in block.modules() if isinstance(module, FSDPModule)]
            self._reads[block] = [*block.parameters(), *chain.from_iterable(map(prefetched_shards, units))]
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
