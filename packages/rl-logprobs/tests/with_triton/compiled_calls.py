"""What calls launch, compiled as Triton's launcher specialises it, for a GPU that need not be there (nox -s triton)."""

import math
from importlib import import_module

import pytest
import torch

import rl_logprobs
from rl_logprobs import LinearLogits
from rl_logprobs.norms import chunk_table, grad_norm, local_norms
from rl_logprobs.softmax import backends, tile_pair, triton_backend, triton_divergence, triton_softmax

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Kernels of calls on CPU tensors, compiled for sm_90 and not run."""
    from triton import language, runtime
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        """A driver with a target and no device."""

        def __init__(self):
            self.get_current_stream = self.get_current_device = lambda *device: 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    compiled = []

    def launch(module, kernel, grid, device, **arguments):
        given = {
            name: getattr(language, str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value
            for name, value in arguments.items()
        }
        compiled.append(getattr(import_module(f"rl_logprobs.{module}"), kernel).warmup(grid=grid, **given))

    runtime.driver.set_active(Driver())
    for module in ("softmax.triton_kernels", "softmax.triton_divergence_kernels", "norms.triton_kernels"):
        import_module(f"rl_logprobs.{module}")  # before the variable, which would make interpreted kernels
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # calls take CPU tensors
    monkeypatch.setenv(backends.VARIABLE, "triton")
    for module in (triton_backend, triton_softmax, triton_divergence, chunk_table):
        monkeypatch.setattr(module, "launch", launch)
    for module in (rl_logprobs.sources, rl_logprobs.logprobs, tile_pair, local_norms, grad_norm):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    yield compiled
    assert all(hasattr(kernel, "asm") for kernel in compiled)


@pytest.mark.parametrize("width", [1, 2, 50_257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_statistics_compile(launches, dtype, width):
    every = {"entropy": True, "argmax": True, "target_rank": True, "temperature": torch.ones(1, 3)}
    for options in ({}, every, {"temperature": 0.7, "inplace_forward": True}):
        leaf = torch.zeros(1, 3, width, dtype=dtype, requires_grad=True)
        found = rl_logprobs.token_statistics(leaf * 1, torch.zeros(1, 3, dtype=torch.int64), **options)
        (found.logprobs + found.logsumexp + (found.entropy if "entropy" in options else 0)).sum().backward()
    assert len(launches) == 12


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "logit_scale": 0.5}])
@pytest.mark.parametrize("trained", [False, True])
def test_heads_compile(launches, trained, options):
    hidden, weight = torch.zeros(7, 6, requires_grad=True), torch.zeros(29, 6, requires_grad=trained)
    bias, targets = torch.zeros(29), torch.zeros(7, dtype=torch.int64)
    found = rl_logprobs.linear_token_statistics(hidden, weight, targets, bias=bias, entropy=trained, **options)
    (found.logprobs + (found.entropy if trained else 0)).sum().backward()
    assert len(launches) == (4 if trained else 3)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_compile(launches, beta):
    student = LinearLogits(torch.zeros(7, 6, requires_grad=True), torch.zeros(29, 6, requires_grad=True), softcap=2.0)
    rl_logprobs.token_divergence(student, torch.zeros(7, 29), beta=beta, temperature=0.5).sum().backward()
    logits = torch.zeros(2, 3, 29, dtype=torch.bfloat16, requires_grad=True)
    rl_logprobs.token_divergence(logits, torch.zeros(2, 3, 29), beta=beta).sum().backward()
    assert len(launches) == (6 if 0 < beta < 1 else 4)


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf])
def test_norms_and_clipping_compile(launches, order):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    parameters = [torch.nn.Parameter(torch.zeros(101, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    rl_logprobs.grad_norm(parameters, order)
    grad_norm.clip_grads_with_norm_(parameters, 1.0, torch.tensor(2.0))
    assert len(launches) == 8
