"""The code of documentation pages, run as it stands there.

A page is Markdown.  Its ``python`` blocks run one after another in one namespace, which begins with the names that a
test gives it.  A block that begins with its command, ``# torchrun --nproc-per-node 2 FILE.py`` or ``# python FILE.py``,
and the blocks after it run in a fresh namespace on that many ranks.  The text of a comment behind a ``print`` has to be
printed there, with ``...`` for anything.
"""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^```python\n# (?:torchrun --nproc-per-node (\d+)|python) \w+\.py", flags=re.MULTILINE)
_PROMISE = re.compile(r"print\(.*\)  # (.+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text without indentation, and the line of the page that it begins on."""

    page: str
    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Part:
    """Blocks of a page that share a namespace, and how many ranks run them; 0 for none."""

    page: str
    ranks: int
    blocks: tuple[Block, ...]


def blocks(page: Path, language: str, text: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or of a piece of it, in one language."""
    whole = page.read_text()
    start = whole.index(text) if text is not None else 0
    return [
        Block(page.name, fence[2], textwrap.dedent(fence[3]), whole.count("\n", 0, start + fence.start(3)) + 1)
        for fence in _FENCE.finditer(text if text is not None else whole)
        if fence[2] == language
    ]


def parts(page: Path) -> list[Part]:
    """The runnable parts of a page, in order."""
    return list(_parts(page))


def _parts(page: Path) -> Iterator[Part]:
    text = page.read_text()
    borders = [(0, 0), *((command.start(), int(command[1] or 0)) for command in _COMMAND.finditer(text))]
    ends = [start for start, _ in borders[1:]] + [len(text)]
    for (start, ranks), end in zip(borders, ends, strict=True):
        if start < end and (code := blocks(page, "python", text[start:end])):
            yield Part(page.name, ranks, tuple(code))


def run(code: Iterable[Block], names: dict[str, Any]) -> list[str]:
    """Run blocks in the namespace ``names``; the faults are comments behind ``print`` that were not printed."""
    faults: list[str] = []
    if (name := names.get("__name__")) is not None:
        sys.modules.setdefault(name, ModuleType(name))  # where dataclasses look for a class's module
    for block in code:
        names["print"] = _checked_print(block, faults)
        exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
    return faults


def run_part(part: Part, names: dict[str, Any], folder: Path) -> list[str]:
    """Run a part in a folder and a fresh namespace, as a pool of ranks calls it."""
    with contextlib.chdir(folder):
        return run(part.blocks, dict(names))


def _checked_print(block: Block, faults: list[str]) -> Any:
    lines = block.text.splitlines()

    def checked(*values: Any, **options: Any) -> None:
        number = sys._getframe(1).f_lineno
        promise = _PROMISE.search(lines[number - block.line])
        said = options.get("sep", " ").join(map(str, values))
        if promise and not re.search(".*".join(map(re.escape, promise[1].split("..."))), said, flags=re.DOTALL):
            faults.append(f"{block.page}:{number} promises {promise[1]!r} and prints {said!r}")

    return checked
