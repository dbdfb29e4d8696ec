"""Training states: resuming does not change training, on any mesh, and kills and damage are detected."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_runtime import FSDP2, OptionError, WeightsError, parallelize
from fsdp_runtime.errors import CheckpointError, MismatchError
from fsdp_runtime.sharded import saved_files
from fsdp_runtime.sharded.collectives import ModelRanks
from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter
from fsdp_runtime.training_state import directory as step_directories
from fsdp_runtime.training_state import load, load_training_state, save, save_training_state
from fsdp_runtime.training_state.save import chunks_to_write
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for, own_part
from harness.processes import preloaded_context
from harness.ranks import RankPool, RanksFailed

ARCHITECTURE = "Qwen3ForCausalLM"
#: Meshes of four ranks, and the one process of the test itself.
CHAIN = ({"dp_shard": 2, "tp": 2}, {"tp": 4}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2})


class Run:
    """A model in training: its steps draw noise, so that random states matter."""

    def __init__(
        self, axes: Mapping[str, int], *, seed: int = 0, optimizer: str = "adamw", tied: bool = True, **options: Any
    ) -> None:
        self.model = tiny_model(ARCHITECTURE, dtype=torch.float32, seed=seed, tied=tied)
        if axes:
            parallelize(self.model, mesh_for(axes), **options)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=20)
        torch.manual_seed(seed + (dist.get_rank() if axes else 0))

    def steps(self, count: int, *, noise: float = 0.1) -> list[float]:
        """The loss of every step; with noise, each rank's own."""
        losses = []
        for _ in range(count):
            logits = self.model(**tiny_inputs(self.model, batch=2, length=7), use_cache=False).logits
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            loss = (logits + noise * torch.randn_like(logits)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, step: int, **options: Any) -> Path:
        return save_training_state(
            directory,
            self.model,
            self.optimizer,
            step=step,
            scheduler=self.scheduler,
            extra={"tokens": step * 1000, "best": {"reward": 0.5, "when": (1, 2)}},
            **options,
        )

    def load(self, directory: Path, **options: Any) -> Any:
        return load_training_state(directory, self.model, self.optimizer, scheduler=self.scheduler, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        fused=True,
    ),
    "sgd": lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=1e-3),
}


