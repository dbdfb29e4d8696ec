"""The installed release."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

from fsdp_runtime.errors import BackendError

#: The first release with the table and the order of weight conversions that this package follows.
OLDEST = (5, 10)


@cache
def installed_release() -> str:
    """The installed transformers release, read from disk once: every module with buffers asks."""
    return metadata.version("transformers")


def require_known_release() -> None:
    """Refuse a transformers release that renames, fuses or initialises differently from the known releases."""
    release = installed_release()
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendError(
            f"transformers {release} is installed. This package does not know its checkpoint names and fused weights: "
            f"it reads, writes and streams weights of models of transformers {oldest} and later: "
            f"pip install 'transformers>={oldest}'"
        )
