"""The backends: Triton on a GPU that has it, torch elsewhere."""

import subprocess
import sys

import pytest
import torch

import rl_logprobs
from harness.interpreter import environment
from rl_logprobs.dry_run import traced_on_accelerator
from rl_logprobs.softmax import backends
from rl_logprobs.softmax.backends import VARIABLE, chosen_backend, runs_triton

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def unset(monkeypatch):
    """No variable names a backend, and Triton is looked for again."""
    for name in (VARIABLE, "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    backends._triton_imports.cache_clear()
    yield monkeypatch
    backends._triton_imports.cache_clear()


def test_triton_serves_gpus_and_torch_other_devices(unset):
    unset.setattr(backends, "import_module", lambda name: None)
    assert chosen_backend(None, GPU) == "triton"
    assert runs_triton(GPU)
    assert chosen_backend("torch", GPU) == "torch"
    assert chosen_backend(None, CPU) == "torch"
    assert not runs_triton(CPU)
    with traced_on_accelerator():  # on any tensors; no kernel is launched
        assert runs_triton(CPU)
        unset.setenv(VARIABLE, "torch")
        assert not runs_triton(CPU)
    assert not runs_triton(GPU)


def test_torch_serves_gpus_without_triton_and_says_so_once(unset, caplog):
    unset.setitem(sys.modules, "triton", None)
    assert [chosen_backend(None, GPU) for _ in range(3)] == ["torch"] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_environment_sets_the_backend_of_calls_that_name_none(unset):
    unset.setenv(VARIABLE, "tritium")
    assert chosen_backend("torch", CPU) == "torch"
    with pytest.raises(rl_logprobs.errors.OptionError, match="torch, triton, got 'tritium'"):
        chosen_backend(None, CPU)


def test_triton_refuses_logits_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(rl_logprobs.errors.OptionError, match="on a GPU, these are on cpu"):
        rl_logprobs.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), backend="triton")


def test_triton_that_is_not_installed_is_named_with_the_fix(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(rl_logprobs.errors.OptionError, match="pip install triton"):
        rl_logprobs.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), backend="triton")


def test_no_call_on_a_cpu_imports_the_kernels():
    unasked = {name: value for name, value in environment().items() if name != VARIABLE}
    code = (
        "import sys, torch, rl_logprobs;"
        "rl_logprobs.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]));"
        "assert 'rl_logprobs.softmax.triton_kernels' not in sys.modules"
    )
    subprocess.run(["python", "-c", code], check=True, env=unasked)
