"""Activations on the host in every row of the coverage table: gradients are the same bits, and no bytes stay there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coverage.measure import default_dtype
from coverage.table import UNBUILDABLE, coverage_entries, tiny_model
from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.memory import host_copies
from fsdp_runtime.memory.host_copies import HELD_BYTES
from fsdp_runtime.steps import ActivationCheckpointing
from harness.lazy_copies import LazyCopies
from harness.parity import logits_of

MODES = ("none", "block", "selective")
#: A block of it writes into results that selective checkpointing has kept, so that its first forward is repeated.
DEFAULT = ("llama4_text",)
ROWS = [name for name in coverage_entries() if name not in UNBUILDABLE]


def _gradients(model: nn.Module, step: Any) -> dict[str, Tensor | None]:
    parallelize(model, MeshSpec().build(device_type="cpu"), plan=None, activation_checkpointing=step)
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    logits_of(model, {"input_ids": ids}).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _differences(plain: nn.Module, mode: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters with other gradients, the faults of the copies, and the bytes left on the host."""
    copies = LazyCopies()
    expected = _gradients(copy.deepcopy(plain), ActivationCheckpointing(mode))
    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "make_copies", lambda _device: copies)
        actual = _gradients(copy.deepcopy(plain), ActivationCheckpointing(mode, offload=True))
    pairs = {name: (gradient, actual[name]) for name, gradient in expected.items()}
    differing = [name for name, (one, other) in pairs.items() if not (one is other or torch.equal(one, other))]
    left = [f"{HELD_BYTES.now} bytes are left"] if HELD_BYTES.now else []
    return [*differing, *copies.faults, *left, *([] if copies.log else ["nothing was copied"])]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in ROWS]
)
def test_activations_on_the_host_give_a_row_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = coverage_entries()[name]
    with default_dtype(torch.float64 if entry.default_float64 else torch.float32):
        plain = tiny_model(entry)
        assert [_differences(plain, mode, monkeypatch) for mode in MODES] == [[]] * len(MODES)
