"""Bytes that saves and loads of weights are said to move, beside those that two ranks move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_runtime import MeshSpec, OptionError, load_weights, parallelize, save_weights
from fsdp_runtime.dry_run import WeightTraffic, describe_weights, estimate_weights
from harness.ranks import RankPool

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)


def _counted(axes: dict[str, int], directory: Path) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], bool]:
    """What this rank was said to move in a save and in a load, what it moved, and whether it held no more."""
    torch.manual_seed(0)
    mesh = MeshSpec(**axes).build(device_type="cpu")
    model = parallelize(LlamaForCausalLM(CONFIG), mesh)
    rank, found = dist.get_rank(), describe_weights(model, max_shard_bytes=100_000, bucket_bytes=20_000)
    said = [each.ranks[rank] for each in found[:2]]
    save = save_weights(model, directory, max_shard_bytes=100_000, bucket_bytes=20_000)
    load = load_weights(model, directory, bucket_bytes=20_000)
    return (
        [(each.read, each.written, each.sent, each.received) for each in said],
        [
            (0, save.bytes_written, save.bytes_sent, save.bytes_received),
            (load.bytes_read, 0, load.bytes_sent, load.bytes_received),
        ],
        save.peak_bytes <= said[0].held,
    )


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2}], ids=str)
def test_two_ranks_move_what_was_said_before(two_ranks: RankPool, axes: dict[str, int], tmp_path: Path) -> None:
    for said, moved, held in two_ranks.run(_counted, axes, tmp_path):
        assert said == moved
        assert held


def test_rows_need_no_network_and_a_mesh_that_is_not_there_has_the_same_bytes() -> None:
    save, load, stream = estimate_weights(CONFIG, {"dp_shard": 16}, dtype="fp32")
    total = sum(each.written for each in save.ranks.values())
    assert total == sum(p.numel() * 4 for p in LlamaForCausalLM(CONFIG).parameters())
    assert (save.most("sent"), save.most("gathered"), stream.most("gathered") > 0) == (0, 0, True)
    assert len(load.ranks) == 8


def test_seconds_are_those_of_the_busiest_host_and_rank() -> None:
    (save, *_) = describe_weights(nn.Linear(2, 3))
    assert save.seconds(disk=36.0, network=1.0) == pytest.approx(1.0)
    assert isinstance(save, WeightTraffic)
    assert str(save) == "save, bytes of the rank with the most of each: written 36 bytes"


def test_a_host_without_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match="ranks_per_host=0: give a positive number"):
        describe_weights(nn.Linear(2, 3), ranks_per_host=0)
