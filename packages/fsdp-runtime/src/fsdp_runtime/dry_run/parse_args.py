"""Parse arguments of ``estimate`` and of the command line: sizes, rates, dtypes, meshes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_runtime.dry_run.allocator.caching import AllocatorSettings
from fsdp_runtime.errors import EstimateError, MeshError, OptionError
from fsdp_runtime.mesh import FLATTENED, MeshSpec
from fsdp_runtime.values import DTYPES, floating_dtype

if TYPE_CHECKING:
    import torch

    from fsdp_runtime import FSDP2

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_ALLOCATOR_OPTIONS = (
    "expandable_segments:True, max_split_size_mb:512, garbage_collection_threshold:0.8, roundup_power2_divisions:4"
)
#: Options of the allocator by name: the field, and how its value is read.
_ALLOCATOR: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", {"True": True, "False": False}.__getitem__),
    "max_split_size_mb": ("max_split_size", lambda text: int(text) * 2**20),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "roundup_power2_divisions": ("roundup_power2_divisions", int),
}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*"
_AXES = [field.name for field in fields(MeshSpec)]


def parse_bytes(value: int | str) -> int:
    """Return bytes from a number, or from text such as ``"80GiB"`` (powers of 1024) or ``"80GB"`` (powers of 1000)."""
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([kmgtpe]?)(i?)B", value.strip(), re.IGNORECASE)
        if match is None and (match := re.fullmatch(r"(\d+)()()", value.strip())) is None:
            raise EstimateError(f"{value!r} is not a size in bytes: write 80GiB, 80GB or a number of bytes")
        value = round(_scaled(match[1], match[2], 1024 if match[3] else 1000))
    if value <= 0:
        raise EstimateError(f"a size of {value} bytes: give a positive number")
    return value


def parse_bandwidth(value: float | str) -> float:
    """Return bytes per second from a number, or from text: ``"450GB/s"``, or bits as ``"400Gb/s"``, ``"400Gbit/s"``."""
    if isinstance(value, str):
        # The case of B and b separates bytes from bits; the case of prefixes has no meaning.
        match = re.fullmatch(_NUMBER + r"([kmgtpeKMGTPE]?)(i?)(B|b|bit)(?:/s|ps)", value.strip())
        if match is None and (match := re.fullmatch(_NUMBER + "()()()", value.strip())) is None:
            raise EstimateError(
                f"{value!r} is not a bandwidth: write 450GB/s (bytes), 400Gb/s (bits) or a number of bytes per second"
            )
        value = _scaled(match[1], match[2], 1024 if match[3] else 1000) / (8 if match[4] in ("b", "bit") else 1)
    if value <= 0:
        raise EstimateError(f"a bandwidth of {value} bytes per second: give a positive number")
    return float(value)


def parse_flops(value: float | str) -> float:
    """Return floating-point operations per second from a number, or from text: ``"400TFLOP/s"``, ``"400TFLOPS"``."""
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([kmgtpe]?)(?:FLOPS?(?:/s)?)?", value.strip(), re.IGNORECASE)
        if match is None:
            raise EstimateError(f"{value!r} is not a rate of operations: write 400TFLOP/s or a number per second")
        value = _scaled(match[1], match[2], 1000)
    if value <= 0:
        raise EstimateError(f"a rate of {value} operations per second: give a positive number")
    return float(value)


def parse_mesh(text: str) -> MeshSpec:
    """Return a mesh from text such as ``"dp_replicate=4,dp_shard=32,tp=8"``; axes that are not named have size 1."""
    sizes: dict[str, int] = {}
    for axis, size in _pairs(text, MeshError, "dp_shard=32,tp=8"):
        if axis not in _AXES:
            raise MeshError(f"the mesh {text!r} has an axis {axis!r}; the axes are {', '.join(_AXES)}")
        if re.fullmatch(r"-?\d+", size) is None:
            raise MeshError(f"axis {axis} has size {size!r}: give a positive integer, as {axis}=8")
        sizes[axis] = int(size)
    return MeshSpec(**sizes)


def require_model_source(source: Any) -> None:
    """Check that a model can be built from a value."""
    name = type(source).__name__
    if not isinstance(source, type) and hasattr(source, "named_parameters"):
        raise EstimateError(
            f"{name} is a model, which a dry run would change: pass its config, or a function that builds it"
        )
    if not (isinstance(source, (str, Path)) or callable(source) or hasattr(source, "model_type")):
        raise EstimateError(
            f"model is a {name}: pass a config.json, a Hugging Face config, or a function that builds the model"
        )


def parse_mesh_spec(mesh: MeshSpec | Mapping[str, int]) -> MeshSpec:
    """Return a mesh with all sizes known."""
    if not isinstance(mesh, MeshSpec):
        if unknown := [axis for axis in mesh if axis not in _AXES]:
            raise MeshError(f"the mesh has axes {', '.join(unknown)}; the axes are {', '.join(_AXES)}")
        mesh = MeshSpec(**mesh)
    if inferred := [axis for axis, size in mesh.sizes.items() if size == -1]:
        raise MeshError(f"axis {inferred[0]} is -1, and a dry run has no world to infer it from: give its size")
    return mesh


def parse_bandwidths(value: Mapping[str, float | str] | float | str | None) -> dict[str, float]:
    """Return bytes per second by axis; one number applies to all axes, under ``""``."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {"": parse_bandwidth(value)}
    known = [*_AXES, *FLATTENED, "efsdp"]
    if unknown := [axis for axis in value if axis not in known]:
        raise EstimateError(f"bandwidth of {', '.join(unknown)}: the axes are {', '.join(known)}")
    return {axis: parse_bandwidth(speed) for axis, speed in value.items()}


