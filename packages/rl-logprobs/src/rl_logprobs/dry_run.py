"""For tools that trace a loss without running it, such as ``fsdp_runtime.dry_run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_logprobs.devices import assume_accelerator
from rl_logprobs.softmax.row_blocks import represent_tiles, tile_multiplicity


@contextmanager
def traced_on_accelerator() -> Iterator[Callable[[], int]]:
    """Compute on CPU or fake tensors as on an accelerator's, and run only the tiles that the others repeat.

    Yields:
        A function that returns the number of tiles for which the running operator stands.

    Example:
        >>> from rl_logprobs.dry_run import traced_on_accelerator
        >>> with traced_on_accelerator() as multiplicity:
        ...     multiplicity()
        1
    """
    with assume_accelerator(), represent_tiles():
        yield tile_multiplicity
