"""Async tensor parallelism is a request to the compiler: asked for rightly, and refused where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_runtime import BackendError, MeshSpec, OptionError, parallelize
from fsdp_runtime.steps import Compile
from fsdp_runtime.steps.compile import async_compile_options
from harness.models import tiny_model
from harness.ranks import RankPool, RanksFailed


class _Mesh(SimpleNamespace):
    """The part of a mesh that is looked at."""

    def size(self, axis: int) -> int:
        return self.sizes[self.mesh_dim_names[axis]]


CUDA = _Mesh(device_type="cuda", mesh_dim_names=("tp",), sizes={"tp": 2})


def test_the_compiler_is_asked_beside_the_users_own_options() -> None:
    asked = async_compile_options(
        CUDA, {"dynamic": False, "options": {"epilogue_fusion": True}}, sequence_parallel=True
    )
    assert asked == {"dynamic": False, "options": {"epilogue_fusion": True, "_micro_pipeline_tp": True}}
    layer = nn.Linear(2, 2)
    layer.compile(**async_compile_options(CUDA, {}, sequence_parallel=True))  # torch checks the names of options


@pytest.mark.parametrize(
    ("compile_options", "sequence_parallel", "message"),
    [
        ({}, False, "overlaps the collectives of sequence parallelism: it needs a mesh with tp larger than 1"),
        ({"backend": "aot_eager"}, True, "needs compile=True"),
        ({"mode": "max-autotune"}, True, "cannot be combined with mode='max-autotune'"),
    ],
)
def test_what_leaves_nothing_to_overlap_is_refused(compile_options: Any, sequence_parallel: bool, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        async_compile_options(CUDA, compile_options, sequence_parallel=sequence_parallel)


def _on_the_cpu() -> None:
    model = tiny_model("LlamaForCausalLM")
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    try:
        parallelize(model, mesh, sequence_parallel=True, compile=Compile(async_tensor_parallel=True))
    except BackendError:
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters()), "the model was changed"
        raise


def test_the_cpu_is_refused_before_anything_changes(two_ranks: RankPool) -> None:
    with pytest.raises(
        RanksFailed, match="BackendError: async_tensor_parallel needs CUDA devices with peer access, an"
    ):
        two_ranks.run(_on_the_cpu)
