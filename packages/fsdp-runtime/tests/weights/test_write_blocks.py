"""Files that all ranks write: the bytes of a writer that has every tensor in full, each written and sent once."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_runtime import parallelize, save_weights
from fsdp_runtime.dry_run import WeightTraffic, describe_weights
from fsdp_runtime.sharded.file_systems import FilePlace, _type_at, by_host, may_share_files
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, file_runs
from fsdp_runtime.sync import Quantization, WeightExport
from fsdp_runtime.weights import file_plan
from fsdp_runtime.weights.export import ExportedTensor
from fsdp_runtime.weights.file_plan import Area, FilePlanner, Piece
from fsdp_runtime.weights.stream import split_by_bytes
from fsdp_runtime.weights.write_blocks import SaveReport
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans import Replicate, Shard
from tp_plans.transfer import Box, StoredBlock, StridedShard, box_shape, full_box, intersection, mesh_boxes, volume

SHARD_BYTES, BUCKET_BYTES = 60_000, 12_000


def _model(architecture: str) -> nn.Module:
    model = tiny_model(architecture.removesuffix("+LoRA"), dtype=torch.float32)
    if not architecture.endswith("+LoRA"):
        return model
    torch.manual_seed(1)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return adapted  # type: ignore[no-any-return]


def _save(architecture: str, axes: dict[str, int], directory: Path, options: dict[str, Any]) -> SaveReport:
    model = parallelize(_model(architecture), mesh_for(axes))
    return save_weights(model, directory, max_shard_bytes=SHARD_BYTES, bucket_bytes=BUCKET_BYTES, **options)


def _write_in_full(model: nn.Module, directory: Path, options: dict[str, Any]) -> None:
    """What one process writes that has every tensor in full."""
    directory.mkdir()
    export = WeightExport(**options).prepare(model)
    shards = list(split_by_bytes(export.tensors, SHARD_BYTES))
    stream = export.stream()
    for number, items in enumerate(shards, start=1):
        path = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with SafetensorsWriter(path, items) as file:
            for name, tensor in itertools.islice(stream, len(items)):
                file.write(name, tensor)


CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("LlamaForCausalLM", {"dp_shard": 4}, {}),
    ("LlamaForCausalLM", {"tp": 4}, {"dtype": torch.bfloat16}),
    ("LlamaForCausalLM", {"dp_shard": 2, "tp": 2}, {}),
    ("LlamaForCausalLM", {"dp_replicate": 2, "tp": 2}, {"names": "model"}),
    ("Gemma3ForConditionalGeneration", {"dp_replicate": 2, "dp_shard": 2}, {}),
    ("LlamaForCausalLM+LoRA", {"dp_shard": 2, "tp": 2}, {}),
    ("LlamaForCausalLM", {"dp_shard": 2, "tp": 2}, {"quantize": Quantization(format="fp8")}),
    ("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 4}, {}),
    ("Qwen3MoeForCausalLM", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"dtype": torch.bfloat16}),
    ("Qwen3MoeForCausalLM", {"tp": 4, "ep": 2}, {"names": "model"}),
    ("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 2}, {"writers": "one"}),
]


@pytest.mark.parametrize(("architecture", "axes", "options"), CASES, ids=str)
def test_files_have_the_bytes_of_full_tensors_each_written_and_sent_once(
    four_ranks: RankPool, tmp_path: Path, architecture: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    reports = four_ranks.run(_save, architecture, axes, tmp_path / "ours", options)
    one_writer = options.pop("writers", None) == "one"
    _write_in_full(_model(architecture), tmp_path / "full", options)
    expected = sorted((tmp_path / "full").iterdir())
    assert len(expected) > 1
    assert sorted(file.name for file in (tmp_path / "ours").glob("*.safetensors")) == [file.name for file in expected]
    for file in expected:
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()
    total = sum(item.nbytes for item in WeightExport(**options).prepare(_model(architecture)).tensors)
    assert sum(report.bytes_written for report in reports) == total
    padding = 16 * 1000
    assert sum(report.bytes_sent for report in reports) == sum(report.bytes_received for report in reports)
    assert sum(report.bytes_sent for report in reports) <= total + padding
    if "quantize" not in options:
        assert max(report.peak_bytes for report in reports) <= BUCKET_BYTES
    assert one_writer or max(report.bytes_written for report in reports) < 0.4 * total
    if axes.keys() <= {"dp_replicate", "dp_shard"}:
        assert all(report.bytes_sent == 0 for report in reports)


# Plans of any layout.


def _pieces(shape: tuple[int, ...], mesh: tuple[int, ...], layouts: list[Any]) -> list[Piece]:
    owners: dict[Box, list[int]] = {}
    for rank, box in enumerate(mesh_boxes(shape, mesh, layouts)):
        if volume(box):
            owners.setdefault(box, []).append(rank)
    dims = tuple(range(len(shape)))
    return [
        Piece(0, StoredBlock(ranks[0], box, "x", (0,) * len(shape), dims), tuple(ranks))
        for box, ranks in owners.items()
    ]


def _random_layout(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = tuple(rng.choice((1, 2, 3, 5, 8, 13)) for _ in range(rng.randrange(4)))
    mesh = tuple(rng.choice((1, 2, 3)) for _ in range(rng.randrange(1, 4)))
    kinds: list[Any] = [Replicate()]
    if shape:
        kinds += [Shard(rng.randrange(len(shape))), StridedShard(rng.randrange(len(shape)))]
    return shape, mesh, [rng.choice(kinds) for _ in mesh]


@pytest.mark.parametrize("one_writer", [False, True])
def test_areas_of_any_layout_fill_the_tensor_once_from_ranks_that_have_the_parts(
    one_writer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    for turn in range(1500):
        shape, mesh, layouts = _random_layout(rng)
        pieces = _pieces(shape, mesh, layouts)
        item = ExportedTensor("x", torch.float32, shape, None)
        writer = turn % max(len(piece.owners) for piece in pieces) if one_writer else None
        limit = rng.choice((16, 64, 10**6))
        monkeypatch.setattr(file_plan, "_LEAST_MESSAGE", rng.choice((1, 16, 2**14)))
        planner = FilePlanner(range(math.prod(mesh)), limit)
        planner.plan(item, "x", pieces, writer=writer)  # other ranks' turn
        steps = planner.plan(item, "x", pieces, writer=writer)
        written = torch.zeros(shape, dtype=torch.int64)
        for step in steps:
            for area in step.areas:
                assert writer in (None, area.file_rank)
                _assert_filled(area, step.held)
                assert step.held == 0 or volume(area.box) * 4 <= max(limit, 4)
                flat = written.view(-1)
                for start, _, length in file_runs(shape, area.box):
                    flat[start : start + length] += 1
        assert bool((written == 1).all()), (shape, mesh, layouts)


def test_columns_of_fewer_rows_than_ranks_are_sent_in_few_messages_to_writers_that_change() -> None:
    shape, ranks, tensors, least = (256, 4096), 1024, 64, 2**14
    item, pieces = ExportedTensor("x", torch.bfloat16, shape, None), _pieces(shape, (ranks,), [Shard(1)])
    planner = FilePlanner(range(ranks), 2**24)
    by_writer: dict[int, int] = {}
    for _ in range(tensors):
        pairs = set()
        for area in (area for step in planner.plan(item, "x", pieces) for area in step.areas):
            by_writer[area.file_rank] = by_writer.get(area.file_rank, 0) + volume(area.box) * 2
            pairs |= {(part.rank, area.file_rank) for part in area.parts if part.rank != area.file_rank}
        assert len(pairs) <= max(ranks, volume(full_box(shape)) * 2 // least)
    assert len(by_writer) == tensors
    assert max(by_writer.values()) == volume(full_box(shape)) * 2
    assert len({rank // 8 for rank in by_writer}) > tensors // 2  # of several hosts


@pytest.mark.parametrize(("rows", "columns", "read"), [(2048, 1024, 1 / 64), (2048, 16, 1)])
def test_a_host_skips_long_gaps_between_what_it_needs_and_reads_through_short_ones(
    rows: int, columns: int, read: float
) -> None:
    shape, near = (4, rows, columns), range(8, 16)  # of 512 ranks that have the rows of all four
    item = ExportedTensor("x", torch.bfloat16, shape, None)
    pieces = [piece for piece in _pieces(shape, (512,), [Shard(1)]) if piece.owners[0] in near]
    steps = FilePlanner(near, 2**24, partial=True).plan(item, "x", pieces)
    areas = [area for step in steps for area in step.areas]
    assert sum(volume(area.box) for area in areas) == read * volume(full_box(shape))
    assert sum(volume(part.box) for area in areas for part in area.parts) == volume(full_box(shape)) // 64
    for area in areas:
        assert all(intersection(part.box, area.box) == part.box for part in area.parts)


def _narrow() -> nn.Module:
    """Key and value projections of two rows."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _save_narrow(directory: Path) -> tuple[SaveReport, WeightTraffic]:
    model = parallelize(_narrow(), mesh_for({"dp_shard": 4}))
    return save_weights(model, directory, max_shard_bytes=SHARD_BYTES), describe_weights(model)[0]


