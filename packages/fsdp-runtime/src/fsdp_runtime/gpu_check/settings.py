"""The settings of the parity check: meshes, options of ``parallelize``, kinds of models, attention of packed rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

#: Attention implementations for packed rows: the package that each one needs, and whether a CPU and float32 have it.
KERNELS = {
    "sdpa": ("torch", True),
    "eager": ("torch", True),
    "flex_attention": ("triton", False),
    "flash_attention_2": ("flash_attn", False),
    "flash_attention_3": ("flash_attn_interface", False),
}
_WAYS = ("allgather", "ulysses", "ring")
_SP, _PACKED = {"sequence_parallel": True}, {"packed_sequences": True}
_RECOMPUTED = [{"activation_checkpointing": mode} for mode in ("block", "selective")]


@dataclass(frozen=True)
class Setting:
    """A mesh, options of ``parallelize``, a kind of model, and the attention of packed rows (empty: whole rows)."""

    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "dense"
    packed: str = ""
    half: bool = True  # compared in bfloat16 too

    def __str__(self) -> str:
        """Return the kind, axes and options as the report names them."""
        axes = [f"{name}={size}" for name, size in self.sizes.items()]
        options = [name if value is True else f"{name}={value}" for name, value in self.options.items()]
        return f"{self.kind}, {' '.join([*axes, *options, *([self.packed] if self.packed else [])])}"


def settings(size: int, *, shared: bool = False) -> list[Setting]:
    """Return the settings for a number of ranks; ranks that share a device leave axes alone to a world of two."""
    if size == 1:
        one = {"dp_shard": 1}
        whole = [Setting(one, kind=kind) for kind in ("dense", "mixture", "images", "hybrid")]
        return [*whole, *(Setting(one, _PACKED, packed=kernel) for kernel in KERNELS)]
    alone = [
        Setting({"dp_shard": size}),
        Setting({"tp": size}),
        Setting({"tp": size}, _SP),
        *(Setting({"cp": size}, {"context_parallel": way}) for way in _WAYS),
        Setting({"dp_shard": size, "ep": size}, kind="mixture"),
        Setting({"tp": size}, kind="mixture"),
    ]
    return (alone if size == 2 or not shared else []) + (_features() if size == 2 else _products(size))


def _features() -> list[Setting]:
    """Return the settings of two ranks beside one axis alone."""
    cases = [
        *(Setting({"tp": 2}, {**options, "compile": True}) for options in ({}, _SP)),
        *(Setting({"tp": 2}, {**_SP, **options}) for options in _RECOMPUTED),
        *(Setting({"dp_shard": 2}, options) for options in _RECOMPUTED),
        *(Setting({axis: 2}, kind=kind) for axis in ("dp_shard", "tp") for kind in ("LoRA", "value head", "images")),
        Setting({"tp": 2}, _SP, "hybrid"),
        Setting({"cp": 2}, kind="hybrid"),
    ]
    packed = [Setting({"cp": 2}, {**_PACKED, "context_parallel": way}, packed="sdpa") for way in _WAYS]
    return packed + [replace(case, half=False) for case in cases]


def _products(size: int) -> list[Setting]:
    """Return products of axes for four or more ranks."""
    half = size // 2
    cases = [
        Setting({"dp_shard": half, "tp": 2}, _SP),
        Setting({"dp_replicate": 2, "dp_shard": half}),
        Setting({"cp": 2, "tp": half}),
        Setting({"dp_shard": half, "tp": 2, "ep": 2}, kind="mixture"),
        Setting({"dp_shard": half, "cp": 2}, _PACKED, packed="sdpa"),
    ]
    if half > 2:
        cases += [
            Setting({"dp_shard": 2, "cp": 2, "tp": half // 2}, {**_SP, **_RECOMPUTED[0]}),
            Setting({"dp_shard": half, "tp": 2, "ep": half}, _SP, "mixture"),
        ]
    return cases
