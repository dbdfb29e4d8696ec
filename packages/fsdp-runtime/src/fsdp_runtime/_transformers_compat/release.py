"""The installed release."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

from fsdp_runtime.errors import BackendError

#: The first release with the table of weight conversions, and order of applying it, that this package follows.
OLDEST = (5, 10)


@cache
def installed_release() -> str:
    """The installed transformers release, read from disk once: buffers ask module by module."""
    return metadata.version("transformers")


def require_known_release() -> None:
    """Refuse a transformers release that renames, fuses or initialises differently from the known releases."""
    release = installed_release()
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendError(
            f"transformers {release} is installed, whose checkpoints' names and fused weights this package does not "
            f"know; it reads, writes and streams weights of models of transformers {oldest} and later: "
            f"pip install 'transformers>={oldest}'"
        )
