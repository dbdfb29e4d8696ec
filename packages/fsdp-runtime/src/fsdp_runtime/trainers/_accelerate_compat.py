"""Every use of accelerate's and datasets' private API, with its reason; tested on accelerate 1.15 and datasets 5.2.

``Accelerator`` keeps prepared and registered objects under private names, for its own ``save_state`` only.

An ``IterableDataset`` holds its part of a job (``split_dataset_by_node``) in ``_distributed``.  Objects of the module
``datasets.iterable_dataset`` hold one another, the generators that shuffle them, and in ``kwargs`` their files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

_MODULE = "datasets.iterable_dataset"


def further_state(accelerator: Any) -> dict[str, list[Any]]:
    """Return the prepared schedulers, and the objects given to ``register_for_checkpointing``."""
    return {"schedulers": accelerator._schedulers, "registered objects": accelerator._custom_objects}


def node_of(dataset: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks that a stream was split for, ``None`` for an unsplit stream."""
    node = getattr(dataset, "_distributed", None)
    return None if node is None else (node.rank, node.world_size)


def description(dataset: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a stream's row order and file names as text; equal on ranks that read the same rows."""
    orders, files = [], []
    for part in _parts(dataset):
        for name, value in vars(part).items():
            if isinstance(value, numpy.random.Generator):
                orders.append(repr(value.bit_generator.state))
            elif name == "kwargs":
                files += [text for option in value.values() for text in _names(option)]
    return tuple(orders), tuple(files)


def _parts(part: Any) -> Iterator[Any]:
    """Iterate over the datasets objects in a stream."""
    if type(part).__module__ != _MODULE:
        return
    yield part
    for value in vars(part).values():
        for inner in value if isinstance(value, list) else [value]:
            yield from _parts(inner)


def _names(value: Any) -> Iterator[str]:
    """Iterate over strings and numbers in lists; only the last part of a path, since hosts may mount it elsewhere."""
    if isinstance(value, (str, int)):
        yield str(value).rpartition("/")[2]
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _names(inner)
    elif hasattr(value, "num_rows"):
        yield f"{value.num_rows} rows"
