"""Adapt docstrings to the reference pages: roles and examples become code, and comments of fields become text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

LITERAL = re.compile(r"::\n\n")
EXAMPLE = re.compile(r"^( *)Example:\n(?=\s*>>> )", flags=re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?([^`]+)`")
FIELDS = re.compile(r"^(?:Args|Attributes):$", flags=re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Rewrite ``:func:`name``` to the name as code, ``::`` before a block to a colon, ``Example:`` to ``Examples:``.

    Griffe parses the section ``Examples`` as code, and the text under ``Example`` as Markdown.  A class without a list
    of its fields gets one from the comments beside them.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is None:
            return
        if obj.is_class and not FIELDS.search(obj.docstring.value) and (fields := [*_commented_fields(obj)]):
            obj.docstring.value = "\n".join([obj.docstring.value, "", "Attributes:", *fields])
        text = ROLE.sub(r"`\1`", EXAMPLE.sub(r"\1Examples:\n", obj.docstring.value))
        obj.docstring.value = LITERAL.sub(":\n\n", text).replace("``", "`")


def _commented_fields(cls: griffe.Object) -> Iterator[str]:
    """Yield a line for each field of a class with a comment at its end, or in the lines above it."""
    lines = cls.lines
    for name, member in cls.members.items():
        if not member.is_attribute or name.startswith("_") or "property" in member.labels or member.lineno is None:
            continue
        place = member.lineno - (cls.lineno or 1)
        comment = lines[place].partition("  # ")[2]
        while not comment and place and lines[place - 1].lstrip().startswith("# "):
            above = place - 1
            while lines[above - 1].lstrip().startswith("# "):
                above -= 1
            comment = " ".join(line.strip().removeprefix("# ") for line in lines[above:place])
        if comment:
            yield f"    {name}: {comment.removesuffix('.')}."