def _resumed(axes: Mapping[str, int], directory: Path, options: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of a run that goes on, and of one that begins otherwise and takes its state over."""
    run = Run(axes, **options)
    run.steps(2)
    run.save(directory, step=2)
    expected = run.steps(2)
    other = Run(axes, **{**options, "seed": 5})
    state = other.load(directory)
    assert (state.step, state.rng_restored) == (2, True)
    assert state.extra == {"tokens": 2000, "best": {"reward": 0.5, "when": (1, 2)}}
    assert other.scheduler.last_epoch == 2
    return expected, other.steps(2)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"dp_shard": 2, "tp": 2}, {}, marks=pytest.mark.slow),
        ({"dp_shard": 2, "tp": 2}, {"fsdp": FSDP2(offload_policy=CPUOffloadPolicy())}),
        pytest.param({"dp_shard": 2}, {"tied": False}, marks=pytest.mark.slow),
        ({"tp": 2}, {"optimizer": "sgd", "tied": False}),
    ],
    ids=["tied", "offloaded", "untied", "sgd, untied"],
)
def test_losses_after_resuming_are_bit_identical(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, axes: dict[str, int], options: dict[str, Any]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    for expected, found in pool.run(_resumed, axes, tmp_path, options):
        assert found == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_single_process_resumes_bit_identically(tmp_path: Path, optimizer: str) -> None:
    expected, found = _resumed({}, tmp_path, {"optimizer": optimizer})
    assert found == expected


def _state(run: Run) -> dict[str, Tensor]:
    """Everything that is saved, by name."""
    found = dict(run.model.named_parameters())
    names = {id(parameter): name for name, parameter in found.items()}
    for parameter, state in run.optimizer.state.items():
        found |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    return {name: tensor.detach() for name, tensor in found.items()}


def _full(run: Run) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in _state(run).items()}


def _from_mesh_to_mesh(before: Mapping[str, int], after: Mapping[str, int], directory: Path, step: int) -> list[str]:
    """Names of tensors that differ after taking over a state that was saved on another mesh."""
    expected = torch.load(directory / "expected.pt")
    run = Run(after, seed=step)
    state = run.load(directory)
    assert state.step == step
    assert not state.rng_restored
    found = _state(run)
    wrong = sorted(found.keys() ^ expected.keys())
    for name, tensor in found.items():
        wanted = own_part(expected[name], tensor) if isinstance(tensor, DTensor) else expected[name]
        if not torch.equal(tensor.to_local() if isinstance(tensor, DTensor) else tensor, wanted):
            wrong.append(name)
    _continue_and_save(run, directory, step + 1)
    return wrong


def _continue_and_save(run: Run, directory: Path, step: int) -> None:
    run.steps(1, noise=0)
    run.save(directory, step=step, keep=1)
    expected = _full(run)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")


@pytest.mark.parametrize("chain", [CHAIN[::3], pytest.param(CHAIN, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_state_resumes_on_other_meshes(
    four_ranks: RankPool, tmp_path: Path, chain: tuple[dict[str, int], ...]
) -> None:
    reference = Run({})
    expected = reference.steps(len(chain) + 2, noise=0)
    _continue_and_save(Run({}), tmp_path, step=0)
    before: Mapping[str, int] = {}
    for step, axes in enumerate(chain):
        assert four_ranks.run(_from_mesh_to_mesh, before, axes, tmp_path, step) == [[]] * 4
        before = axes
    final = Run({}, seed=7)
    assert final.load(tmp_path).step == len(chain)
    (loss,) = final.steps(1, noise=0)
    assert loss == pytest.approx(expected[-1], rel=1e-5)


def _shard_of_seven_rows(rank: int) -> list[tuple[tuple[int, int], list[float]]]:
    """What a rank of a pretended dp_shard=3, tp=2 writes of seven rows: where, and what."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp_shard", "tp"))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.arange(7.0), mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["dp_shard"])
    own = chunks_to_write({"weight": module.weight}, ModelRanks(index=rank, count=6))
    return [(box[0], local.tolist()) for _, box, local in own]


def test_uneven_shards_over_tp_are_written_at_fsdps_offsets() -> None:
    """DTensor's own offsets would write the last row twice or not at all."""
    with preloaded_context().Pool(2, maxtasksperchild=1) as processes:
        written = [part for parts in processes.map(_shard_of_seven_rows, range(6), chunksize=1) for part in parts]
    assert sorted(value for _, values in written for value in values) == [0, 1, 2, 3, 4, 5, 6]
    for (start, stop), values in written:
        assert values == list(range(start, stop))


def _bytes_written(axes: dict[str, int], directory: Path) -> tuple[int, int]:
    run = Run(axes)
    run.steps(1)
    folder = run.save(directory, step=1)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    state = {id(t): t for t in _state(run).values()}
    return max(sizes), sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@pytest.mark.parametrize(
    "axes", [pytest.param(axes, marks=[pytest.mark.slow] * (n != 3)) for n, axes in enumerate(CHAIN)], ids=str
)
def test_replicated_tensors_are_written_once_and_the_bytes_are_balanced(
    four_ranks: RankPool, tmp_path: Path, axes: dict[str, int]
) -> None:
    for largest, total in four_ranks.run(_bytes_written, axes, tmp_path):
        headers = 80_000
        assert sum(file.stat().st_size for file in tmp_path.glob("*/*.safetensors")) < total + headers
        assert largest < 0.35 * total + headers


# Which states there are.


def test_keep_limits_the_number_of_older_states(tmp_path: Path) -> None:
    run = Run({})
    for step in range(5):
        run.save(tmp_path, step, keep=2)
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == [f"step-{n:08d}" for n in (2, 3, 4)]
    assert Run({}).load(tmp_path / "step-00000002").step == 2


