"""Sending weights to receivers in this process and in others: metadata first, bounded memory, bit-identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import load_weights, parallelize, save_weights, stream_weights
from fsdp_runtime.errors import ConversionError
from fsdp_runtime.sync import WeightExport, WeightInfo, flatten_bucket, send_weights, unflatten_bucket
from harness.memory import LiveBytes
from harness.models import tiny_model
from harness.ranks import RankPool

QKV = ("q_proj", "k_proj", "v_proj")


class Engine:
    """Keeps weights as an inference engine does: queries, keys and values fused, allocated before any arrives."""

    def __init__(self, described: list[WeightInfo]) -> None:
        self.weights: dict[str, Tensor] = {}
        for weight in described:
            rows, *others = weight.shape
            part = next((part for part in QKV if part in weight.name), None)
            if part is None:
                self.weights[weight.name] = torch.empty(weight.shape, dtype=weight.dtype)
            else:
                fused = weight.name.replace(part, "qkv_proj")
                known = self.weights.get(fused, torch.empty(0, *others, dtype=weight.dtype))
                self.weights[fused] = torch.empty(len(known) + rows, *others, dtype=weight.dtype)
        self._filled: dict[str, int] = {}

    def load_weights(self, bucket: list[tuple[str, Tensor]]) -> None:
        """The interface of vLLM's models."""
        for name, tensor in bucket:
            part = next((part for part in QKV if part in name), "")
            fused = name.replace(part, "qkv_proj") if part else name
            start = self._filled.get(fused, 0)
            self.weights[fused][start : start + len(tensor)].copy_(tensor)
            self._filled[fused] = start + len(tensor)

    def differences(self, path: Path) -> list[str]:
        """Names of weights that are not the checkpoint's."""
        stored = load_file(path / "model.safetensors")
        wrong = []
        for name, tensor in self.weights.items():
            parts = [stored[name.replace("qkv_proj", part)] for part in QKV] if "qkv_proj" in name else [stored[name]]
            if not torch.equal(tensor, torch.cat(parts).to(tensor.dtype)):
                wrong.append(name)
        return wrong


def _trainer(ranks: list[int]) -> nn.Module:
    """A model split over two ranks of a world of four; the other two are the engine's."""
    mesh = DeviceMesh("cpu", [ranks], mesh_dim_names=("dp_shard", "tp"))
    model = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    return parallelize(model, mesh) if dist.get_rank() in ranks else model


def _train_here_infer_there(path: Path, *, flat: bool, dtype: torch.dtype | None) -> list[str]:
    """Ranks 0 and 1 train, rank 0 sends, ranks 2 and 3 receive; what a receiver got wrong."""
    model = _trainer([0, 1])
    group = dist.new_group([0, 2, 3])
    rank = dist.get_rank()
    if rank < 2:
        described = WeightExport(dtype=dtype).describe(model)

        def on_bucket(weights: list[WeightInfo] | None) -> None:
            dist.broadcast_object_list([weights], src=0, group=group)

        if rank == 0:
            on_bucket(described)
        send_weights(
            model,
            group if rank == 0 else None,
            on_bucket,
            export=WeightExport(bucket_bytes=40_000, dtype=dtype),
            flat=flat,
        )
        if rank == 0:
            on_bucket(None)
        return []
    engine = Engine(_received(group) or [])
    while (weights := _received(group)) is not None:
        if flat:
            run = torch.empty(sum(weight.nbytes for weight in weights), dtype=torch.uint8)
            dist.broadcast(run, src=0, group=group)
            engine.load_weights(unflatten_bucket(weights, run))
        else:
            for weight in weights:
                tensor = torch.empty(weight.shape, dtype=weight.dtype)
                dist.broadcast(tensor, src=0, group=group)
                engine.load_weights([(weight.name, tensor)])
    return engine.differences(path)


def _received(group: Any) -> list[WeightInfo] | None:
    heard: list[Any] = [None]
    dist.broadcast_object_list(heard, src=0, group=group)
    return heard[0]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "one by one"])
