"""Adapt docstrings to the reference pages: reST roles become code, doctest examples become sections of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

LITERAL = re.compile(r"::\n\n")
EXAMPLE = re.compile(r"^( *)Example:\n(?=\s*>>> )", flags=re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Rewrite ``:func:`name``` to the name as code, ``::`` before a block to a colon, ``Example:`` to ``Examples:``.

    Griffe parses the section ``Examples`` as code, and the text under ``Example`` as Markdown.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", EXAMPLE.sub(r"\1Examples:\n", obj.docstring.value))
            obj.docstring.value = LITERAL.sub(":\n\n", text).replace("``", "`")
