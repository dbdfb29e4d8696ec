"""A stand-in for vLLM's HTTP server in this process, with faults, and a transport of weights to it."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EngineServer:
    """The routes of vLLM's development mode for weights; a context manager.

    Args:
        faults: by route, what it does instead: ``"dies"``, ``"silent"`` (accepts and never answers), ``"500"``, or
            ``"ignored"`` (answers, and does nothing).
    """

    def __init__(self, **faults: str) -> None:
        self.faults = faults
        self.version, self.paused = "default", False
        self.weights: dict[str, Tensor] = {}
        self.staged: dict[str, Tensor] = {}
        self.updates: list[dict[str, Tensor]] = []
        self.calls: list[str] = []
        self._end = threading.Event()
        handler = type("Handler", (_Handler,), {"engine": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do what a route is for."""
        name = route.strip("/").partition("?")[0]
        self.calls.append(name)
        fault = self.faults.get(name)
        if fault == "silent":
            self._end.wait(60)
        if fault == "500":
            raise RuntimeError(f"{name} failed in the engine")
        if fault == "dies":
            self.close()
            raise ConnectionError
        if fault != "ignored" and hasattr(self, f"_{name}"):
            getattr(self, f"_{name}")(body)
        return {"weight_version": self.version, "is_paused": self.paused, "world_size": 1}

    def _pause(self, body: dict[str, Any]) -> None:
        self.paused = True

    def _resume(self, body: dict[str, Any]) -> None:
        self.paused = False

    def _start_weight_update(self, body: dict[str, Any]) -> None:
        self.staged = {}

    def _finish_weight_update(self, body: dict[str, Any]) -> None:
        self.weights.update(self.staged)
        self.updates.append(dict(self.weights))
        self.version = body.get("weight_version", self.version)

    def _update_weight_version(self, body: dict[str, Any]) -> None:
        self.version = body["new_version"]

    def close(self) -> None:
        """End the server: connections are refused from now on."""
        self._end.set()
        threading.Thread(target=self._server.shutdown, daemon=True).start()
        self._server.socket.close()

    def __enter__(self) -> EngineServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    engine: EngineServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, said = 200, self.engine.answer(self.path, json.loads(body or b"{}"))
        except ConnectionError:
            return
        except RuntimeError as error:
            status, said = 500, {"error": str(error)}
        text = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST  # noqa: N815 - the base class names it

    def log_message(self, *args: Any) -> None:
        pass


class Transport:
    """What vLLM's trainer engines do, with the weights handed over in memory.

    Args:
        source: the weights.
        client: of the server.
        engine: the server, on rank 0.
        fault: ``"hangs"`` for seconds after the first weights, as a broadcast that no worker joins; ``"raises"`` there.
    """

    def __init__(self, source: Any, client: Any, engine: EngineServer | None, fault: str = "") -> None:
        self.source, self.client, self.engine, self.fault = source, client, engine, fault
        self.closed = False
        if engine is not None:
            client.init_weight_transfer_engine({"world_size": 2})

    def send_weights(self) -> None:
        if self.engine is not None:
            self.client.start_weight_update()
            self.client.update_weights({"names": [weight.name for weight in self.source.weights]})
        for index, (name, tensor) in enumerate(self.source.iter_full()):
            if self.engine is None:
                continue
            if index == 2 and self.fault == "hangs":
                time.sleep(5)
            if index == 2 and self.fault == "raises":
                raise RuntimeError("the worker's connection was closed")
            self.engine.staged[name] = tensor.detach().clone()
        if self.engine is not None:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.closed = True


def first() -> bool:
    """Whether this is the world's first rank, or there is no world."""
    return not dist.is_initialized() or dist.get_rank() == 0


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal, bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
