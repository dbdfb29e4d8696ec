"""Kernels for convolutions and recurrences get the boundaries of packed documents; stand-ins have their signatures."""

from __future__ import annotations

import sys
from inspect import unwrap
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next import modeling_qwen3_next

from coverage.packing import PACKED_BOUND, ROWS, measure_packing
from coverage.table import entries, tiny_model
from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.steps.documents.recurrences import takes_boundaries

#: Numbers of documents in a call, by kernel.
Calls = dict[str, set[int]]


class _StandIns:
    """Functions with the signatures of the kernels, which run transformers' own functions on each document."""

    def __init__(self) -> None:
        self.calls: Calls = {}
        self.own: dict[str, Any] = {}

    def causal_conv1d_fn(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
        initial_states: Any = None, return_final_states: bool = False, activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        def run(part: slice, row: int) -> Tensor:
            own: Tensor = self.own["causal_conv1d_fn"](x[row : row + 1, :, part], weight, bias, activation)
            return own

        return self._by_rows("causal_conv1d_fn", run, seq_idx, x.shape[0], x.shape[2], dim=2)

    def mamba_chunk_scan_combined(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,  # noqa: N803  # the kernel's
        D: Any = None, z: Any = None, dt_bias: Any = None, initial_states: Any = None,  # noqa: N803
        seq_idx: Tensor | None = None, dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> Tensor:  # fmt: skip
        def run(part: slice, row: int) -> Tensor:
            tokens = [each[row : row + 1, part] for each in (x, dt)] + [A] + [e[row : row + 1, part] for e in (B, C)]
            own: Tensor = self.own["mamba_chunk_scan_combined"](
                *tokens, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit
            )
            return own

        return self._by_rows("mamba_chunk_scan_combined", run, seq_idx, x.shape[0], x.shape[1], dim=1)

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert cu_seqlens is None or q.shape[0] == 1  # as the kernel checks
        self.calls.setdefault("chunk_gated_delta_rule", set()).add(len(bounds) - 1)
        parts = [
            self.own["chunk_gated_delta_rule"](
                *(each[:, start:stop] for each in (q, k, v)), g=g[:, start:stop], beta=beta[:, start:stop],
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )[0]
            for start, stop in zip(bounds, bounds[1:], strict=False)  # noqa: RUF007
        ]  # fmt: skip
        return torch.cat(parts, 1), None

    def _by_rows(self, name: str, run: Any, seq_idx: Tensor | None, rows: int, length: int, dim: int) -> Tensor:
        numbers = torch.zeros(rows, length, dtype=torch.int32) if seq_idx is None else seq_idx
        assert numbers.dtype == torch.int32
        assert numbers.shape == (rows, length)
        found, count = [], 0
        for row in range(rows):
            bounds = [0, *(numbers[row].diff().nonzero().flatten() + 1).tolist(), length]
            count += len(bounds) - 1
            parts = [run(slice(*bounds[at : at + 2]), row) for at in range(len(bounds) - 1)]
            found.append(torch.cat(parts, dim))
        self.calls.setdefault(name, set()).add(count)
        return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "module", "functions"),
    [
        (
            "qwen3_next",
            modeling_qwen3_next,
            {
                "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn"),
                "torch_chunk_gated_delta_rule": ("fla", "chunk_gated_delta_rule"),
            },
        ),
        (
            "nemotron_h",
            modeling_nemotron_h,
            {
                "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn"),
                "mamba2_chunk_scan": ("mamba_ssm", "mamba_chunk_scan_combined"),
            },
        ),
    ],
)
def test_installed_kernels_get_the_boundaries_of_documents(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any, functions: dict[str, tuple[str, str]]
) -> None:
    stand_ins = _StandIns()
    for function, (package, kernel) in functions.items():
        assert not takes_boundaries(getattr(module, function), "seq_idx")
        assert not takes_boundaries(getattr(module, function), "cu_seqlens")
        stand_ins.own[kernel] = unwrap(getattr(module, function))
        installed = ModuleType(package)
        setattr(installed, kernel, getattr(stand_ins, kernel))
        monkeypatch.setitem(sys.modules, package, installed)
        wrapped = use_kernel_func_from_hub_with_fallback(kernel, package)(stand_ins.own[kernel])
        monkeypatch.setattr(module, function, wrapped)
    mesh = MeshSpec().build(device_type="cpu")
    prepared = lambda model: parallelize(model, mesh, plan=None, packed_sequences=True)  # noqa: E731
    found = measure_packing(tiny_model(entries()[name]), prepared)
    assert max(found.error, found.leak, found.gradient_leak) <= PACKED_BOUND
    documents = sum(map(len, ROWS))
    # All documents in one call, and one each in the calls for documents alone; none in batches by length.
    assert stand_ins.calls == {kernel: {1, documents} for _, kernel in functions.values()}
