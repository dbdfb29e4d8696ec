"""Lets the reference pages show docstrings as they are meant: reST roles become code, which links where it can."""

from __future__ import annotations

import re
from typing import Any

import griffe

LITERAL = re.compile(r"::\n\n")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Rewrites ``:func:`name``` in every docstring to the name as code, and ``::`` before a block to a colon."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = LITERAL.sub(":\n\n", text).replace("``", "`")
