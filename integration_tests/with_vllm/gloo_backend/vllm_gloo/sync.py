"""The trainer's side of the gloo backend: an update that an engine takes in full or not at all."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sharded.safetensors_io import WeightInfo
from fsdp_runtime.sync.broadcast import flatten_bucket
from fsdp_runtime.sync.vllm_source import WeightSource
from vllm_gloo.background import LAST_WORD_S, Background, ignore_errors
from vllm_gloo.gloo_group import GlooGroup, open_group, open_store
from vllm_gloo.messages import GlooInit, GlooUpdate, buckets
from vllm_gloo.report import EngineSyncReport

_T = TypeVar("_T")


class EngineSync:
    """Send a sharded model's weights to a running vLLM, over gloo.

    For machines without NCCL: with it, use :class:`WeightSource` and vLLM's own trainer engines.  The engine needs
    ``fsdp-runtime`` in its environment and ``--weight-transfer-config '{"backend": "gloo"}'``.  The trainer needs no
    vLLM.  All ranks of the model create one and call :meth:`update`; rank 0 talks to the engine.  It is what
    ``WeightTransfer`` connects by, as it is: ``WeightTransfer(url, EngineSync)``.

    An update has three parts.  The engine tries the names, dtypes and shapes; then every worker receives all weights
    into host memory; then the engine is paused, loads them, drops its cache of keys and values, and continues.  If the
    first two fail, it has its old weights.  If the third fails, workers go back to the weights of the update before, of
    which each keeps a copy in host memory.

    Args:
        source: the model's weights.
        client: vLLM's server: an :class:`EngineClient`, or another with vLLM's four methods; not used but on rank 0.
        group: the model's ranks; ``None`` for the default group.
        address: this machine, as the engine's workers reach it.
        bucket_bytes: broadcast up to this many bytes at once.
        timeout_s: seconds after which an operation that a worker misses fails.
        world_size: the engine's workers; ``None`` to ask the client.
        pause: what the engine does with running requests while it loads: ``"wait"`` for them, ``"abort"`` or
            ``"keep"`` them; ``None`` to leave pausing to the caller.  An engine that is paused already stays so.

    Raises:
        OptionError: rank 0 has no client; a number is not positive.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.sync import WeightSource
        >>> from vllm_gloo import EngineClient, EngineSync
        >>> sync = EngineSync(WeightSource(nn.Linear(2, 3)), EngineClient("http://127.0.0.1:9", timeout_s=1))
        >>> sync.update("1")
        Traceback (most recent call last):
        ...
        fsdp_runtime.errors.WeightSyncError: ...
    """

    def __init__(
        self,
        source: WeightSource,
        client: Any,
        *,
        group: ProcessGroup | None = None,
        address: str = "127.0.0.1",
        bucket_bytes: int = 64 * 2**20,
        timeout_s: float = 60.0,
        world_size: int | None = None,
        pause: Literal["abort", "wait", "keep"] | None = "wait",
    ) -> None:
        if bucket_bytes < 1 or timeout_s <= 0 or (world_size is not None and world_size < 1):
            raise OptionError(
                f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, world_size={world_size}: give positive numbers"
            )
        self._distributed = source.is_collective and dist.is_initialized()
        self._is_sender = not self._distributed or dist.get_rank(group) == 0
        if self._is_sender and client is None:
            raise OptionError("client: give the engine's on rank 0 of the model")
        self._client: Any = client if self._is_sender else None
        self._source, self._group = source, group
        self._address, self._bucket_bytes, self._timeout_s = address, bucket_bytes, timeout_s
        self._workers, self._pause = world_size, pause
        self._link: GlooGroup | None = None
        self._version: str | None = None
        self._numbers = itertools.count()
        self._session = False

    def update(self, version: str | int) -> EngineSyncReport:
        """Let the engine take the model's present weights; collective over the model's ranks.

        Args:
            version: a name for these weights, which the engine reports from then on.

        Returns:
            The figures, equal on every rank.

        Raises:
            WeightSyncError: the engine did not take them.  Every rank raises the same message.  The next update forms a
                new group with the engine, and sends everything.
        """
        version = str(version)
        connect_s, check_s = self._agree(self._announce, version)
        start, failure = time.monotonic(), None
        pairs = iter(self._source.iter_full())
        if self._is_sender:
            failure = self._attempt(lambda: self._send(pairs), version)
        for _ in pairs:  # every rank gathers to the end, so that none waits for another
            pass
        send_s = time.monotonic() - start
        send_s, apply_s = self._agree(lambda: (send_s, self._commit(version)), version, failure)
        nbytes = sum(weight.nbytes for weight in self._source.weights)
        return EngineSyncReport(version, nbytes, connect_s, check_s, send_s, apply_s)

    def close(self) -> None:
        """Leave the group with the engine's workers."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _announce(self) -> tuple[float, float]:
        """Form a group if there is none or the engine is another; announce the weights.  Seconds of both."""
        start, client = time.monotonic(), self._client
        workers = self._workers or client.world_size()
        if self._link is not None and (self._link.world_size != workers + 1 or self._restarted()):
            self.close()
        known = self._link is not None
        if self._link is None:
            self._link = self._connect(workers)
        connected = time.monotonic()
        try:
            self._check(self._link)
        except Exception:  # of any client; the workers may have left an earlier group, as for another trainer
            if not known:
                raise
            self.close()
            self._link = self._connect(workers)
            connected = time.monotonic()
            self._check(self._link)
        return connected - start, time.monotonic() - connected

    def _check(self, link: GlooGroup) -> None:
        """Begin an update, and let every worker try names, dtypes and shapes."""
        if self._session:
            self._finish()
        # A session that another trainer left open makes every worker fail; each later call takes one of their answers.
        for attempts in range(link.world_size, 0, -1):
            try:
                self._client.start_weight_update()
                break
            except Exception:  # of any client
                if attempts == 1:
                    raise
                self._finish()
        self._session = True
        self._ask(link, GlooUpdate.check(self._source.weights, self._bucket_bytes))

    def _finish(self) -> None:
        """Close the session without a version, which would name new weights; the workers write nothing then."""
        ignore_errors(self._client.finish_weight_update)
        self._session = False

    def _restarted(self) -> bool:
        """Whether the engine names another version than the last that it was given."""
        known = getattr(self._client, "weight_version", None)
        return known is not None and self._version is not None and known() != self._version

    def _connect(self, workers: int) -> GlooGroup:
        store = open_store(self._address, workers + 1, self._timeout_s)
        name = f"{time.time_ns()}"
        info = GlooInit(self._address, store.port, workers + 1, timeout_s=self._timeout_s, group=name)
        with Background(lambda: self._client.init_weight_transfer_engine(asdict(info))) as answer:
            link = open_group(store, workers + 1, self._timeout_s, name, answer.done)
            answer.result()
        if link is None:
            raise WeightSyncError(f"the engine answered before its {workers} workers joined: has it so many?")
        return link

    def _send(self, pairs: Any) -> None:
        link = self._link
        if link is None:
            raise WeightSyncError("no group with the engine")

        def send() -> None:
            try:
                for bucket in buckets(self._source.weights, self._bucket_bytes):
                    link.broadcast(flatten_bucket(_take(pairs, bucket)).cpu())
            except BaseException:
                self.close()  # so that the workers, too, end at once
                raise

        try:
            self._ask(link, GlooUpdate("receive"), send, limit_s=self._timeout_s)
        except BaseException:  # a group in which an operation failed is of no use any more
            self.close()
            raise

    def _ask(
        self, link: GlooGroup, part: GlooUpdate, meanwhile: Callable[[], None] = lambda: None, limit_s: float = math.inf
    ) -> None:
        """Let every worker do a part of an update, and raise what they report."""
        part = replace(part, group=link.name, number=next(self._numbers))
        with Background(lambda: self._client.update_weights(asdict(part))) as answer:
            meanwhile()
            reports = link.reports(part.number)
            end = time.monotonic() + limit_s
            while None in reports.values() and time.monotonic() < end:
                if answer.done():  # the server has its workers' answers, and reports are sent before them
                    answer.result()
                    end = min(end, time.monotonic() + LAST_WORD_S)
                time.sleep(0.005)
                reports = link.reports(part.number)
        silent = [rank - 1 for rank, report in reports.items() if report is None]
        problems = sorted({report for report in reports.values() if report})
        if silent:
            problems.append(f"workers {silent} of the engine reported nothing")
        if problems:
            raise WeightSyncError("; ".join(problems))

    def _commit(self, version: str) -> float:
        """Let the workers load what they received, and read the version back.  Seconds of it."""
        start, client, link = time.monotonic(), self._client, self._link
        if link is None:
            raise WeightSyncError("no group with the engine")
        pauses = self._pause is not None and hasattr(client, "pause") and not _is_paused(client)
        try:
            if pauses:
                client.pause(self._pause)
            try:
                self._ask(link, GlooUpdate("apply"))
            except Exception:
                ignore_errors(lambda: self._ask(link, GlooUpdate("undo")))
                raise
            client.finish_weight_update(version)
            self._session = False
        finally:
            if pauses:
                ignore_errors(client.resume)
        read = client.weight_version() if hasattr(client, "weight_version") else version
        if read != version:
            raise WeightSyncError(f"the engine names version {read!r} after it took {version!r}")
        self._version = version
        return time.monotonic() - start

    def _attempt(self, part: Callable[[], Any], version: str) -> str | None:
        """Run a part of an update; the message of its error."""
        try:
            part()
        except Exception as error:
            return self._message(error, version)
        return None

    def _agree(self, part: Callable[[], _T], version: str, failure: str | None = None) -> _T:
        """Run a part on rank 0, and hand its result or its error to every rank."""
        outcome: list[Any] = [None, failure]
        if self._is_sender and failure is None:
            try:
                outcome[0] = part()
            except Exception as error:
                outcome[1] = self._message(error, version)
        if self._distributed:
            dist.broadcast_object_list(outcome, group=self._group, group_src=0)
        if outcome[1] is not None:
            raise WeightSyncError(outcome[1])
        return outcome[0]

    def _message(self, error: Exception, version: str) -> str:
        """Say what happened and which version the engine has, and close the session that the update began."""
        if not isinstance(error, WeightSyncError):  # the group's, which no operation can use any more
            self.close()
        text = str(error) or f"no answer within {self._timeout_s:g} s"
        try:
            held = f"it has version {self._client.weight_version(timeout_s=LAST_WORD_S)!r}"
        except Exception:
            return f"the engine did not take version {version!r} (it does not answer): {text}"
        if self._session:
            self._finish()
        return f"the engine did not take version {version!r} ({held}): {text}"


def _is_paused(client: Any) -> bool:
    """Whether the caller has paused the engine, which is then the caller's to resume."""
    return hasattr(client, "is_paused") and bool(client.is_paused())


def _take(pairs: Any, bucket: Sequence[WeightInfo]) -> list[tuple[str, torch.Tensor]]:
    """The next tensors of the stream, which must be those that were announced."""
    taken = []
    for weight in bucket:
        name, tensor = next(pairs)
        if (name, tensor.dtype, tuple(tensor.shape)) != (weight.name, weight.dtype, weight.shape):
            raise WeightSyncError(
                f"{name} of shape {tuple(tensor.shape)}, {tensor.dtype}, came where {weight} was announced: "
                "create a new source after the model's tensors were replaced"
            )
        taken.append((name, tensor))
    return taken