def test_a_run_that_was_rolled_back_continues_from_what_it_saved_last(tmp_path: Path) -> None:
    run = Run({})
    for step in (1, 2, 3):
        run.save(tmp_path, step)
    run.load(tmp_path / "step-00000001")
    run.save(tmp_path, 2)
    state = Run({}).load(tmp_path)
    assert (state.step, state.folder.name) == (2, "step-00000002-2")


def test_a_directory_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="holds no training state"):
        Run({}).load(tmp_path)
    (tmp_path / step_directories.INDEX).write_text("{")
    with pytest.raises(WeightsError, match="is damaged"):
        Run({}).load(tmp_path)


# A process that dies while it saves.


def _dies_while_saving(directory: Path, rank: int, moment: str) -> None:
    """Save a state; one rank kills itself at a moment of the second save."""
    run = Run({"dp_shard": 2}, optimizer="sgd")
    run.steps(1)
    run.save(directory, step=1)
    run.steps(1)
    if dist.get_rank() == rank:
        _arm(moment)
    run.save(directory, step=2, keep=0)


def _arm(moment: str) -> None:
    def kill(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    match moment:
        case "first tensor":
            SafetensorsWriter.write = kill  # type: ignore[method-assign]
        case "after the tensors":
            save.write_object = kill  # type: ignore[assignment]
        case "before the rename":
            move = step_directories.move_into_place
            step_directories.move_into_place = lambda source, target: (  # type: ignore[assignment]
                kill() if source.is_dir() else move(source, target)
            )
        case "after the rename":
            move = step_directories.move_into_place
            step_directories.move_into_place = lambda source, target: (  # type: ignore[assignment]
                move(source, target),
                kill() if target.is_dir() else None,
            )
        case "old state half gone":
            saved_files.shutil.rmtree = kill  # type: ignore[assignment]


MOMENTS = {
    "first tensor": 1,
    "after the tensors": 1,
    "before the rename": 1,
    "after the rename": 2,
    "old state half gone": 2,
}


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        (0, "old state half gone"),
        (1, "first tensor"),
        *(
            pytest.param(rank, moment, marks=pytest.mark.slow)
            for rank, moment in (
                *(
                    (0, moment)
                    for moment in ("first tensor", "after the tensors", "before the rename", "after the rename")
                ),
                (1, "after the tensors"),
            )
        ),
    ],
)
def test_training_state_is_complete_after_a_killed_rank_and_the_other_raises(
    two_ranks: RankPool, tmp_path: Path, rank: int, moment: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        two_ranks.run(_dies_while_saving, tmp_path, rank, moment)
    assert time.monotonic() - start < 60
    assert failure.value.errors[rank].type_name == "Died"
    assert failure.value.errors[1 - rank].type_name not in ("Died", "Stranded")

    uninterrupted = Run({}, optimizer="sgd")
    state = uninterrupted.load(tmp_path)
    assert state.step == MOMENTS[moment]
    uninterrupted.save(tmp_path, step=3)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert not [name for name in left if name.startswith(".")], "what the killed save left is cleared by the next"


# Faults that are not deadly.


def _full_disk(directory: Path, rank: int) -> str:
    run = Run({"dp_shard": 2})
    run.save(directory, step=1)
    original = SafetensorsWriter.write

    def write(self: SafetensorsWriter, name: str, tensor: Tensor, start: int = 0) -> int:
        if dist.get_rank() == rank:
            raise OSError("no space left on device")
        return original(self, name, tensor, start)

    SafetensorsWriter.write = write  # type: ignore[method-assign]
    try:
        run.save(directory, step=2)
    except (OSError, WeightsError) as error:
        dist.barrier()  # the ranks are still in step
        return f"{type(error).__name__}: {error}"
    finally:
        SafetensorsWriter.write = original  # type: ignore[method-assign]
    return "saved"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_old_state(
    two_ranks: RankPool, tmp_path: Path, rank: int
) -> None:
    told = two_ranks.run(_full_disk, tmp_path, rank)
    assert told[rank] == "OSError: no space left on device"
    assert told[1 - rank] == f"OtherRankError: rank {rank}: OSError: no space left on device"
    assert Run({}).load(tmp_path).step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", step_directories.INDEX]


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "missing shard": ("rank-00001.safetensors", Path.unlink, "lacks rank-00001.safetensors"),
    "truncated shard": ("rank-00000.safetensors", lambda f: os.truncate(f, 5000), "truncated or corrupt"),
    "empty shard": ("rank-00000.safetensors", lambda f: os.truncate(f, 0), "truncated or corrupt"),
    "flipped bit in a shard": ("rank-00001.safetensors", _flip, "differs from the saved values"),
    "flipped bit in the manifest": ("manifest.json", _flip, "truncated or corrupt"),
    "truncated manifest": ("manifest.json", lambda f: os.truncate(f, 700), "truncated or corrupt"),
    "missing RNG states": ("rank-00001.rng.pt", Path.unlink, "lacks rank-00001.rng.pt"),
    "flipped bit elsewhere": ("shared.pt", _flip, "its content differs from the saved content"),
}


