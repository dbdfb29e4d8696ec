"""Files of a save: each has one writer and the bytes that one process with the full model writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_runtime import MeshSpec, OptionError, parallelize, save_weights
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.sharded.boxes import identity_chunk
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter, file_runs
from fsdp_runtime.sync import Quantization, WeightExport
from fsdp_runtime.weights import files
from fsdp_runtime.weights.export import ExportedTensor, ExportGroup
from fsdp_runtime.weights.files import parse_bytes, plan_files
from fsdp_runtime.weights.save import SaveReport
from harness.memory import LiveBytes
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans.boxes import box_shape, volume

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


def _save(
    architecture: str, axes: dict[str, int], directory: Path, options: dict[str, Any]
) -> tuple[SaveReport, int, int]:
    """Save; return the report, the most bytes that this rank held, and the bytes of the largest tensor."""
    model = parallelize(_model(architecture), mesh_for(axes))
    bucket_bytes, files.BUCKET_BYTES = files.BUCKET_BYTES, BUCKET_BYTES
    try:
        with LiveBytes() as live:
            report = save_weights(model, directory, max_shard_size=SHARD_BYTES, **options)
    finally:
        files.BUCKET_BYTES = bucket_bytes
    return report, live.peak, max(p.numel() * p.element_size() for p in model.parameters())


def _write_in_full(model: nn.Module, directory: Path, names: list[list[str]], options: dict[str, Any]) -> list[bytes]:
    """Return the files of one process that has every tensor in full; ``names`` are the tensors of each file."""
    export = WeightExport(**options).prepare(model)
    described, tensors = {item.name: item for item in export.metadata()}, dict(export.stream())
    directory.mkdir()
    assert sorted(name for content in names for name in content) == sorted(tensors)
    for number, content in enumerate(names):
        ordered = [item for name, item in described.items() if name in content]
        with SafetensorsWriter(directory / str(number), ordered) as file:
            for item in ordered:
                file.write(item.name, tensors[item.name])
    return [(directory / str(number)).read_bytes() for number in range(len(names))]


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
    ("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
]


@pytest.mark.parametrize(("architecture", "axes", "options"), CASES, ids=str)
def test_save_weights_writes_the_bytes_of_full_tensors_each_once_by_one_rank(
    four_ranks: RankPool, tmp_path: Path, architecture: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    results = four_ranks.run(_save, architecture, axes, tmp_path / "ours", options)
    written, names = sorted((tmp_path / "ours").glob("*.safetensors")), []
    assert len(written) > 1
    for file in written:
        with safe_open(file, framework="pt") as opened:
            names.append(list(opened.keys()))
        assert len(names[-1]) == 1 or file.stat().st_size < SHARD_BYTES + 8 + 200 * len(names[-1])
    full = _write_in_full(_model(architecture), tmp_path / "full", names, options)
    assert [file.read_bytes() for file in written] == full
    nbytes = [report.bytes_written for report, _, _ in results]
    assert sum(nbytes) == sum(item.nbytes for item in WeightExport(**options).describe(_model(architecture)))
    if "tp" not in axes or "dp_shard" in axes:  # without FSDP2 plain tensors have one writer
        assert max(nbytes) < 0.6 * sum(nbytes)
    if "quantize" not in options:
        for _, peak, largest in results:
            assert peak <= 4 * (BUCKET_BYTES + 2 * largest)


def _narrow() -> nn.Module:
    """Key and value projections of two rows."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _save_narrow(directory: Path) -> SaveReport:
    return save_weights(parallelize(_narrow(), mesh_for({"dp_shard": 4})), directory)


def test_save_weights_of_tensors_of_fewer_rows_than_ranks_writes_the_same_bytes(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    reports = four_ranks.run(_save_narrow, tmp_path / "ours")
    save_weights(_narrow(), tmp_path / "full")
    first, second = (tmp_path / name / "model.safetensors" for name in ("ours", "full"))
    assert first.read_bytes() == second.read_bytes()
    assert [report.bytes_written > 0 for report in reports] == [True, False, False, False]


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64)) for _ in range(4)])
        self.register_buffer("rank", torch.tensor(-1.0))


