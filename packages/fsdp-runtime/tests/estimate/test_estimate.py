from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_runtime import Estimate, EstimateError, MeshError, estimate

WIDTH, VOCABULARY, LENGTH = 16, 32, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width, bias=False), nn.Linear(width, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Lookup(Block):
    """Has a part whose result has as many elements as values are unlike."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Distinct()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(super().forward(hidden))


class Distinct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scale(hidden) + torch.unique(hidden).sum()


class Decoder(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def twelve() -> nn.Module:
    return Decoder([Block() for _ in range(12)])


def alternating() -> nn.Module:
    return Decoder([Block(8), *(Block(width) for _ in range(10) for width in (16, 32))])


def with_lookup() -> nn.Module:
    return Decoder([Lookup() for _ in range(2)])


def mean(model: nn.Module, inputs: Any) -> Tensor:
    return model(**inputs).float().logsumexp(-1).mean()


def run(model: Any = twelve, mesh: Any = None, **options: Any) -> Estimate:
    return estimate(
        model, mesh or {"dp_shard": 4}, **{"seq_len": LENGTH, "logprobs": mean, "clip": False, "plan": None} | options
    )


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(("model", "traced"), [(twelve, (3, 4)), (alternating, (5, 7))])
def test_a_few_blocks_tell_what_all_of_them_do(model: Any, traced: Any, checkpointing: str) -> None:
    mesh = {"dp_shard": 8}  # of 4, a block's gradients are as large as its activations, and all blocks peak alike
    few = run(model, mesh, activation_checkpointing=checkpointing)
    every = run(model, mesh, activation_checkpointing=checkpointing, exact=True)
    assert few.settings.traced == traced
    assert every.settings.exact
    assert (few.memory, few.traffic, few.flops) == (every.memory, every.traffic, every.flops)


def test_shards_gradients_and_moments_are_those_of_one_rank() -> None:
    found = run(optimizer="adamw")
    everything = (12 * 2 * WIDTH * WIDTH + 2 * VOCABULARY * WIDTH) * 2  # bytes in bf16
    assert found.memory.held.parameters == everything // 4
    assert found.memory.after_backward.gradients == everything // 4
    steps = 4 * (12 * 2 + 2)
    assert found.memory.held.optimizer_state == 2 * everything // 4 + steps


def test_every_unit_is_gathered_twice_but_the_last_and_the_root() -> None:
    gathered = {item.phase: item.count for item in run().traffic if item.kind == "all_gather"}
    assert gathered == {"forward": 13, "backward": 11}


def test_time_floors_follow_the_bandwidth_of_the_axis() -> None:
    found = run(mesh={"dp_replicate": 2, "dp_shard": 4}, bandwidth={"dp_shard": "1kB/s"})
    timed = {item.axis: item.seconds for item in found.traffic if item.kind == "all_gather"}
    moved = {item.axis: item.moved for item in found.traffic if item.kind == "all_gather"}
    assert timed == {"dp_shard": moved["dp_shard"] / 1000}
    assert {item.seconds for item in found.traffic if item.axis == "dp_replicate"} == {None}


def test_master_weights_are_held_in_their_dtype_and_gathered_in_the_other() -> None:
    plain, master = run(), run(master_dtype="fp32")
    assert master.memory.held.parameters == 2 * plain.memory.held.parameters
    gathers = [sum(item.nbytes for item in e.traffic if item.kind == "all_gather") for e in (plain, master)]
    assert gathers[0] == gathers[1]


def test_offload_moves_shards_to_the_host() -> None:
    on_host, on_device = run(offload=True), run()
    assert on_host.memory.held.parameters == 0
    assert on_host.memory.host.parameters == on_device.memory.held.parameters
    assert on_host.memory.peak.total < on_device.memory.peak.total


def test_a_part_that_depends_on_values_is_named_and_the_rest_estimated() -> None:
    found = run(with_lookup)
    (left_out,) = [item for item in found.assumed if not item.counted]
    assert "unique" in left_out.operator
    assert left_out.module == "blocks.*.mlp"
    assert found.flops > 0


def test_too_little_memory_brings_advice_with_numbers() -> None:
    found = run(device_memory="1KiB", mesh={"dp_replicate": 2, "dp_shard": 2})
    assert found.fits is False
    assert any("dp_shard=4" in item.change and item.saves for item in found.advice)
    assert run(device_memory="1GiB").advice == ()


def test_json_has_the_totals() -> None:
    found = run()
    told = json.loads(found.to_json())
    assert told["memory"]["peak"]["total"] == found.memory.peak.total
    assert told["settings"]["traced"] == [3, 4]


def test_no_world_is_left_behind() -> None:
    run()
    assert not dist.is_initialized()


def test_a_world_that_runs_already_is_refused(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(EstimateError, match="another process"):
            run()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 4}, "from 0 to 3"),
        ({"dtype": "int8"}, "bf16"),
        ({"optimizer": "lion"}, "adamw"),
        ({"logprobs": "no.such.function"}, "package.module.function"),
        ({"model": twelve()}, "pass its config"),
    ],
)
def test_values_that_cannot_be_are_refused_with_those_that_can(options: Any, says: str) -> None:
    with pytest.raises(EstimateError, match=says):
        run(**options)


def test_axes_must_be_known_and_sized() -> None:
    with pytest.raises(MeshError, match="ep"):
        run(mesh={"ep": 2})
    with pytest.raises(MeshError, match="-1"):
        run(mesh={"dp_shard": -1})


def test_a_config_of_remote_code_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "no_such_model", "auto_map": {"AutoConfig": "a.B"}}))
    with pytest.raises(EstimateError, match=r"no_such_model.*auto_map"):
        run(tmp_path)
    with pytest.raises(EstimateError, match="does not exist"):
        run(tmp_path / "nothing")