def _refusal(directory: Path) -> str:
    run = Run({"dp_shard": 2}, seed=3)
    before = {name: tensor.clone() for name, tensor in _state(run).items()}
    with pytest.raises(WeightsError) as refusal:
        run.load(directory)
    dist.barrier()
    assert run.optimizer.state == {}
    for name, tensor in _state(run).items():
        assert torch.equal(tensor.to_local(), before[name].to_local()), "a refused state changed a parameter"
    return f"{type(refusal.value).__name__}: {refusal.value}"


def _saved_on_two(directory: Path) -> None:
    Run({"dp_shard": 2}).save(directory, step=1)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_anything_changes(two_ranks: RankPool, tmp_path: Path, damage: str) -> None:
    two_ranks.run(_saved_on_two, tmp_path)
    name, harm, told = DAMAGE[damage]
    harm(tmp_path / "step-00000001" / name)
    messages = two_ranks.run(_refusal, tmp_path)
    assert all("CheckpointError" in message and told in message for message in messages)


def _resumed_while_written_to(directory: Path, name: str) -> str:
    """Return the error where another process changes a file once its checksums have been found right."""
    run, materialize = Run({"dp_shard": 2}, seed=3), load.materialize_entries
    file, harm, _ = DAMAGE[name]

    def harmed(*arguments: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            harm(directory / "step-00000001" / file)
        dist.barrier()
        materialize(*arguments)

    load.materialize_entries = harmed
    try:
        with pytest.raises(WeightsError) as refusal:
            run.load(directory)
    finally:
        load.materialize_entries = materialize
    dist.barrier()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("damage", "told"),
    [("truncated shard", "truncated or corrupt"), ("flipped bit in a shard", "was written to while it was loaded")],
)
def test_a_state_that_is_written_to_while_it_is_read_is_refused_on_every_rank(
    two_ranks: RankPool, tmp_path: Path, damage: str, told: str
) -> None:
    two_ranks.run(_saved_on_two, tmp_path)
    messages = two_ranks.run(_resumed_while_written_to, tmp_path, damage)
    assert any(told in message for message in messages)
    assert all(DAMAGE[damage][0] in message for message in messages)


class _Harm:
    def __reduce__(self) -> Any:
        return (os.system, ("touch harmed",))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(save, "serialize", lambda content: _pickled({**content, "harm": _Harm()}))
    Run({}).save(tmp_path, step=1)
    with pytest.raises(WeightsError, match="would run code"):
        Run({}).load(tmp_path)
    assert not (tmp_path / "harmed").exists()


def _pickled(content: dict[str, Any]) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_values_that_are_not_safe_to_load_are_refused_when_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="extra cannot be saved in a form that is safe to load"):
        save_training_state(tmp_path, model, step=1, extra={"path": tmp_path})
    assert not list(tmp_path.iterdir())


# A state of something else.