def _save_buffer(directory: Path) -> None:
    model = parallelize(_WithBuffer(), mesh_for({"dp_shard": 2}), plan=None)
    model.rank.fill_(dist.get_rank())
    save_weights(model, directory, max_shard_size=17_000)


def test_save_weights_saves_the_first_ranks_copy_of_a_buffer(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_save_buffer, tmp_path)
    opened = [safe_open(file, framework="pt") for file in tmp_path.glob("*.safetensors")]
    assert len(opened) == 4
    assert [float(file.get_tensor("rank")) for file in opened if "rank" in file.keys()] == [0.0]  # noqa: SIM118


# Plans.


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_plan_files_gives_every_host_a_file_and_ranks_equal_bytes(hosts: int) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4))
    with fake_world(MeshSpec(dp_shard=8), rank=0) as mesh:
        export = WeightExport().prepare(parallelize(model, mesh))
        machines = {rank: str(rank * hosts // 8) for rank in range(8)}
        plan = plan_files(export.groups, "5GB", machines)
        assert {machines[rank] for rank in plan} == {*machines.values()}
        assert list(plan)[:hosts] == [host * 8 // hosts for host in range(hosts)]
        total = sum(item.nbytes for item in export.tensors)
        plan = plan_files(export.groups, math.ceil(total / 8), machines)
        shares = [sum(item.nbytes for _, items in share.files for item in items) for share in plan.values()]
        assert len(shares) == 8
        assert max(shares) < 2 * total / 8
        names = sorted(name for share in plan.values() for name, _ in share.files)
        assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]


def test_plan_files_gives_a_model_of_plain_tensors_to_the_first_rank() -> None:
    export = WeightExport().prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    plan = plan_files(export.groups, 300, {0: "a", 1: "b"})
    assert {rank: len(share.files) for rank, share in plan.items()} == {0: 2}
    assert len(plan_files(export.groups, "5GB", {0: "a", 1: "b"})[0].files) == 1


def _group_of_stage(name: str, tensor: torch.Tensor) -> ExportGroup:
    shape = tuple(tensor.shape)
    item = ExportedTensor(name, tensor.dtype, shape, [identity_chunk(name, shape)])
    return ExportGroup({name: tensor}, [item], None, {}, {name: tensor.dtype}, ranks=(2, 3))


@pytest.mark.parametrize("device", ["cpu", "meta"])  # a rank of the stage, and a rank of another stage
def test_plan_files_gives_buffers_of_a_stage_to_its_first_rank(device: str) -> None:
    tensors = {f"weight{n}": nn.Parameter(torch.zeros(8, device=device)) for n in range(4)}
    groups = [_group_of_stage(name, tensor) for name, tensor in tensors.items()]
    groups.insert(2, _group_of_stage("buffer", torch.zeros(8, device=device)))
    plan = plan_files(groups, 32, dict.fromkeys(range(4), "a"))
    names = {rank: [item.name for _, items in share.files for item in items] for rank, share in plan.items()}
    assert names == {2: ["buffer", "weight1", "weight3"], 3: ["weight0", "weight2"]}


@pytest.mark.parametrize(
    ("size", "nbytes"), [(7, 7), ("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2KiB", 2048), ("12B", 12)]
)
def test_parse_bytes_reads_the_sizes_of_transformers(size: int | str, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, "", "5", "5Gb", "GB", "0GB"])
def test_parse_bytes_refuses_what_is_no_positive_size(size: Any) -> None:
    with pytest.raises(OptionError, match=r"max_shard_size=.*: write a positive number of bytes, or"):
        parse_bytes(size)


def test_file_runs_are_the_elements_of_a_box_in_the_order_of_the_tensor() -> None:
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
