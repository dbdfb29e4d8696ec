"""What a user may write, as what is meant: speeds by axis, dtypes, meshes, plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch

from fsdp_runtime.errors import EstimateError, MeshError
from fsdp_runtime.estimate.report.format import parse_bandwidth
from fsdp_runtime.mesh.spec import FLATTENED, MeshSpec

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def dtype_named(name: str | torch.dtype) -> torch.dtype:
    """The dtype that a short name (``"bf16"``), or torch's own (``"bfloat16"``), stands for."""
    if isinstance(name, torch.dtype):
        return name
    found = _DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise EstimateError(f"dtype {name!r}: write one of {', '.join(_DTYPES)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype."""
    return next((name for name, known in _DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def bandwidths(told: Mapping[str, float | str] | float | str | None) -> dict[str, float]:
    """Bytes a second by axis; one number stands for all axes, under ``""``."""
    if told is None:
        return {}
    if not isinstance(told, Mapping):
        return {"": parse_bandwidth(told)}
    known = [field.name for field in fields(MeshSpec)] + list(FLATTENED)
    if unknown := [axis for axis in told if axis not in known]:
        raise EstimateError(f"bandwidth of {', '.join(unknown)}: the axes are {', '.join(known)}")
    return {axis: parse_bandwidth(speed) for axis, speed in told.items()}


def mesh_spec(told: MeshSpec | Mapping[str, int]) -> MeshSpec:
    """A mesh's sizes, every one known."""
    if not isinstance(told, MeshSpec):
        known = [field.name for field in fields(MeshSpec)]
        if unknown := [axis for axis in told if axis not in known]:
            raise MeshError(f"the mesh has axes {', '.join(unknown)}; the axes are {', '.join(known)}")
        told = MeshSpec(**told)
    if inferred := [axis for axis, size in told.sizes.items() if size == -1]:
        raise MeshError(f"axis {inferred[0]} is -1, and a dry run has no world to infer it from: give its size")
    return told


def plan_name(plan: object) -> str:
    """How the settings call a plan."""
    if plan is None:
        return "none"
    return plan if isinstance(plan, str) else "custom"