def test_tensors_of_fewer_rows_than_ranks_have_the_same_bytes(four_ranks: RankPool, tmp_path: Path) -> None:
    found = four_ranks.run(_save_narrow, tmp_path / "ours")
    _write_in_full(_narrow(), tmp_path / "full", {})
    for file in (tmp_path / "full").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()
    assert sum(report.bytes_sent for report, _ in found) == sum(each.sent for each in found[0][1].ranks.values()) > 0
    assert sum(each.messages for each in found[0][1].ranks.values()) <= 4 * 2 * 3  # four tensors, one writer of each


def _assert_filled(area: Area, held: int) -> None:
    assert sum(volume(part.box) for part in area.parts) == volume(area.box)
    for part in area.parts:
        assert part.rank in part.piece.owners
        assert area.file_rank not in part.piece.owners or part.rank == area.file_rank
        assert intersection(part.box, area.box) == part.box
        assert intersection(part.box, part.piece.block.box) == part.box
    assert held or (area.is_local and len(area.parts) == 1)


def test_the_type_of_a_file_system_and_the_hosts_decide_who_writes() -> None:
    nfs = [FilePlace("a", "nfs4"), FilePlace("b", "nfs4")]
    assert may_share_files(nfs[:1] * 2)
    assert not may_share_files(nfs)
    assert not may_share_files([FilePlace("", "")] * 2)
    assert may_share_files([FilePlace("a", "lustre"), FilePlace("b", "lustre")])
    assert not may_share_files([FilePlace("a", "lustre"), FilePlace("b", "fuse.sshfs")])
    assert by_host(dict(enumerate([nfs[0], nfs[0], nfs[1], nfs[1]]))) == [0, 2, 1, 3]
    mounts = "1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:9 / /data\\040one rw shared:1 - nfs4 server:/x rw\n"
    assert [_type_at(Path(path), mounts) for path in ("/data", "/data one/x", "/data one")] == ["ext4", "nfs4", "nfs4"]


