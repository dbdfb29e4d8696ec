"""Support for tools that trace a loss without running it, such as ``fsdp_runtime.dry_run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_logprobs.softmax.row_blocks import represent_tiles, tile_multiplicity
from rl_logprobs.tensors import assume_accelerator


@contextmanager
def traced_on_accelerator() -> Iterator[Callable[[], int]]:
    """Compute on CPU or fake tensors as on an accelerator's, and run only representative tiles."""
    # Yields a function that returns the number of tiles that the running operator represents.
    with assume_accelerator(), represent_tiles():
        yield tile_multiplicity
