"""The backends: torch everywhere, Triton only where it is asked for and can run."""

import subprocess
import sys

import pytest
import torch

import rl_logprobs
from harness.interpreter import environment
from rl_logprobs.softmax.backends import TORCH, VARIABLE, kernels

CPU = torch.device("cpu")


def test_torch_serves_calls_that_name_no_backend(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert kernels(None, CPU) is TORCH
    assert kernels("torch", torch.device("cuda")) is TORCH


def test_the_environment_sets_the_backend_of_calls_that_name_none(monkeypatch):
    monkeypatch.setenv(VARIABLE, "tritium")
    assert kernels("torch", CPU) is TORCH
    with pytest.raises(rl_logprobs.errors.OptionError, match="torch, triton, got 'tritium'"):
        kernels(None, CPU)


def test_triton_refuses_logits_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(rl_logprobs.errors.OptionError, match="on a GPU, these are on cpu"):
        rl_logprobs.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), backend="triton")


def test_triton_that_is_not_installed_is_named_with_the_fix(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rl_logprobs.softmax.triton_backend", raising=False)
    monkeypatch.delattr(rl_logprobs.softmax, "triton_backend", raising=False)
    with pytest.raises(rl_logprobs.errors.OptionError, match="pip install triton"):
        rl_logprobs.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), backend="triton")


def test_the_package_never_imports_triton_unasked():
    unasked = {name: value for name, value in environment().items() if name != VARIABLE}
    code = (
        "import sys, torch, rl_logprobs;"
        "rl_logprobs.token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]));"
        "assert 'rl_logprobs.softmax.triton_backend' not in sys.modules"
    )
    subprocess.run(["python", "-c", code], check=True, env=unasked)
