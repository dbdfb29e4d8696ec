"""Streaming: full weights with their checkpoint names on every rank, a bounded number of bytes at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_runtime import FSDP2, OptionError, parallelize, unsharded
from fsdp_runtime.sharded import gather
from fsdp_runtime.sync import WeightExport
from fsdp_runtime.weights import save_weights, stream_weights
from fsdp_runtime.weights.files import split_by_bytes
from fsdp_runtime.weights.stream import ExportedModel
from harness.memory import LiveBytes
from harness.models import ARCHITECTURES, tiny_inputs, tiny_model
from harness.pairwise import pairwise_first
from harness.parity import mesh_for
from harness.ranks import RankPool

TWO = ({"tp": 2}, {"dp_shard": 2})
FOUR = ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})


def _parallel(architecture: str, axes: dict[str, int], *, tied: bool = False, **options: Any) -> nn.Module:
    return parallelize(tiny_model(architecture, dtype=torch.float32, tied=tied), mesh_for(axes), **options)


def _saved(path: Path, architecture: str, *, tied: bool) -> dict[str, Tensor]:
    tiny_model(architecture, dtype=torch.float32, tied=tied).save_pretrained(path)
    return load_file(path / "model.safetensors")


def _streamed(
    architecture: str, axes: dict[str, int], path: Path, *, tied: bool, gathered: bool, bucket_bytes: int
) -> list[str]:
    """Return the names that are not streamed as the checkpoint has them."""
    expected = load_file(path / "model.safetensors")
    model = _parallel(architecture, axes, tied=tied)
    with unsharded(model) if gathered else nullcontext():
        return _differences(stream_weights(model, bucket_bytes=bucket_bytes), expected)


def _differences(stream: Iterator[tuple[str, Tensor]], expected: dict[str, Tensor]) -> list[str]:
    left, wrong = dict(expected), []
    for name, tensor in stream:
        if name not in left or type(tensor) is not Tensor or not torch.equal(tensor, left.pop(name)):
            wrong.append(name)
    return wrong + list(left)


@pytest.mark.parametrize(
    ("architecture", "axes", "tied", "gathered", "bucket_bytes"),
    pairwise_first(ARCHITECTURES, [*TWO, *FOUR], [True, False], [False, True], [1, 40_000, 10**9], limit=5),
    ids=str,
)
def test_the_stream_equals_save_pretrained(
    two_ranks: RankPool,
    four_ranks: RankPool,
    tmp_path: Path,
    architecture: str,
    axes: dict[str, int],
    tied: bool,
    gathered: bool,
    bucket_bytes: int,
) -> None:
    _saved(tmp_path, architecture, tied=tied)
    pool = two_ranks if axes in TWO else four_ranks
    options = {"tied": tied, "gathered": gathered, "bucket_bytes": bucket_bytes}
    for wrong in pool.run(_streamed, architecture, axes, tmp_path, **options):
        assert wrong == []


def test_a_plain_model_streams_its_own_storage_without_distributed() -> None:
    model = tiny_model("LlamaForCausalLM", tied=True)
    stream = dict(stream_weights(model))
    parameters = dict(model.named_parameters())
    assert list(stream) == list(parameters)
    assert all(tensor.data_ptr() == parameters[name].data_ptr() for name, tensor in stream.items())
    assert not any(tensor.requires_grad for tensor in stream.values())


def test_the_models_own_names_can_be_requested() -> None:
    model = tiny_model("Gemma3ForConditionalGeneration", tied=True)
    own = {name for name, _ in stream_weights(model, names="model")}
    assert own == {name for name, _ in model.named_parameters()}
    assert own != {name for name, _ in stream_weights(model)}
    with pytest.raises(OptionError, match="'checkpoint' or 'model'"):
        next(stream_weights(model, names="hub"))  # type: ignore[arg-type]


def test_persistent_buffers_are_streamed_in_their_dtype() -> None:
    model = nn.BatchNorm1d(3)
    stream = dict(stream_weights(model, dtype=torch.bfloat16))
    assert list(stream) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert stream["running_mean"].dtype == torch.bfloat16
    assert stream["num_batches_tracked"].dtype == torch.int64


def _masters_while_gathered() -> bool:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = _parallel("LlamaForCausalLM", {"dp_shard": 2}, fsdp=FSDP2(mp_policy=precision))
    expected = dict(tiny_model("LlamaForCausalLM", dtype=torch.float32).named_parameters())
    with unsharded(model):
        model(**tiny_inputs(model, batch=2, length=5))
        return all(torch.equal(tensor, expected[name]) for name, tensor in stream_weights(model))


def test_master_weights_are_streamed_while_low_precision_copies_are_gathered(two_ranks: RankPool) -> None:
    assert two_ranks.run(_masters_while_gathered) == [True, True]


def _rounded(axes: dict[str, int]) -> bool:
    model = _parallel("LlamaForCausalLM", axes)
    expected = dict(tiny_model("LlamaForCausalLM", dtype=torch.float32).named_parameters())
    stream = stream_weights(model, dtype=torch.bfloat16)
    return all(torch.equal(tensor, expected[name].to(torch.bfloat16)) for name, tensor in stream)


def test_a_requested_dtype_equals_rounding_the_full_tensor(four_ranks: RankPool) -> None:
    assert all(four_ranks.run(_rounded, {"dp_shard": 2, "tp": 2}))


def test_a_dtype_that_is_no_torch_dtype_is_refused(tmp_path: Path) -> None:
    for wrong in ("bfloat16", 16, torch.int32):
        with pytest.raises(OptionError, match=r"floating-point dtype, such as torch\.bfloat16"):
            list(stream_weights(nn.Linear(2, 2), dtype=wrong))  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="floating-point dtype"):
            save_weights(nn.Linear(2, 2), tmp_path / "new", dtype=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


# Memory and traffic.


def _peaks_of_streams(axes: dict[str, int], buckets: Sequence[int]) -> tuple[list[tuple[int, int]], int, int]:
    """Peak live bytes of a stream and what is left after it, for each bucket size; the model's bytes and its largest
    tensor's."""
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32, num_hidden_layers=8)
    parallelize(model, mesh_for(axes))
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    return [_peak_of_stream(model, bucket_bytes) for bucket_bytes in buckets], sum(sizes), max(sizes)


