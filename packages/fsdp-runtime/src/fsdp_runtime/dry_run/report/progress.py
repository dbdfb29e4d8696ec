"""Show the progress of a long command: one rewritten line on a terminal, one line per step elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

#: Seconds below which the expected time is not shown.
_SHORT = 90.0


class ProgressLine:
    """Show finished steps on a stream (standard error); called as ``progress(name, done, steps)``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._rewrites = self._stream.isatty()
        self._started = time.monotonic()

    def __call__(self, name: str, done: int, steps: int) -> None:
        """Show that ``done`` of ``steps`` are finished, ``name`` as the last, and the expected time of the rest."""
        # Finished steps give the time, so it is shown from the first step on, for more than a minute.
        rest = (time.monotonic() - self._started) / done * (steps - done) if done else 0.0
        left = f" (about {round(rest / 60)} min left)" if rest >= _SHORT else ""
        line = f"{done}/{steps} {name}{left}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}" if self._rewrites else f"{line}\n", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self._rewrites:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
