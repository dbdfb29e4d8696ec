"""Predict the bytes that saves, loads, streams and syncs of weights move on each rank, and the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp_runtime.dry_run.parse_args import parse_bandwidths, parse_dtype, parse_mesh_spec
from fsdp_runtime.dry_run.report.format import format_bytes
from fsdp_runtime.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from fsdp_runtime.mesh.spec import MeshSpec
    from fsdp_runtime.weights.naming import Names
    from fsdp_runtime.weights.traffic import ByRank, RankTraffic
    from tp_plans.transfer import TransferPlan

_COLUMNS = ("read", "unneeded", "written", "sent", "received", "gathered", "held")  # bytes


@dataclass(frozen=True)
class WeightTraffic:
    """The bytes that one call moves.

    Args:
        action: ``"save"``, ``"load"``, ``"stream"`` or ``"sync"``.
        ranks: the bytes of each rank, by its global number; for a load of the first host; other hosts are like it.
        ranks_per_host: ranks that share a host, and its way to the file system.
    """

    action: str
    ranks: Mapping[int, RankTraffic]
    ranks_per_host: int

    def most(self, counted: str) -> int:
        """The largest count of any rank, by its name in ``RankTraffic``, such as ``"written"`` or ``"messages"``."""
        return max(int(getattr(each, counted)) for each in self.ranks.values())

    def seconds(self, *, disk: float | str, network: float | str) -> float:
        """Return how long the call takes, if files and network do not overlap and nothing else takes time.

        Args:
            disk: bytes per second between a host and the file system, such as ``"2GB/s"``.
            network: bytes per second that a rank sends, and receives at the same time.
        """
        rates = [parse_bandwidths(rate)[""] for rate in (disk, network)]
        hosts: dict[int, int] = {}
        for rank, each in self.ranks.items():
            host = rank // self.ranks_per_host
            hosts[host] = hosts.get(host, 0) + each.read + each.written
        way = max(max(each.sent, each.received + each.gathered) for each in self.ranks.values())
        return max(hosts.values()) / rates[0] + way / rates[1]

    def __str__(self) -> str:
        found = ", ".join(f"{name} {format_bytes(most)}" for name in _COLUMNS if (most := self.most(name)))
        messages = f", {self.most('messages')} messages" * bool(self.most("messages"))
        return f"{self.action}, bytes of the rank with the most of each: {found or 'none'}{messages}"


def describe_weights(
    model: nn.Module,
    *,
    ranks_per_host: int = 8,
    names: Names = "checkpoint",
    writers: Literal["all", "one"] = "all",
    readers: Literal["host", "job"] = "host",
    max_shard_bytes: int = 5 * 10**9,
    bucket_bytes: int | None = None,
    transfer: TransferPlan | None = None,
) -> list[WeightTraffic]:
    """Count what ``save_weights``, ``load_weights`` and ``stream_weights`` will move on every rank.

    The calls and these counts use the same plans, so the counts are exact; the memory held is a bound.  No
    communication, and nothing is read or written.

    Args:
        model: parallelized, also on the meta device.  The load reads the checkpoint that the save writes.
        ranks_per_host: how many ranks share a host, in order.
        names: as of the calls.
        writers: as of ``save_weights``.
        readers: as of ``load_weights``.
        max_shard_bytes: as of ``save_weights``.
        bucket_bytes: as of the calls.
        transfer: the plan of a sync, to count it too.

    Returns:
        One result per call; its ``str()`` is a line.

    Raises:
        OptionError: ``ranks_per_host`` is not positive.
        ConversionError: the model's tensors differ from its class's (``names="model"`` works), or are quantized.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.dry_run import describe_weights
        >>> for each in describe_weights(nn.Linear(2, 3)):
        ...     print(each.action, each.most("read"), each.most("written"), each.most("sent"))
        save 0 36 0
        load 36 0 0
        stream 0 0 0
    """
    from fsdp_runtime.sharded.file_systems import FilePlace
    from fsdp_runtime.weights import traffic
    from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES, WeightExport
    from fsdp_runtime.weights.write_plan import plan_files

    if ranks_per_host < 1:
        raise OptionError(f"ranks_per_host={ranks_per_host}: give a positive number")
    options = WeightExport(names=names, bucket_bytes=DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes)
    export, ranks = options.prepare(model), traffic.model_ranks(model)
    places = {rank: FilePlace(str(rank // ranks_per_host), "") for rank in ranks}
    files = plan_files(export, max_shard_bytes, places, shared=writers == "all")
    first = [rank for rank in ranks if places[rank] == places[ranks[0]]] if readers == "host" else ranks
    one_host = len({places[rank] for rank in first}) == 1
    found: dict[str, ByRank] = {
        "save": traffic.save_traffic(export, files, ranks, options.bucket_bytes),
        "load": traffic.load_traffic(
            model, traffic.saved_tensors(files), first, options.bucket_bytes, one_host=one_host
        ),
        "stream": traffic.stream_traffic(export, options, ranks),
    }
    if transfer is not None:
        found["sync"] = {}
        for rank in transfer.ranks:
            sent, received = transfer.bytes_sent(rank), transfer.bytes_received(rank)
            held = min(options.bucket_bytes, sent + received)
            found["sync"][rank] = traffic.RankTraffic(sent=sent, received=received, held=held)
    return [WeightTraffic(action, by_rank, ranks_per_host) for action, by_rank in found.items()]


def estimate_weights(
    model: str | Path | Any,
    mesh: MeshSpec | Mapping[str, int],
    *,
    dtype: str = "bf16",
    options: Mapping[str, Any] | None = None,
    **described: Any,
) -> list[WeightTraffic]:
    """Count as :func:`describe_weights` does, for a model and a mesh that do not exist yet.

    Args:
        model: a ``config.json`` or a directory with one, a Hugging Face config, or a function that builds a model.
        mesh: sizes of axes, such as ``{"dp_shard": 64, "tp": 8}``.
        dtype: of the parameters.
        options: the keywords of ``parallelize``.
        described: keywords of :func:`describe_weights`.

    Returns:
        As :func:`describe_weights`.

    Raises:
        EstimateError, MeshError, tp_plans.TpPlansError, ModelError, OptionError: as :func:`estimate`.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.dry_run import estimate_weights
        >>> build = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        >>> save, load, stream = estimate_weights(build, {"dp_shard": 4}, options={"plan": None})
        >>> save.most("written"), save.most("sent"), stream.most("gathered")
        (2224, 0, 6672)
    """
    from fsdp_runtime.apply import parallelize
    from fsdp_runtime.dry_run.build_model import build_model
    from fsdp_runtime.dry_run.trace.fake_world import fake_world

    built = build_model(model, parse_dtype(dtype))
    with fake_world(parse_mesh_spec(mesh), rank=0) as device_mesh:
        return describe_weights(parallelize(built, device_mesh, **(options or {})), **described)
