"""Operations that a layer adds on the host, counted by the benchmark on a fake process group."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.interpreter import environment

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_host.py"
#: Operations of DTensor in Python.
DISPATCHED = ("from_local", "to_local", "redistribute", "specs")


@pytest.fixture(scope="module")
def added() -> dict[str, dict[str, int]]:
    """Counts by contender, beyond those of the plain model."""
    names = ["tp by hand", "tp", "sp by hand", "sp", "tp, lora", "fsdp2 by hand", "fsdp2", "ep", "mixture, fsdp2"]
    names += ["packed", "cp", "recorded", "replayed", "sp, lora", "ep, efsdp", "dispatch alone"]
    names += ["mixture, fsdp2 by hand", "mixture, two groups by hand"]
    command = ["python", str(BENCHMARK), *names, "--rounds", "1", "--layers", "1"]
    env = {**environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\S.*?)\s+\S+ ms a layer, +\S+ added: (.*)$", done.stdout, re.MULTILINE)
    return {name: {key: int(count) for count, key in re.findall(r"(\d+) (\w+)", told)} for name, told in lines}


@pytest.mark.parametrize("name", ["tp", "sp", "fsdp2", "ep", "packed", "cp", "recorded", "replayed", "tp, lora"])
def test_a_layer_dispatches_no_operation_of_dtensor(added: dict[str, dict[str, int]], name: str) -> None:
    assert not set(DISPATCHED) & set(added[name])


@pytest.mark.parametrize("name", ["tp", "sp"])
def test_a_parallel_layer_needs_a_fraction_of_the_calls_of_one_by_hand(
    added: dict[str, dict[str, int]], name: str
) -> None:
    by_hand = added[f"{name} by hand"]
    assert added[name]["calls"] * 5 < by_hand["calls"]
    assert added[name]["functions"] * 1.5 < by_hand["functions"]


def test_fsdp2_costs_what_it_costs_by_hand(added: dict[str, dict[str, int]]) -> None:
    assert added["fsdp2"]["functions"] == added["fsdp2 by hand"]["functions"]
    assert added["fsdp2"]["calls"] <= added["fsdp2 by hand"]["calls"] * 1.02


@pytest.mark.parametrize(("name", "calls"), [("packed", 30), ("recorded", 100), ("replayed", 100)])
def test_documents_and_routes_cost_a_layer_few_calls(added: dict[str, dict[str, int]], name: str, calls: int) -> None:
    assert 0 < added[name]["calls"] <= calls


def test_dispatch_costs_a_fraction_of_fsdp2(added: dict[str, dict[str, int]]) -> None:
    by_hand = added["mixture, fsdp2 by hand"]["calls"]
    assert added["dispatch alone"]["calls"] <= 240
    assert added["ep"]["calls"] <= by_hand + 160  # experts that no other rank has are not in FSDP2
    assert added["ep, efsdp"]["calls"] <= added["mixture, two groups by hand"]["calls"] + 320


def test_attention_over_ranks_costs_few_calls_beside_fsdp2(added: dict[str, dict[str, int]]) -> None:
    # Attention to prefixes makes a record for each chunk and the keys before it, forward and backward.
    assert added["cp"]["calls"] <= added["fsdp2 by hand"]["calls"] + 160


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("tp", 16),
        ("sp", 20),
        ("tp, lora", 30),
        ("sp, lora", 50),
        ("dispatch alone", 6),
        ("ep", 8),
        ("ep, efsdp", 10),
        ("cp", 6),
    ],
)
def test_boundaries_are_single_autograd_functions(added: dict[str, dict[str, int]], name: str, functions: int) -> None:
    assert added[name]["functions"] <= functions