def split_bandwidths(text: str) -> Mapping[str, str] | str:
    """Return bandwidths by axis from ``"tp=450GB/s,dp_shard=50GB/s"``; text without an axis, ``"50GB/s"``, as is."""
    return dict(_pairs(text, EstimateError, "tp=450GB/s,dp_shard=50GB/s")) if "=" in text else text


def parse_allocator(text: str, *, device_memory: int | None = None) -> AllocatorSettings:
    """Return the settings of the caching allocator from text such as ``"expandable_segments:True"``."""
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition(":")
        if name not in _ALLOCATOR:
            raise EstimateError(f"allocator={text!r}: {name!r} is not modelled; known are {_ALLOCATOR_OPTIONS}")
        field, read = _ALLOCATOR[name]
        try:
            settings[field] = read(value)
        except (KeyError, ValueError) as error:
            raise EstimateError(f"allocator={text!r}: {part!r} has no valid value") from error
    if settings.get("garbage_collection_threshold"):
        settings["device_memory"] = device_memory
    return AllocatorSettings(**settings)


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a short name (``"bf16"``) or of torch's own (``"bfloat16"``)."""
    try:
        if (dtype := floating_dtype("dtype", name)) is not None:
            return dtype
    except OptionError as error:
        raise EstimateError(str(error)) from None
    raise EstimateError(f"dtype is None: write one of {', '.join(DTYPES)}")


def parse_fsdp(
    dtype: str = "bf16", *, master_dtype: str | None = None, offload: bool = False, reshard_after_forward: bool = True
) -> FSDP2:
    """Return the options of FSDP2 that computes in ``dtype`` and reduces gradients in ``master_dtype``."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from fsdp_runtime import FSDP2

    master = None if master_dtype is None else parse_dtype(master_dtype)
    return FSDP2(
        mp_policy=None if master is None else MixedPrecisionPolicy(parse_dtype(dtype), reduce_dtype=master),
        master_dtype=master,
        offload_policy=CPUOffloadPolicy() if offload else None,
        reshard_after_forward=reshard_after_forward,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype."""
    written = str(dtype).removeprefix("torch.")
    return next((name for name, known in DTYPES.items() if known == written), written)


def _pairs(text: str, error: type[Exception], example: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not (name and equals and value):
            raise error(f"{part.strip()!r} in {text!r} is not axis=value: write {example}")
        if name in dict(pairs):
            raise error(f"axis {name} is named twice in {text!r}")
        pairs.append((name, value))
    return pairs


def _scaled(number: str, prefix: str, base: int) -> float:
    return float(number) * float(base ** _PREFIXES[prefix.lower()])
