"""Files of a training state with right checksums and wrong content: refused on every rank before anything changes."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from fsdp_runtime import load_training_state, parallelize, save_training_state
from fsdp_runtime.errors import CheckpointError
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

WEIGHT = "model/weight"


def _manifest(state: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and its checksum."""
    path = state / "manifest.json"
    fields = json.loads(path.read_text().partition("\n")[2])
    change(fields)
    content = json.dumps(fields).encode()
    path.write_bytes(b"%08x\n%s\n" % (zlib.crc32(content), content))


def _content(state: Path, name: str, content: bytes) -> None:
    """Change a file and its checksum."""
    (state / name).write_bytes(content)
    _manifest(state, lambda fields: fields["files"].update({name: [len(content), zlib.crc32(content)]}))


def _object(state: Path, name: str, change: Callable[[Any], Any]) -> None:
    buffer = io.BytesIO()
    torch.save(change(torch.load(state / name, weights_only=False)), buffer)
    _content(state, name, buffer.getvalue())


def _shared(*path: Any, value: Any) -> Callable[[Path], None]:
    def change(content: Any) -> Any:
        at = content
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return content

    return lambda state: _object(state, "shared.pt", change)


def _tensor(**fields: Any) -> Callable[[Path], None]:
    return lambda state: _manifest(state, lambda manifest: manifest["tensors"][WEIGHT].update(fields))


def _chunk(**fields: Any) -> Callable[[Path], None]:
    return lambda state: _manifest(state, lambda manifest: manifest["tensors"][WEIGHT]["chunks"][0].update(fields))


def _field(name: str, value: Any) -> Callable[[Path], None]:
    return lambda state: _manifest(state, lambda fields: fields.update({name: value}))


def _link(name: str) -> Callable[[Path], None]:
    def change(state: Path) -> None:
        (state / name).rename(state.parent.parent / name)
        (state / name).symlink_to(state.parent.parent / name)

    return change


def _part(start: list[int], shape: list[int]) -> dict[str, Any]:
    return {"file": "rank-00000.safetensors", "start": start, "shape": shape, "checksum": 0}


CRAFTED: dict[str, Callable[[Path], None]] = {
    "negative start": _chunk(start=[-1, 0]),
    "negative shape": _chunk(shape=[-4, -4]),
    "start of another rank": _chunk(start=[0]),
    "start beyond the tensor": _chunk(start=[4, 0]),
    "float start": _chunk(start=[0.0, 0]),
    "bool start": _chunk(start=[False, 0]),
    "huge shape": _tensor(shape=[2**62, 2**62]),
    "huge shape and chunk": _tensor(shape=[2**40, 4], chunks=[_part([0, 0], [2**40, 4])]),
    "number beyond 64 bits": _chunk(start=[2**80, 0]),
    "no chunks": _tensor(chunks=[]),
    "missing chunk": _tensor(chunks=[_part([0, 0], [2, 4])]),
    "unknown dtype": _tensor(dtype="Tensor"),
    "dtype that is not the file's": lambda state: _manifest(
        state, lambda manifest: manifest["tensors"]["optimizer/0/weight/exp_avg"].update(dtype="int32")
    ),
    "dtype that is a list": _tensor(dtype=[]),
    "chunks that are a dict": _tensor(chunks={}),
    "further field": _tensor(more=1),
    "step is a string": _field("step", "a"),
    "negative step": _field("step", -1),
    "world size of 0": _field("world_size", 0),
    "mesh is a list": _field("mesh", []),
    "tensors is a list": _field("tensors", []),
    "format is a list": _field("format", []),
    "files without sizes": _field("files", {"shared.pt": []}),
    "files without shared.pt": lambda state: _manifest(state, lambda fields: fields["files"].pop("shared.pt")),
    "no tensors": lambda state: _manifest(state, lambda fields: fields.pop("tensors")),
    "path out of the directory": _chunk(file="../../rank-00000.safetensors"),
    "file that is no tensor file": _chunk(file="shared.pt"),
    "link of a rank's file": _link("rank-00000.safetensors"),
    "link of the shared file": _link("shared.pt"),
    "link of the manifest": _link("manifest.json"),
    "manifest nested too deep": lambda state: _raw_manifest(state, b"[" * 200_000),
    "manifest is a number": lambda state: _raw_manifest(state, b"1"),
    "shared.pt is a list": lambda state: _object(state, "shared.pt", lambda content: [1]),
    "shared.pt is empty": lambda state: _object(state, "shared.pt", lambda content: {}),
    "shared.pt is no archive": lambda state: _content(state, "shared.pt", b"PK\x03\x04junk"),
    "shared.pt has no bytes": lambda state: _content(state, "shared.pt", b""),
    "extra is a list": _shared("extra", value=[]),
    "optimizer is a string": _shared("optimizers", 0, value="adamw"),
    "groups of strings": _shared("optimizers", 0, "groups", value=["lr"]),
    "no placements": _shared("optimizers", 0, "placements", value=None),
    "unknown placement": _shared("optimizers", 0, "placements", "weight", "step", value="nowhere"),
    "state that is not stored": _shared("optimizers", 0, "placements", "weight", "more", value="plain"),
    "placement of a scalar as a parameter": _shared("optimizers", 0, "placements", "weight", "step", value="parameter"),
    "state of a parameter in no group": _shared("optimizers", 0, "values", value={"other": {}}),
    "generators without states": lambda state: _object(state, "rank-00000.rng.pt", lambda content: {"rng": {}}),
    "state of a generator cut off": lambda state: _object(state, "rank-00000.rng.pt", _cut_off),
}


