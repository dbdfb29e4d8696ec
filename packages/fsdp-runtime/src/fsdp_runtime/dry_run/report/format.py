"""Format bytes, durations and counts for people."""

from __future__ import annotations

_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def format_bytes(count: float, unit: str | None = None) -> str:
    """Return bytes with three digits and a binary unit, such as ``"34.2 GiB"``."""
    # In ``unit``, unless there is less than a hundredth of it; the largest one by default.
    unit, scale = binary_scale(count) if unit is None else (unit, 1024 ** _BINARY.index(unit))
    if scale > 1 and 0 < count / scale < 0.01:
        unit, scale = binary_scale(count)
    return f"{count:.0f} bytes" if scale == 1 else f"{_three_digits(count / scale)} {unit}"


def binary_scale(count: float) -> tuple[str, int]:
    """Return the largest binary unit that ``count`` fills, rounded to three digits, and its bytes."""
    power = next(power for power in reversed(range(len(_BINARY))) if power == 0 or abs(count) >= 0.9995 * 1024**power)
    return _BINARY[power], 1024**power


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits and a unit, such as ``"11.2 ms"``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def format_count(count: float, unit: str = "") -> str:
    """Return a count with three digits and a decimal prefix: ``"70.6 G"``, with a unit ``"1.20 PFLOP"``."""
    power = 0
    while abs(count) >= 999.5 and power < len(_DECIMAL) - 1:
        count /= 1000
        power += 1
    return f"{count:g} {unit}".rstrip() if power == 0 else f"{_three_digits(count)} {_DECIMAL[power]}{unit}"


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.0f}" if size >= 99.95 or number == 0 else f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"