def _peak_of_stream(model: nn.Module, bucket_bytes: int) -> tuple[int, int]:
    live = LiveBytes()
    with live:
        for _, tensor in stream_weights(model, bucket_bytes=bucket_bytes, buckets_ahead=0):
            del tensor
    deadline = time.monotonic() + 5  # gloo's threads let go of a finished collective's tensors in their own time
    while live.live and time.monotonic() < deadline:
        time.sleep(0.01)
    return live.peak, live.live


@pytest.mark.any_torch
@pytest.mark.parametrize(
    "axes",
    [pytest.param(TWO[0], marks=pytest.mark.slow), TWO[1], pytest.param(FOUR[0], marks=pytest.mark.slow)],
    ids=["tp", "fsdp", "fsdp-tp"],
)
def test_a_stream_holds_a_bucket_and_a_tensor_at_a_time(
    two_ranks: RankPool, four_ranks: RankPool, axes: dict[str, int]
) -> None:
    pool = two_ranks if axes in TWO else four_ranks
    buckets = (1, 60_000)
    for found, total, largest in pool.run(_peaks_of_streams, axes, buckets):
        for bucket, (peak, left) in zip(buckets, found, strict=True):
            # The bucket, padded, and the shards of it that go in; the bucket before may still be gloo's.
            gathered = max(bucket, largest) * 1.02
            assert gathered / 3 < peak <= 2 * 1.5 * gathered + largest
            assert peak < total / 5
            assert left == 0


def _collectives_of_stream(axes: dict[str, int], bucket_bytes: int) -> tuple[int, int]:
    model = _parallel("LlamaForCausalLM", axes)
    calls = []
    original = gather.all_gather_flat

    def counted(output: Tensor, own: Tensor, group: Any) -> dist.Work:
        calls.append(own.nbytes)
        return original(output, own, group)

    gather.all_gather_flat = counted
    try:
        tensors = sum(1 for _ in stream_weights(model, bucket_bytes=bucket_bytes))
    finally:
        gather.all_gather_flat = original
    return len(calls), tensors