def _raw_manifest(state: Path, content: bytes) -> None:
    (state / "manifest.json").write_bytes(b"%08x\n%s\n" % (zlib.crc32(content), content))


def _cut_off(content: Any) -> Any:
    content["rng"]["cpu"] = content["rng"]["cpu"][:8]
    return content


@pytest.mark.parametrize("name", CRAFTED)
def test_wrong_content_with_right_checksums_is_refused_before_anything_changes(tmp_path: Path, name: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = save_training_state(tmp_path / "states", model, optimizer, step=1)
    with torch.no_grad():
        model.weight.fill_(5)
    random = torch.get_rng_state()
    CRAFTED[name](state)
    with pytest.raises(CheckpointError, match=str(state)):
        load_training_state(state, model, optimizer)
    assert torch.equal(model.weight, torch.full((4, 4), 5.0))
    assert torch.equal(random, torch.get_rng_state())
    assert optimizer.state[model.weight]["exp_avg"].shape == (4, 4)


def test_links_inside_of_a_state_and_of_its_directory_are_read(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    state = save_training_state(tmp_path / "states", model, step=1)
    (state / "shared.pt").rename(state / "other.pt")
    (state / "shared.pt").symlink_to("other.pt")
    (tmp_path / "link").symlink_to(tmp_path / "states")
    assert load_training_state(tmp_path / "link", model).step == 1


def _refused(directory: Path, change: str) -> str:
    model = parallelize(tiny_model("Qwen3ForCausalLM", dtype=torch.float32), mesh_for({"dp_shard": 2}))
    save_training_state(directory, model, step=1)
    if dist.get_rank() == 0:
        _manifest(directory / "step-00000001", ON_TWO[change])
    dist.barrier()
    before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError) as refusal:
        load_training_state(directory, model)
    assert all(torch.equal(parameter.to_local(), before[name]) for name, parameter in model.named_parameters())
    return str(refusal.value)


ON_TWO: dict[str, Callable[[dict[str, Any]], object]] = {
    "one rank's chunks missing": lambda fields: [tensor["chunks"].pop() for tensor in fields["tensors"].values()],
}


@pytest.mark.parametrize("change", ON_TWO)
def test_every_rank_raises(two_ranks: RankPool, tmp_path: Path, change: str) -> None:
    first, second = two_ranks.run(_refused, tmp_path, change)
    assert first == second
    assert "lack a part of model/" in first
