"""Show the progress of a long command: a bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_CELLS = 24

#: Seconds below which the expected time is not shown.
_SHORT = 90.0


class ProgressBar:
    """Show finished steps on a stream; called as ``progress(name, done, steps)``.

    Args:
        stream: standard error by default, which keeps standard output clean.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._redraws = self._stream.isatty()
        self._started = time.monotonic()

    def __call__(self, name: str, done: int, steps: int) -> None:
        """Show that ``done`` of ``steps`` are finished, the last one being ``name``, and the expected time of a rest.

        The time is that of the finished steps, so it is shown from the first one on, for more than a minute.
        """
        rest = (time.monotonic() - self._started) / done * (steps - done) if done else 0.0
        if rest >= _SHORT:
            name = f"{name} (about {round(rest / 60)} min left)"
        if self._redraws:
            filled = _CELLS * done // max(steps, 1)
            line = f"[{'#' * filled}{'.' * (_CELLS - filled)}] {done}/{steps} {name}"
            self._write(line[: shutil.get_terminal_size().columns - 1])
        else:
            self._stream.write(f"{done}/{steps} {name}\n")
            self._stream.flush()

    def close(self) -> None:
        """Clear the bar."""
        if self._redraws:
            self._write("")

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
