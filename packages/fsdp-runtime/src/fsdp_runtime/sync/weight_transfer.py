"""Updates of a vLLM server in separate steps, as in TRL's ``WeightTransferProtocol``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sharded import WeightInfo, own_rank
from fsdp_runtime.sync.engine_client import EngineClient
from fsdp_runtime.sync.vllm_source import WeightSource
from fsdp_runtime.weights import WeightExport

#: Longest wait for the other ranks' results of an update, beyond the update's timeout.
GRACE_S = 10.0


class WeightTransfer:
    """Updates of a vLLM server, for ``AsyncGRPOTrainer(weight_transfer=...)`` of TRL.

    It has the five methods of TRL's protocol.  Pass an object on every rank to ``on_mesh(AsyncGRPOTrainer)``: all ranks
    then send each update (:meth:`send`), and an error is raised on all ranks.  TRL's own trainer calls
    :meth:`send_weights` on rank 0; it first copies all weights to host memory, so that no gather waits for a transfer.

    An update is over when the server reports the update's version.  Every wait is bounded by ``timeout_s``.  A server
    stays paused until it is known to have all weights of one version: it never generates from mixed weights.

    Args:
        server: the URL of a server started with ``VLLM_SERVER_DEV_MODE=1``, or a client with the methods of
            :class:`~fsdp_runtime.sync.engine_client.EngineClient`.
        connect: called with a source and the client, on every rank that sends, before the first update and after a
            failed update.  Returns a vLLM trainer engine (``send_weights()``, ``shutdown()``) or an object such as
            ``WeightSync``: its ``update(version)`` returns when the engine's ranks have the version, and the server
            is then told the version.  ``close()`` is optional.
        timeout_s: seconds after which a call to the server, and an update, fail.
        pause: vLLM's mode for running requests during an update.
        export: options of the export.

    Raises:
        OptionError: the URL is invalid, or the time is not positive.
        WeightSyncError: in every method: the server does not answer in time, is not paused or resumed after the call,
            or does not have the sent weights.

    Example:
        >>> from fsdp_runtime.sync import WeightTransfer
        >>> transfer = WeightTransfer("http://127.0.0.1:9", lambda source, client: None, timeout_s=0.1)
        >>> transfer.pause()
        Traceback (most recent call last):
        ...
        fsdp_runtime.errors.WeightSyncError: ...
    """

    def __init__(
        self,
        server: Any,
        connect: Callable[[Any, Any], Any],
        *,
        timeout_s: float = 300.0,
        pause: Literal["abort", "wait", "keep"] = "keep",
        export: WeightExport = WeightExport(),
    ) -> None:
        if timeout_s <= 0:
            raise OptionError(f"timeout_s={timeout_s}: give a positive number of seconds")
        self.client = EngineClient(server, timeout_s=timeout_s) if isinstance(server, str) else server
        self._connect, self._timeout_s, self._mode, self._export = connect, timeout_s, pause, export
        self._engine: Any = None
        self._source: Any = None
        self._group: ProcessGroup | None = None
        self._version: str | None = None
        self._thread: threading.Thread | None = None

    def init_weight_transfer(self) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                self.client.weight_version(timeout_s=max(0.1, end - time.monotonic()))
                return
            except WeightSyncError as error:
                if time.monotonic() >= end:
                    raise WeightSyncError(
                        f"the server did not say its weights' version within {self._timeout_s:g} s: start it with "
                        f"VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config ({error})"
                    ) from error
                time.sleep(min(0.5, self._timeout_s / 20))

    def pause(self) -> None:
        """Pause the server."""
        self.client.pause(self._mode)
        if not self.client.is_paused():
            raise WeightSyncError("the server accepted a pause and is not paused: no weights were sent")

    def resume(self) -> None:
        """Resume the server; it has to have the last sent weights."""
        self._require_version()
        self.client.resume()
        if self.client.is_paused():
            raise WeightSyncError(
                f"the server has version {self._version!r} and is still paused after a resume: another client paused "
                "it, or its engine has exited; requests would hang"
            )

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Send pairs of names and tensors, after a copy to host memory; for a trainer that calls only rank 0."""
        pairs = [(name, tensor.detach().cpu(), tensor.device) for name, tensor in iterator]
        if isinstance(self._source, _HostWeights):
            self._source.pairs = pairs
        else:
            self._engine, self._source = None, _HostWeights(pairs)
        if self._restarted():
            self._engine = None
        self._send(None, sender=True)

    def send(self, model: nn.Module, version: int | None = None) -> None:
        """Send a sharded model's weights; collective over the world: rank 0 talks to the server, and all ranks raise.

        Args:
            model: the model, the same in every call.
            version: version of the weights, larger than the last; by default the next number.
        """
        if self._group is None and dist.is_initialized():
            limit = timedelta(seconds=2 * self._timeout_s + GRACE_S)
            self._group = dist.new_group(backend="gloo", timeout=limit)
        sender = own_rank() == 0
        if on_every_rank(lambda: sender and self._restarted(), self._group)[0]:
            self._engine = None
        if self._source is None:
            self._source = _Source(model, export=self._export)
        on_every_rank(lambda: self._send(version, sender=sender), self._group)

    def destroy(self) -> None:
        """Leave the group with the server's workers."""
        engine, self._engine = self._engine, None
        close = getattr(engine, "close", None) or getattr(engine, "shutdown", None)
        if close is not None:
            self._bounded(close, "leave the group with the server's workers")

    def _send(self, number: int | None, *, sender: bool) -> None:
        last = -1 if self._version is None else int(self._version)
        version = str(last + 1 if number is None else number)
        try:
            self._bounded(lambda: self._transfer(version), f"update to version {version}")
            self._version = version
            if sender and hasattr(self._engine, "update") and self.client.weight_version() != version:
                self.client.name_version(version)  # a transfer of shards bypasses the server
            if sender:
                self._require_version()
        except BaseException:
            self._engine = None
            raise

    def _transfer(self, version: str) -> None:
        self.client.version, self._source.under_way = version, None
        try:
            if self._engine is None:
                self._engine = self._connect(self._source, self.client)
            if hasattr(self._engine, "update"):
                self._engine.update(int(version))
            else:
                self._engine.send_weights()
        except Exception:
            if not hasattr(self._engine, "update"):  # ``update`` ends on all ranks; vLLM's engines iterate per rank
                self._source.drain()
            raise

    def _restarted(self) -> bool:
        return self._version is not None and self.client.weight_version() != self._version

    def _require_version(self) -> None:
        """Raise unless the server reports the last sent version."""
        if self._version is not None and (named := self.client.weight_version()) != self._version:
            raise WeightSyncError(
                f"the server names version {named!r} where {self._version!r} was sent: it restarted, or another "
                "trainer updates it. It stays paused, so it generates nothing from other weights"
            )

    def _bounded(self, part: Callable[[], Any], what: str) -> None:
        """Run one step of an update in a thread, and wait at most ``timeout_s``."""
        # A collective with a lost peer cannot be interrupted: the waiting thread remains.
        if self._thread is not None and self._thread.is_alive():
            raise WeightSyncError("an earlier update still waits for the server or another rank: restart the trainer")
        outcome: list[BaseException] = []
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def run() -> None:
            try:
                if device is not None:  # the current device is per thread
                    torch.accelerator.set_device_index(device)
                part()
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                outcome.append(error)

        self._thread = threading.Thread(target=run, name=what, daemon=True)
        self._thread.start()
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise WeightSyncError(
                f"the {what} did not end within {self._timeout_s:g} s: the server, a worker of it or another rank of "
                "the trainer does not answer. The server was left paused; restart both, the trainer from its checkpoint"
            )
        if outcome:
            error = outcome[0]
            if isinstance(error, WeightSyncError):
                raise error
            raise WeightSyncError(f"the {what} failed: {type(error).__name__}: {error}") from error


