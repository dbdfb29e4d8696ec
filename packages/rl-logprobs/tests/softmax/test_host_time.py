"""Operators and launches of a call on a GPU, counted on tensors without values with a stand-in for the kernels."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rl_logprobs
from rl_logprobs.norms import chunk_table
from rl_logprobs.softmax import backends, fused_linear, tile_pair, triton_backend, triton_divergence, triton_softmax

META = torch.device("meta")


class Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names[operator.__name__] += 1
        return operator(*args, **kwargs or {})


@pytest.fixture
def launches(monkeypatch):
    """The kernels of launches, none of which runs."""
    counted = Counter()

    def launch(module, kernel, grid, device, **arguments):
        assert all(size > 0 for size in grid)
        counted[kernel] += 1

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backends, "import_module", lambda name: None)
    for module in (triton_backend, triton_divergence, triton_softmax, chunk_table):
        monkeypatch.setattr(module, "launch", launch)
    for module in (rl_logprobs.sources, rl_logprobs.logprobs, tile_pair):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    return counted


def test_token_logprobs_on_a_gpu_dispatches_few_operators(launches):
    logits = torch.empty(64, 1000, device=META, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64, device=META)
    with Operators() as forward:
        found = rl_logprobs.token_logprobs(logits, targets, backend="triton")
    assert forward.names.total() <= 6, forward.names
    assert launches == {"reduce_kernel": 1, "finish_kernel": 1}
    gradient = torch.empty_like(found)
    with Operators() as backward:
        torch.autograd.grad(found, logits, gradient)
    assert forward.names.total() + backward.names.total() <= 10, backward.names
    assert launches.total() == 4


@pytest.mark.parametrize("options", [{"entropy": True}, {"argmax": True, "target_rank": True}, {"temperature": 0.7}])
def test_token_statistics_with_options_dispatches_few_operators(launches, options):
    logits = torch.empty(4, 16, 1000, device=META, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4, 16, dtype=torch.int64, device=META)
    with Operators() as both:
        found = rl_logprobs.token_statistics(logits, targets, shift=True, backend="triton", **options)
        found.logprobs.sum().backward()
    assert both.names.total() <= 22, both.names
    assert launches.total() == 4


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_token_logprobs_takes_few_launches_per_tile(launches, monkeypatch, frozen, bias):
    monkeypatch.setattr(fused_linear, "ACCELERATOR_TILE", (32, 256))
    monkeypatch.setattr(fused_linear, "operand_dtype", lambda hidden, weight: weight.dtype)
    counts = []
    for vocab in (2048, 4096):
        hidden = torch.empty(32, 16, device=META, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, 16, device=META, dtype=torch.bfloat16, requires_grad=not frozen)
        offset = torch.empty(vocab, device=META, dtype=torch.bfloat16, requires_grad=not frozen) if bias else None
        targets = torch.zeros(32, dtype=torch.int64, device=META)
        for backward in (False, True):
            launches.clear()
            with Operators() as operators:
                found = rl_logprobs.linear_token_logprobs(hidden, weight, targets, bias=offset)
                if backward:
                    operators.names.clear(), launches.clear()
                    found.sum().backward()
            counts.append(_launched(operators.names) + launches.total())
    tiles = 2048 // 256
    assert counts[2] - counts[0] == (4 if frozen else 2) * tiles
    # A product that torch adds in place is one launch on a GPU, and two where it needs a temporary.
    assert counts[3] - counts[1] <= (0 if frozen else 5 + bias) * tiles


@pytest.mark.parametrize(("beta", "passes"), [(0.0, 1), (0.5, 2)])
def test_token_divergence_takes_few_launches_per_tile(launches, monkeypatch, beta, passes):
    monkeypatch.setattr(fused_linear, "ACCELERATOR_TILE", (32, 256))
    monkeypatch.setattr(fused_linear, "operand_dtype", lambda hidden, weight: weight.dtype)
    counts = []
    for vocab in (2048, 4096):
        student, teacher = (
            rl_logprobs.LinearLogits(
                *(
                    torch.empty(size, 16, device=META, dtype=torch.bfloat16, requires_grad=trained)
                    for size in (32, vocab)
                )
            )
            for trained in (True, False)
        )
        for backward in (False, True):
            launches.clear()
            with Operators() as operators:
                found = rl_logprobs.token_divergence(student, teacher, beta=beta)
                if backward:
                    operators.names.clear(), launches.clear()
                    found.sum().backward()
            counts.append(_launched(operators.names) + launches.total())
    tiles = 2048 // 256
    assert counts[2] - counts[0] == 3 * passes * tiles  # two products and a kernel
    # Two products and a kernel, and a product for each gradient, of which one may need a temporary.
    assert counts[3] - counts[1] <= 6 * tiles


def _launched(names):
    """The operators that launch a kernel, of which others make views or memory."""
    free = ("empty", "slice", "t.", "view", "select", "detach", "alias", "new_empty", "expand", "transpose")
    return sum(count for name, count in names.items() if not name.startswith(free))


def test_clip_grad_norm_of_many_gradients_takes_two_launches(launches, monkeypatch):
    def parameters(dtype, number=50):
        listed = [torch.nn.Parameter(torch.empty(10, dtype=dtype)) for _ in range(number)]
        for parameter in listed:
            parameter.grad = torch.ones_like(parameter)
        return listed

    monkeypatch.setattr("rl_logprobs.norms.local_norms.runs_triton", lambda device: True)
    monkeypatch.setattr("rl_logprobs.norms.grad_norm.runs_triton", lambda device: True)
    monkeypatch.setattr("rl_logprobs.norms.grad_norm.has_cpu_costs", lambda device: False)
    both = parameters(torch.bfloat16) + parameters(torch.float32)
    with Operators() as first:
        rl_logprobs.clip_grad_norm_(both, 1.0)
    with Operators() as second:
        rl_logprobs.clip_grad_norm_(both, 1.0)
    assert launches == {"power_kernel": 4, "scale_kernel": 4}  # of two dtypes, two calls
    assert second.names.total() < 20 < first.names.total(), second.names  # the table is made once
    of_one_dtype = parameters(torch.bfloat16, number=300)
    rl_logprobs.clip_grad_norm_(of_one_dtype, 1.0)
    launches.clear()
    with Operators() as third:
        rl_logprobs.clip_grad_norm_(of_one_dtype, 1.0)
    assert third.names.total() + launches.total() <= 12, third.names  # torch's own clip dispatches 8 operators
