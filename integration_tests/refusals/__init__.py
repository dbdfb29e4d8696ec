"""Calls that provoke each refusal, by the file that raises the error, its class and a part of its message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]

#: By file, as ``fsdp_runtime/keywords.py``; below it by class and part of the message, as
#: ``"OptionError: write one of"``.
Provocations = Mapping[str, Mapping[str, Call | tuple[Call, ...]]]