def _most_buckets_held(axes: dict[str, int], ahead: int) -> tuple[int, int, bool]:
    """The most buckets that are gathered and not consumed, how many there are, and whether the order is the model's."""
    model = _parallel("LlamaForCausalLM", axes)
    export = WeightExport(bucket_bytes=40_000, buckets_ahead=ahead)
    expected = [weight.name for weight in export.describe(model)]
    runs = [{i.name for g in run for i in g.tensors} for run in split_by_bytes(export.prepare(model).groups, 40_000)]
    started = most = 0
    original = ExportedModel.gather

    def counted(self: ExportedModel, groups: Any, to: int | None = None) -> Any:
        nonlocal started
        started += 1
        return original(self, groups, to)

    ExportedModel.gather = counted  # type: ignore[method-assign]
    names = []
    live = LiveBytes()
    try:
        with live:
            for name, tensor in export.stream(model):
                names.append(name)
                consumed = sum(run <= {*names[:-1]} for run in runs)
                most = max(most, started - consumed)
                del tensor
    finally:
        ExportedModel.gather = original  # type: ignore[method-assign]
    # Each bucket that is held, padded, with the shards that go in; one before may still be gloo's.
    assert live.peak <= (ahead + 2) * 1.5 * max(40_000, *(w.nbytes for w in export.describe(model))) * 1.02 + 40_000
    return most, len(runs), names == expected


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_stream_gathers_the_stated_buckets_ahead_and_keeps_its_order(two_ranks: RankPool, ahead: int) -> None:
    for most, runs, in_order in two_ranks.run(_most_buckets_held, {"dp_shard": 2}, ahead):
        assert runs > 5
        assert most == ahead + 1
        assert in_order
    with pytest.raises(OptionError, match="buckets_ahead=-1: give 0 or more"):
        WeightExport(buckets_ahead=-1)


def _gathered_for_one(architecture: str, axes: dict[str, int], to: int, path: Path) -> tuple[list[str], int]:
    """What the one rank gets wrong, or others get at all; and the bytes that this rank receives."""
    model = _parallel(architecture, axes)
    received = 0
    original = dist.gather

    def counted(own: Tensor, rows: list[Tensor] | None, *args: Any, **options: Any) -> Any:
        nonlocal received
        received += own.nbytes * (len(rows) - 1) if rows else 0
        return original(own, rows, *args, **options)

    dist.gather = counted
    try:
        weights = [
            pair for bucket in WeightExport(bucket_bytes=40_000).prepare(model).buckets(to=to) for pair in bucket
        ]
    finally:
        dist.gather = original
    if dist.get_rank() != to:
        return [name for name, _ in weights], received
    return _differences(iter(weights), load_file(path / "model.safetensors")), received


@pytest.mark.parametrize(
    ("architecture", "axes"),
    [
        ("LlamaForCausalLM", {"dp_replicate": 2, "dp_shard": 2}),
        ("LlamaForCausalLM", {"dp_shard": 2, "tp": 2}),
        ("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("to", [0, 3])
def test_buckets_for_one_rank_are_sent_toward_that_rank_alone(
    four_ranks: RankPool, tmp_path: Path, architecture: str, axes: dict[str, int], to: int
) -> None:
    _saved(tmp_path, architecture, tied=False)
    found = four_ranks.run(_gathered_for_one, architecture, axes, to, tmp_path)
    assert [wrong for wrong, _ in found] == [[], [], [], []]
    received = [nbytes for _, nbytes in found]
    assert received[to] == max(received)
    if "dp_replicate" in axes:
        assert sum(received) == received[to] > 0
    else:
        assert sum(received) < 1.5 * received[to]


def _gathered_large_and_small(dims: tuple[int, ...]) -> bool:
    """Whether tensors above and below the size that is gathered alone come back whole, in order."""
    mesh = mesh_for({"dp_shard": 2, "tp": 2})["dp_shard", "tp"]
    rows = (601, 3, 1024, 5)  # the first and third make shards of more than a mebibyte
    whole = [torch.randn(count, 1024, generator=torch.Generator().manual_seed(count)) for count in rows]
    shards = [distribute_tensor(tensor, mesh, [Shard(dim) for dim in dims]) for tensor in whole]
    found = gather.full_tensors([shard.double() for shard in shards])
    return all(torch.equal(tensor, wanted.double()) for tensor, wanted in zip(found, whole, strict=True))


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), pytest.param((1, 0), marks=pytest.mark.slow), (1, 1)])
def test_large_and_small_shards_are_gathered_to_equal_tensors(four_ranks: RankPool, dims: tuple[int, int]) -> None:
    assert all(four_ranks.run(_gathered_large_and_small, dims))


def test_a_bucket_of_small_tensors_takes_one_collective_per_axis(two_ranks: RankPool, four_ranks: RankPool) -> None:
    for calls, tensors in two_ranks.run(_collectives_of_stream, {"dp_shard": 2}, 10**9):
        assert calls == 1
        assert tensors > 20
    for calls, _ in four_ranks.run(_collectives_of_stream, {"dp_shard": 2, "tp": 2}, 10**9):
        assert calls == 2
    for calls, tensors in two_ranks.run(_collectives_of_stream, {"dp_shard": 2}, 1):
        assert calls == tensors
