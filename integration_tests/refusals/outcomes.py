"""Errors of a provocation, as data that a rank can send."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raised:
    """An error, and the file of ours that raised it.

    Args:
        error: the name of its class.
        message: its message.
        file: the last of our files in its traceback.
    """

    error: str
    message: str
    file: str


def outcome(call: Callable[[], Any]) -> list[Raised]:
    """Return the error that a call raised and the errors that it was raised from."""
    try:
        call()
    except AssertionError as error:
        return [Raised("AssertionError", str(error), "")]
    except Exception as error:
        return list(_chain(error))
    return []


def _chain(error: BaseException | None) -> Iterator[Raised]:
    while error is not None:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        ours = [file for file in files if "/packages/" in file]
        yield Raised(type(error).__name__, str(error), ours[-1] if ours else "")
        error = error.__cause__ or error.__context__
