"""Updates of a server that dies, hangs, is paused or has other weights: every rank has an error in bounded time."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fsdp_runtime import parallelize, stream_weights
from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sync import WeightTransfer
from harness.engine_server import EngineServer, Transport, first, same
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

#: The limit of each call and update; what a rank takes beyond two of them is a hang.
LIMIT_S = 3.0


def _server(**faults: str) -> Any:
    return EngineServer(**faults) if first() else nullcontext()


def _sharded() -> Any:
    torch.manual_seed(0)
    return parallelize(tiny_model("Qwen3ForCausalLM", dtype=torch.float32, layers=1), mesh_for({"dp_shard": 2}))


def _transfer(server: Any, fault: str = "") -> WeightTransfer:
    def connect(source: Any, client: Any) -> Transport:
        return Transport(source, client, server, fault)

    return WeightTransfer("http://127.0.0.1:9" if server is None else server.url, connect, timeout_s=LIMIT_S)


def _updates() -> dict[str, Any]:
    """Two updates with a step between, as a trainer asks for them."""
    model = _sharded()
    with _server() as server:
        transfer, sent = _transfer(server), []
        if first():
            transfer.init_weight_transfer()
        for version in (1, 2):
            if first():
                transfer.pause()
            transfer.send(model, version)
            sent.append({name: tensor.clone() for name, tensor in stream_weights(model)})
            if first():
                transfer.resume()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        engine = transfer._engine
        transfer.destroy()
        if server is None:
            return {"closed": engine.closed}
        equal = [same(got, expected) for got, expected in zip(server.updates, sent, strict=True)]
        return {"equal": equal, "version": server.version, "calls": server.calls, "closed": engine.closed}


def test_every_rank_sends_and_the_server_names_the_version(two_ranks: RankPool) -> None:
    found, other = two_ranks.run(_updates)
    assert found["equal"] == [True, True]
    assert found["version"] == "2"
    assert found["calls"].count("init_weight_transfer_engine") == 1
    assert found["calls"].index("pause") < found["calls"].index("start_weight_update") < found["calls"].index("resume")
    assert found["closed"]
    assert other["closed"]


#: By fault: of the server's routes, of the transport, and words of the error.
FAULTS: dict[str, tuple[dict[str, str], str, str]] = {
    "the engine dies in an update": ({"update_weights": "dies"}, "", "gave no answer"),
    "the server accepts an update and never answers": (
        {"update_weights": "silent"},
        "",
        "did not end within|timed out",
    ),
    "a broadcast that no worker joins": ({}, "hangs", "did not end within"),
    "a part of the weights arrives": ({}, "raises", "connection was closed"),
    "the engine refuses the weights": ({"update_weights": "500"}, "", "update_weights failed in the engine"),
    "the engine keeps its old version": ({"finish_weight_update": "ignored"}, "", "names version 'default'.*'1'"),
    "the server dies before an update": ({"init_weight_transfer_engine": "dies"}, "", "gave no answer"),
}


def _broken(faults: dict[str, str], fault: str) -> tuple[str, float, bool]:
    model = _sharded()
    with _server(**faults) as server:
        transfer = _transfer(server, fault)
        if first():
            transfer.pause()
        start = time.monotonic()
        try:
            transfer.send(model, 1)
            said = "accepted"
        except WeightSyncError as error:
            said = str(error)
        seconds, paused = time.monotonic() - start, server is None or server.paused
        transfer._thread.join(30)  # type: ignore[union-attr]  # what it waits in would meet the next test's collectives
        return said, seconds, paused


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_on_every_rank_in_bounded_time(two_ranks: RankPool, fault: str) -> None:
    routes, transport, words = FAULTS[fault]
    for said, seconds, paused in two_ranks.run(_broken, routes, transport):
        assert said != "accepted"
        assert re.search(words, said), said
        assert seconds < 3 * LIMIT_S
        assert paused  # nothing is generated from weights of two versions


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    with EngineServer(weight_info="silent", pause="silent") as server:
        transfer = WeightTransfer(server.url, Transport, timeout_s=0.5)
        for call, words in ((transfer.init_weight_transfer, "VLLM_SERVER_DEV_MODE=1"), (transfer.pause, "/pause")):
            start = time.monotonic()
            with pytest.raises(WeightSyncError, match=words):
                call()
            assert time.monotonic() - start < 5


@pytest.mark.parametrize("fault", ["pause", "resume"])
def test_a_server_that_does_not_pause_or_stays_paused_is_refused(fault: str) -> None:
    with EngineServer(**{fault: "ignored"}) as server:
        transfer = WeightTransfer(server.url, Transport, timeout_s=5)
        with pytest.raises(WeightSyncError, match="is not paused" if fault == "pause" else "still paused"):  # noqa: PT012
            transfer.pause()
            transfer.resume()


def _alone(server: EngineServer) -> WeightTransfer:
    return WeightTransfer(server.url, lambda source, client: Transport(source, client, server), timeout_s=5)


def _send(transfer: WeightTransfer, value: float) -> None:
    transfer.pause()
    transfer.send_weights(iter([("a", torch.full((2,), value)), ("b", torch.ones(3, dtype=torch.bfloat16))]))
    transfer.resume()


def test_a_trainer_that_calls_one_rank_alone_sends_what_it_iterates_over() -> None:
    with EngineServer() as server:
        transfer = _alone(server)
        for value in (1.0, 2.0):
            _send(transfer, value)
        assert server.version == "1"
        assert [update["a"].tolist() for update in server.updates] == [[1.0, 1.0], [2.0, 2.0]]
        assert server.weights["b"].dtype == torch.bfloat16
        assert server.calls.count("init_weight_transfer_engine") == 1
        server.version = "default"  # it restarted: its workers have to join anew
        _send(transfer, 3.0)
        assert server.calls.count("init_weight_transfer_engine") == 2
        assert server.version == "2"


class _Shards:
    """As ``WeightSync``: numbers of versions, and nothing through the server."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def update(self, version: int) -> None:
        self.versions.append(version)


def test_a_server_is_told_the_version_of_shards_that_its_workers_took() -> None:
    shards = _Shards()
    with EngineServer() as server:
        transfer = WeightTransfer(server.url, lambda source, client: shards, timeout_s=5)
        for version in (3, 4):
            transfer.pause()
            transfer.send(torch.nn.Linear(2, 2), version)
            transfer.resume()
        assert (server.version, shards.versions) == ("4", [3, 4])


def test_a_server_that_another_trainer_updated_is_left_paused() -> None:
    with EngineServer() as server:
        transfer = _alone(server)
        transfer.pause()
        transfer.send_weights(iter([("a", torch.ones(2))]))
        server.version = "of another"
        with pytest.raises(WeightSyncError, match="names version 'of another' where '0' was sent"):
            transfer.resume()
        assert server.paused


def test_a_time_that_is_not_positive_is_refused() -> None:
    with pytest.raises(OptionError, match="timeout_s=0"):
        WeightTransfer("http://127.0.0.1:9", Transport, timeout_s=0)
