"""Uses of torch's private API that end with a torch in which a public one takes their place: these tests then fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

OLDEST = tuple(
    map(int, re.findall(r"torch>=(\d+)\.(\d+)", (Path(__file__).parents[1] / "pyproject.toml").read_text())[0])
)


@pytest.mark.parametrize(
    ("owner", "public", "private"),
    [
        (DeviceMesh, "flatten", "_flatten"),
        (DeviceMesh, "concatenate", "_concatenate"),
        (DeviceMesh, "get_root_mesh", "_get_root_mesh"),
        (FSDPModule, "get_fsdp_state", "_get_fsdp_state"),
        (nn.Module, "forward_pre_hooks", "_forward_pre_hooks"),
        (nn.Module, "is_compiled", "_compiled_call_impl"),
        (dist, "get_default_store", "distributed_c10d._get_default_store"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torch_has_no_public_form_of_a_private_name_that_is_used(owner: Any, public: str, private: str) -> None:
    assert not hasattr(owner, public), f"use {public} instead of {private}"


def test_the_oldest_torch_lacks_the_new_names_of_flat_collectives() -> None:
    assert OLDEST < (2, 13), "torch 2.13 renamed the functions: call all_gather_single and reduce_scatter_single"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_causal_bias_cannot_be_made_inside_a_dispatch_mode() -> None:
    with _Mode(), pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        causal_lower_right(2, 3) + torch.zeros(2, 3)
