"""The Triton kernels compiled for GPUs that need not be there: spills and bytes in flight (nox -s triton)."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def resources(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("kernel_resources")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_no_default_call_spills_registers(resources, target):
    device = resources.DEVICES[target]
    assert resources.spilling(resources.training_variants(torch.bfloat16), [target]) == []
    for variant in resources.training_variants(torch.bfloat16)[:2]:  # each reads all logits: the memory is to be busy
        assert resources.compile_for(variant, device).bytes_in_flight >= device.bytes_needed


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_more_columns_a_thread_would_spill(resources, monkeypatch):
    monkeypatch.setattr(resources.triton_backend, "COLUMNS_PER_THREAD", 64)
    widest = resources.training_variants(torch.bfloat16)[2]
    (found,) = resources.spilling([widest], ["sm_90"])
    assert found.startswith(f"| {widest} | sm_90 |")  # how many registers are left to it is ptxas's choice
