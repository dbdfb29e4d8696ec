"""Count the wordings that make a reader of the sources read a sentence twice: ``python -m harness.prose``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
#: A clause in the place of a noun, by its name.  A line counts once per wording.
WORDINGS = {
    "whose": r"\bwhose\b",
    "that of, those of": r"\b(that|those) of\b",
    "what is, are, the, a": r"\bwhat (is|are|the|a|an)\b",
    "of its own": r"\bof (its|their|your|one's) own\b",
    "alike, anew, apart": r"\b(alike|anew|apart)\b",
    "of which": r"\bof which\b",
    "that there are": r"\bthat there (is|are)\b",
    "the local found": r"\bfound\b(?= *[:=,)\].])|\b(for|in|return|if) found\b",
}
_QUOTED = re.compile(r"``[^`]*``|\"[^\"\s]*\"|'[^'\s]*'")


def count(lines: Iterable[str]) -> dict[str, int]:
    """Return the number of lines with each wording; a quoted wording does not count."""
    bare = [_QUOTED.sub("", line) for line in lines]
    return {name: sum(bool(re.search(wording, line, re.I)) for line in bare) for name, wording in WORDINGS.items()}


def count_package(package: str) -> dict[str, int]:
    """Return the counts of one package's sources."""
    files = sorted((PACKAGES / package / "src").rglob("*.py"))
    return count(line for path in files for line in path.read_text(encoding="utf-8").splitlines())


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return counts by package as lines of text."""
    width = max(map(len, WORDINGS))
    rows = [f"{'':{width}}  " + "  ".join(f"{package:>12}" for package in counts)]
    rows += [f"{name:{width}}  " + "  ".join(f"{counts[package][name]:12}" for package in counts) for name in WORDINGS]
    return "\n".join(rows)


if __name__ == "__main__":
    packages = sorted(path.name for path in PACKAGES.iterdir())
    sys.stdout.write(table({package: count_package(package) for package in packages}) + "\n")
