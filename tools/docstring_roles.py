"""Lets the reference pages show docstrings as they are meant: reST roles become code, which links where it can."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Rewrites ``:func:`name``` in every docstring to the name as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value).replace("``", "`")