def test_every_difference_between_state_and_model_is_named(tmp_path: Path) -> None:
    save_training_state(tmp_path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), step=1)
    model = nn.Sequential(nn.Linear(2, 4), nn.Identity(), nn.Linear(3, 3).double())
    with pytest.raises(MismatchError) as refusal:
        load_training_state(tmp_path, model)
    for part in (
        "in 6 tensors",
        "0.weight: float32 of shape (3, 2) was saved, the model has float32 of shape (4, 2)",
        "2.bias: missing; the model has shape (3,)",
        "1.weight: saved, and not in the model",
    ):
        assert part in str(refusal.value)


def test_optimizers_with_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_training_state(tmp_path, model, SGD(model.parameters()), step=1)
    with pytest.raises(MismatchError, match=r"group 0 of optimizer 0 has 1 parameters and the saved one 2.*: bias\."):
        load_training_state(tmp_path, model, SGD([model.weight]))
    with pytest.raises(MismatchError, match="has 2 parameter groups, the saved one 1"):
        load_training_state(tmp_path, model, SGD([{"params": [model.weight]}, {"params": [model.bias]}]))
    with pytest.raises(MismatchError, match="2 optimizers given, and 1 were saved"):
        load_training_state(tmp_path, model, [SGD([model.weight]), SGD([model.bias])])
    with pytest.raises(OptionError, match="holds 2 parameters that are not the model's"):
        load_training_state(tmp_path, model, SGD(nn.Linear(2, 2).parameters()))


def test_the_state_of_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    save_training_state(tmp_path, model, AdamW(model.parameters()), step=1)
    other = SGD(model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(
        MismatchError, match=r"is a torch\.optim\.sgd\.SGD, and the state of a torch\.optim\.adamw\.AdamW"
    ):
        load_training_state(tmp_path, model, other)
    assert other.param_groups[0]["lr"] == 0.5
    assert not other.state
    load_training_state(tmp_path, model)


def test_names_outside_the_directory_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    outside = save_training_state(tmp_path / "other", model, step=1)
    save_training_state(tmp_path / "run", model, step=2)
    index = tmp_path / "run" / step_directories.INDEX
    for name in (f"../other/{outside.name}", str(outside), "..", 5, None):
        index.write_text(json.dumps({"states": [name]}))
        with pytest.raises(CheckpointError, match=r"is not the name of a directory in"):
            load_training_state(tmp_path / "run", model)
    with pytest.raises(OptionError, match="directory='' is empty"):
        load_training_state("", model)


def test_a_manifest_that_names_files_outside_its_directory_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    outside = save_training_state(tmp_path / "other", model, step=1)
    state = save_training_state(tmp_path / "run", model, step=2)
    manifest = state / "manifest.json"
    content = manifest.read_text().partition("\n")[2].removesuffix("\n")
    content = content.replace("rank-00000.safetensors", f"../../other/{outside.name}/rank-00000.safetensors")
    manifest.write_text(f"{zlib.crc32(content.encode()):08x}\n{content}\n")
    with pytest.raises(CheckpointError, match="which is not a file in it"):
        load_training_state(tmp_path / "run", model)


def test_several_optimizers_share_a_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizers = [SGD([model.weight], momentum=0.9), AdamW([model.bias])]
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    save_training_state(tmp_path, model, optimizers, step=1)
    fresh = [SGD([model.weight], momentum=0.9), AdamW([model.bias])]
    load_training_state(tmp_path, model, fresh)
    assert torch.equal(fresh[0].state[model.weight]["momentum_buffer"], model.weight.grad)
    assert fresh[1].state[model.bias]["step"] == 1


def test_a_model_on_meta_is_materialized(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_training_state(tmp_path, model, step=1)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="on the meta device, first weight"):
        save_training_state(tmp_path, empty, step=1)
    load_training_state(tmp_path, empty)
    assert torch.equal(empty.weight, model.weight)


def test_the_files_are_safetensors_and_json(tmp_path: Path) -> None:
    folder = save_training_state(tmp_path, nn.Linear(2, 2), step=7)
    checksum, content = (folder / "manifest.json").read_text().splitlines()
    assert len(checksum) == 8
    assert json.loads(content)["tensors"]["model/weight"]["shape"] == [2, 2]
