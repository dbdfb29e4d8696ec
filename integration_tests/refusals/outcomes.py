"""What a provocation ended in, as data that a rank can send."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raised:
    """An error, and where our own code raised it.

    Args:
        error: the name of its class.
        message: its message.
        file: the last of our files in its traceback.
        line: the line there.
    """

    error: str
    message: str
    file: str
    line: int


def outcome(call: Callable[[], Any]) -> list[Raised]:
    """Return the error that a call raised and those that it was raised from; none where a test of the call failed."""
    try:
        call()
    except AssertionError as error:
        return [Raised("AssertionError", str(error), "", 0)]
    except Exception as error:
        return list(_chain(error))
    return []


def _chain(error: BaseException | None) -> Iterator[Raised]:
    while error is not None:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "/packages/" in each.filename]
        last = frames[-1] if frames else None
        where = ("", 0) if last is None else (last.filename, last.lineno or 0)
        yield Raised(type(error).__name__, str(error), *where)
        error = error.__cause__ or error.__context__
