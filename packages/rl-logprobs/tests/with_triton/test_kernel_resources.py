"""The Triton kernels compiled for GPUs that need not be there: registers, spills, and bytes in flight.

Here the variants of the calls that train a policy; ``benchmarks/kernel_resources.py`` prints all.
"""

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="nox -s tests and nox -s triton install it")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def resources(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("kernel_resources")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_no_default_call_spills_registers(resources, target):
    device = resources.DEVICES[target]
    for variant in resources.training_variants(torch.bfloat16):
        found = resources.compile_for(variant, device)
        assert found.spilled == 0, f"{variant} on {target} spills {found.spilled} bytes a thread"
        assert found.programs >= 1
    for variant in resources.training_variants(torch.bfloat16)[:2]:  # each reads all logits: the memory is to be busy
        assert resources.compile_for(variant, device).bytes_in_flight >= device.bytes_needed


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_more_columns_a_thread_would_spill(resources, monkeypatch):
    monkeypatch.setattr(resources.triton_backend, "COLUMNS_PER_THREAD", 64)
    widest = resources.training_variants(torch.bfloat16)[2]
    assert resources.compile_for(widest, resources.DEVICES["sm_90"]).spilled > 0
