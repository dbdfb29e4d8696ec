"""Which patterns of a plan a dotted path matches, found fast."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import translate


class Patterns:
    """Patterns in which each dotted part stands for exactly one part of a path, as a shell would match it.

    Args:
        patterns: the patterns; matches are told in this order.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._by_length: dict[int, list[tuple[str, list[re.Pattern[str] | str]]]] = defaultdict(list)
        for pattern in patterns:
            parts = _parts(pattern)
            self._by_length[len(parts)].append((pattern, [_compiled(part) for part in parts]))

    def match(self, path: str) -> list[str]:
        """The patterns that a path matches."""
        parts = _parts(path)
        return [
            pattern
            for pattern, expected in self._by_length.get(len(parts), ())
            # From the end, since most patterns share their beginning and differ in their last name.
            if all(_is_match(want, part) for want, part in zip(reversed(expected), reversed(parts), strict=True))
        ]


def _parts(path: str) -> list[str]:
    return path.split(".") if path else []


def _compiled(part: str) -> re.Pattern[str] | str:
    return re.compile(translate(part)) if any(character in part for character in "*?[") else part


def _is_match(want: re.Pattern[str] | str, part: str) -> bool:
    return want == part if isinstance(want, str) else want.match(part) is not None