def test_receivers_in_other_processes_get_every_weight(
    four_ranks: RankPool, tmp_path: Path, flat: bool, dtype: torch.dtype | None
) -> None:
    tiny_model("Qwen3ForCausalLM", dtype=torch.float32).save_pretrained(tmp_path)
    assert four_ranks.run(_train_here_infer_there, tmp_path, flat=flat, dtype=dtype) == [[], [], [], []]


def test_a_receiver_in_this_process_takes_lists_of_names_and_tensors(tmp_path: Path) -> None:
    model = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    engine = Engine(WeightExport().describe(model))
    sizes = []
    for bucket in WeightExport(bucket_bytes=40_000).buckets(model):
        engine.load_weights(bucket)
        sizes.append(sum(tensor.nbytes for _, tensor in bucket))
    assert engine.differences(tmp_path) == []
    assert max(sizes) <= 40_000
    assert len(sizes) > 5


def test_metadata_equals_the_stream_in_its_order() -> None:
    for names in ("checkpoint", "model"):
        model = tiny_model("Gemma3ForConditionalGeneration", dtype=torch.float32, tied=True)
        described = WeightExport(dtype=torch.bfloat16, names=names).describe(model)
        streamed = stream_weights(model, dtype=torch.bfloat16, names=names)
        assert described == [WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in streamed]


def test_buckets_hold_one_dtype_so_that_bytes_stay_aligned() -> None:
    model = nn.BatchNorm1d(3)  # float32 statistics and an int64 count
    buckets = list(WeightExport().buckets(model))
    assert [{tensor.dtype for _, tensor in bucket} for bucket in buckets] == [{torch.float32}, {torch.int64}]


def test_unflatten_bucket_inverts_flatten_bucket() -> None:
    one_of_a_column = torch.randn(4, 2, dtype=torch.bfloat16)[:1, ::2]  # its stride is 2
    tensors = [torch.randn(3, 5).T, torch.randn(()), torch.empty(0, 4), torch.randn(7), one_of_a_column]
    bucket = [(str(number), tensor.to(torch.bfloat16)) for number, tensor in enumerate(tensors)]
    described = [WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]
    for (name, tensor), (wanted_name, wanted) in zip(
        unflatten_bucket(described, flatten_bucket(bucket)), bucket, strict=True
    ):
        assert name == wanted_name
        assert torch.equal(tensor, wanted)


def _peak(bucket_bytes: int) -> tuple[int, int, int]:
    """Peak live bytes of the sending rank, the model's bytes and its largest weight's."""
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32, num_hidden_layers=12)
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp_shard", "tp"))
    sizes = [weight.nbytes for weight in WeightExport().describe(model)]
    group = dist.new_group([0])
    parallelize(model, mesh)
    with LiveBytes() as live:
        send_weights(
            model,
            group if dist.get_rank() == 0 else None,
            lambda _: None,
            export=WeightExport(bucket_bytes=bucket_bytes),
        )
    return live.peak, sum(sizes), max(sizes)


def test_sending_holds_a_few_buckets_and_never_the_full_model(two_ranks: RankPool) -> None:
    bucket = 50_000
    for peak, total, largest in two_ranks.run(_peak, bucket):
        # Gathered (and up to two buckets before, while gloo holds on to them on a busy host), the shards that went in,
        # and flatten_bucket.
        assert peak <= 5 * 1.02 * max(bucket, largest) + largest
        assert peak < total / 3


class _Packed(nn.Parameter):
    """Stands for a quantisation's own class of weights."""


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = _Packed(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConversionError, match=r"1 weights are of class _Packed, first 0\.weight: quantized"):
        list(stream_weights(model))
    plain = nn.Sequential(nn.Linear(2, 2))
    save_weights(plain, tmp_path)
    with pytest.raises(ConversionError, match=r"first 0\.weight"):
        load_weights(model, tmp_path)
