"""Client of the weight routes of vLLM's HTTP server in development mode, with bounded waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fsdp_runtime.errors import OptionError, WeightSyncError

#: Maximum length of a server's answer in an error, in characters.
_LONGEST_ANSWER = 600


class EngineClient:
    """Client of a vLLM server started with ``VLLM_SERVER_DEV_MODE=1``, which adds the routes for weights.

    The client has the methods of vLLM's ``VLLMWeightSyncClient``, so that vLLM's own trainer engines accept it.  They
    give no version: ``version`` names the next update.
    """

    def __init__(self, url: str, *, timeout_s: float = 300.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"url={url!r}: write the server's address, such as http://127.0.0.1:8000")
        if timeout_s <= 0:
            raise OptionError(f"timeout_s={timeout_s}: give a positive number of seconds")
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self.version: str | None = None

    def request(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None, is_json: bool = True
    ) -> Any:
        """POST a JSON body to a route, or GET the route without a body; return the answer as JSON or bytes."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=timeout_s or self._timeout_s) as answer:
                content = answer.read()
                return json.loads(content or b"null") if is_json else content
        except HTTPError as error:
            text = error.read().decode(errors="replace")[:_LONGEST_ANSWER]
            raise WeightSyncError(f"{self.url}{path} answered {error.code}: {_reason(text)}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise WeightSyncError(f"{self.url}{path} gave no answer: {str(error) or type(error).__name__}") from error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make every worker join the trainer's group."""
        self.request("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self.request("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive a part of an update; return when every worker has the part."""
        self.request("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name the engine's new version."""
        name = self.version if weight_version is None else weight_version
        self.request("/finish_weight_update", {} if name is None else {"weight_version": name})

    def shutdown_weight_transfer_engine(self) -> None:
        """Make every worker leave the trainer's group."""
        self.request("/shutdown_weight_transfer_engine", {})

    def weight_version(self, *, timeout_s: float | None = None) -> str:
        """Return the engine's version of the weights."""
        return str(self.request("/weight_info", timeout_s=timeout_s)["weight_version"])

    def name_version(self, version: str) -> None:
        """Name the engine's version after a transfer of shards, which bypasses the server."""
        self.request("/update_weight_version", {"new_version": version})

    def load_adapter(self, name: str, path: str, *, stacked: bool = False) -> None:
        """Load an adapter from a directory on the server's file system; requests select it with ``model=name``.

        ``stacked``: the adapter adapts stacked experts; the server needs ``--enable-mixed-moe-lora-format`` for them.
        """
        body = {"lora_name": name, "lora_path": path, **({"is_3d_lora_weight": True} if stacked else {})}
        self.request("/v1/load_lora_adapter", body, is_json=False)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        self.request("/v1/unload_lora_adapter", {"lora_name": name}, is_json=False)

    def world_size(self) -> int:
        """Return the number of the engine's workers, over all of its parallel axes."""
        return int(self.request("/get_world_size")["world_size"])

    def pause(self, mode: Literal["abort", "wait", "keep"] = "wait") -> None:
        """Stop scheduling, and clear the caches of keys and values; ``mode`` is vLLM's mode for running requests."""
        self.request(f"/pause?mode={mode}", {})

    def resume(self) -> None:
        """Resume scheduling."""
        self.request("/resume", {})

    def is_paused(self) -> bool:
        """Return whether the server schedules no requests."""
        return bool(self.request("/is_paused")["is_paused"])


def _reason(text: str) -> str:
    """The message in a server's answer, without its JSON."""
    try:
        answer = json.loads(text)
        return str(answer["error"]["message"] if isinstance(answer["error"], dict) else answer["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "no reason"
