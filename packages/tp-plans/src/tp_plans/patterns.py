"""Which patterns of a plan a dotted path matches, found fast."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import translate


@dataclass
class _Node:
    """What may follow a beginning that has matched: names, shell patterns of a name, and patterns that end here."""

    names: dict[str, _Node] = field(default_factory=dict)
    shells: dict[str, tuple[re.Pattern[str], _Node]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


class Patterns:
    """Ordered patterns: each dotted part is a shell pattern for one part of a path."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = list(patterns)
        self._root = _Node()
        for index, pattern in enumerate(self._patterns):
            node = self._root
            for part in _parts(pattern):
                if any(sign in part for sign in "*?["):
                    node = node.shells.setdefault(part, (re.compile(translate(part)), _Node()))[1]
                else:
                    node = node.names.setdefault(part, _Node())
            node.ends.append(index)

    def match(self, path: str) -> list[str]:
        """The patterns that a path matches."""
        reached = [self._root]
        for part in _parts(path):
            reached = [after for node in reached for after in _following(node, part)]
        return [self._patterns[index] for index in sorted(index for node in reached for index in node.ends)]


def wildcard(path: str) -> str:
    """Return the pattern of a path for all blocks: every number in it becomes a star."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _following(node: _Node, part: str) -> list[_Node]:
    after = [branch for shell, branch in node.shells.values() if shell.match(part)] if node.shells else []
    if part in node.names:
        after.append(node.names[part])
    return after


def _parts(path: str) -> list[str]:
    return path.split(".") if path else []
