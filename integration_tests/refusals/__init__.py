"""Calls that provoke each refusal, by the file that refuses and a piece of its message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]

#: By file, as ``fsdp_runtime/keywords.py``; by piece of the message, or beginning of
#: ``function: message``, that one row of the file has.
Provocations = Mapping[str, Mapping[str, Call | tuple[Call, ...]]]