def on_every_rank(part: Callable[[], Any], group: ProcessGroup | None) -> list[Any]:
    """Run a step without collectives on every rank of a group; return all results, or raise on all ranks."""
    outcome, error = None, None
    try:
        outcome = part()
    except Exception as raised:  # noqa: BLE001 - raised below
        error = raised
    said: list[Any] = [(None if error is None else str(error) or type(error).__name__, outcome)]
    if dist.is_initialized():
        said = said * dist.get_world_size(group)
        try:
            dist.all_gather_object(said, said[0], group=group)
        except RuntimeError as lost:
            if error is None:
                raise WeightSyncError("a trainer rank exited during the weight update") from lost
    problems = dict.fromkeys(text for text, _ in said if text is not None)
    if error is not None and not isinstance(error, WeightSyncError):
        raise error
    if problems:
        raise WeightSyncError("; ".join(problems)) from error
    return [value for _, value in said]


class _Source(WeightSource):
    """A source that every rank exhausts once per update, also after a failure: no rank is left in a gather."""

    under_way: Iterator[tuple[str, Tensor]] | None = None

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        self.under_way = super().iter_full()
        return self.under_way

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        self.under_way = super().iter_local()
        return self.under_way

    def drain(self) -> None:
        """Exhaust the weights that a failed update did not read."""
        for _ in self.under_way or self.iter_full():
            pass


class _HostWeights(_Source):
    """Weights in host memory for vLLM's trainer engines, yielded on their original devices."""

    is_collective = False

    def __init__(self, pairs: list[tuple[str, Tensor, torch.device]]) -> None:
        self.pairs, self._shards = pairs, None

    @property
    def weights(self) -> list[WeightInfo]:
        return [WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor, _ in self.pairs]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        self.under_way = ((name, tensor.to(device)) for name, tensor, device in self.pairs)
        return self.under_way
