"""Numbers as people write and read them: sizes, rates, axes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdp_runtime.errors import EstimateError, MeshError
from fsdp_runtime.mesh.spec import MeshSpec

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*"


def parse_bytes(value: int | str) -> int:
    """Bytes from a number, or from text as ``"80GiB"`` (powers of 1024) or ``"80GB"`` (powers of 1000).

    Raises:
        EstimateError: it is not a size, or not a positive one.
    """
    if isinstance(value, str):
        found = re.fullmatch(_NUMBER + r"([kmgtpe]?)(i?)B", value.strip(), re.IGNORECASE)
        if found is None and re.fullmatch(r"\d+", value.strip()) is None:
            raise EstimateError(f"{value!r} is no size in bytes: write 80GiB, 80GB or a number of bytes")
        value = int(value) if found is None else round(_scaled(found[1], found[2], 1024 if found[3] else 1000))
    if value <= 0:
        raise EstimateError(f"a size of {value} bytes: give a positive number")
    return value


def parse_bandwidth(value: float | str) -> float:
    """Bytes a second from a number, or from text as ``"450GB/s"``; ``"400Gb/s"`` and ``"400Gbit/s"`` are bits.

    Raises:
        EstimateError: it is not a rate, or not a positive one.
    """
    if isinstance(value, str):
        # The case of B and b tells bytes from bits; that of prefixes tells nothing.
        found = re.fullmatch(_NUMBER + r"([kmgtpeKMGTPE]?)(i?)(B|b|bit)(?:/s|ps)", value.strip())
        if found is None and (found := re.fullmatch(_NUMBER + "()()()", value.strip())) is None:
            raise EstimateError(
                f"{value!r} is no bandwidth: write 450GB/s (bytes), 400Gb/s (bits) or a number of bytes a second"
            )
        value = _scaled(found[1], found[2], 1024 if found[3] else 1000) / (8 if found[4] in ("b", "bit") else 1)
    if value <= 0:
        raise EstimateError(f"a bandwidth of {value} bytes a second: give a positive number")
    return float(value)


def parse_flops(value: float | str) -> float:
    """Floating-point operations a second from a number, or from text as ``"400TFLOP/s"`` or ``"400TFLOPS"``.

    Raises:
        EstimateError: it is not a rate, or not a positive one.
    """
    if isinstance(value, str):
        found = re.fullmatch(_NUMBER + r"([kmgtpe]?)(?:FLOPS?(?:/s)?)?", value.strip(), re.IGNORECASE)
        if found is None:
            raise EstimateError(f"{value!r} is no rate of operations: write 400TFLOP/s or a number of them a second")
        value = _scaled(found[1], found[2], 1000)
    if value <= 0:
        raise EstimateError(f"a rate of {value} operations a second: give a positive number")
    return float(value)


def parse_mesh(text: str) -> MeshSpec:
    """A mesh from text as ``"dp_replicate=4,dp_shard=32,tp=8"``; axes that are not named have size 1.

    Raises:
        MeshError: an axis is unknown or comes twice, or a size is none.
    """
    sizes: dict[str, int] = {}
    for axis, size in _pairs(text, MeshError, "dp_shard=32,tp=8"):
        if axis not in MeshSpec().sizes:
            raise MeshError(f"the mesh {text!r} has an axis {axis!r}; the axes are {', '.join(MeshSpec().sizes)}")
        if re.fullmatch(r"-?\d+", size) is None:
            raise MeshError(f"axis {axis} has size {size!r}: give a positive integer, as {axis}=8")
        sizes[axis] = int(size)
    return MeshSpec(**sizes)


def split_bandwidths(text: str) -> Mapping[str, str] | str:
    """Bandwidths by axis from text as ``"tp=450GB/s,dp_shard=50GB/s"``, or one for all axes as ``"50GB/s"``.

    Raises:
        EstimateError: an axis has no value, or comes twice.
    """
    return dict(_pairs(text, EstimateError, "tp=450GB/s,dp_shard=50GB/s")) if "=" in text else text


def readable_bytes(count: float) -> str:
    """Bytes with three digits and a binary unit, as ``"34.2 GiB"``."""
    unit, scale = binary_scale(count)
    return f"{count:.0f} bytes" if scale == 1 else f"{_three_digits(count / scale)} {unit}"


def binary_scale(count: float) -> tuple[str, int]:
    """The largest binary unit of which there is at least one, to three digits, and its bytes."""
    power = next(power for power in reversed(range(len(_BINARY))) if power == 0 or abs(count) >= 0.9995 * 1024**power)
    return _BINARY[power], 1024**power


def readable_seconds(seconds: float) -> str:
    """A duration with three digits and a unit, as ``"11.2 ms"``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def readable_count(count: float, unit: str = "") -> str:
    """A count with three digits and a decimal prefix, as ``"70.6 G"``, and with a unit ``"1.20 PFLOP"``."""
    power = 0
    while abs(count) >= 999.5 and power < len(_DECIMAL) - 1:
        count /= 1000
        power += 1
    return f"{count:g} {unit}".rstrip() if power == 0 else f"{_three_digits(count)} {_DECIMAL[power]}{unit}"


def readable_mesh(mesh: Mapping[str, int]) -> str:
    """The axes of a mesh that are larger than 1, as ``"dp_shard=32 tp=8"``."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.items() if size != 1) or "one rank"


def _pairs(text: str, error: type[Exception], example: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise error(f"{part.strip()!r} in {text!r} is no axis=value: write {example}")
        if name in dict(pairs):
            raise error(f"axis {name} comes twice in {text!r}")
        pairs.append((name, value))
    return pairs


def _scaled(number: str, prefix: str, base: int) -> float:
    return float(number) * float(base ** _PREFIXES[prefix.lower()])


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.0f}" if size >= 99.95 or number == 0 else f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"