def test_runs_of_a_box_are_its_elements_in_the_order_of_the_tensor() -> None:
    full = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    for box in (((0, 2), (1, 3), (0, 4), (0, 5)), ((1, 2), (0, 3), (1, 3), (0, 5)), ((0, 2), (0, 3), (0, 4), (2, 4))):
        values = full[tuple(slice(*side) for side in box)].reshape(-1)
        found = torch.full((full.numel(),), -1)
        runs = list(file_runs(full.shape, box))
        for start, inner, length in runs:
            found[start : start + length] = values[inner : inner + length]
        assert sorted(found[found >= 0].tolist()) == sorted(values.tolist())
        assert torch.equal(found[found >= 0], full.reshape(-1)[found >= 0])
        assert sum(length for _, _, length in runs) == volume(box)
    assert list(file_runs((), ())) == [(0, 0, 1)]
    assert box_shape(()) == ()


def test_rows_need_no_exchange_and_columns_one_copy_at_most() -> None:
    shape, nbytes = (4096, 4096), 4096 * 4096 * 2
    item = ExportedTensor("x", torch.bfloat16, shape, None)
    for layouts, sent in (
        ([Replicate(), Shard(0), Replicate()], 0),
        ([Replicate(), Shard(0), Shard(1)], 0.5),
        ([Replicate(), Replicate(), Shard(1)], 0.5),
    ):
        steps = FilePlanner(range(16), 2**26).plan(item, item.name, _pieces(shape, (2, 4, 2), layouts))
        areas = [area for step in steps for area in step.areas]
        moved = sum(volume(p.box) * 2 for area in areas for p in area.parts if p.rank != area.file_rank)
        assert moved == sent * nbytes
        by_writer: dict[int, int] = {}
        for area in areas:
            by_writer[area.file_rank] = by_writer.get(area.file_rank, 0) + volume(area.box) * 2
        assert len(by_writer) >= 8
        assert max(by_writer.values()) <= 2 * nbytes // len(by_writer)
        for area in areas:  # parts come from the same replica
            assert len({part.rank // 8 for part in area.parts} | {area.file_rank // 8}) == 1
