"""Data sets without indices: every rank of ``dp`` reads the whole stream and keeps its own rows of each batch.

accelerate gives every rank separate files where a ``datasets.IterableDataset`` has enough files.  Batches would
then differ from one process, and ranks with fewer rows would end early.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard
from accelerate.state import GradientState
from torch.utils.data import IterableDataset

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded import own_rank
from fsdp_runtime.trainers._accelerate_compat import description, node_of

logger = logging.getLogger(__name__)


class StreamPart(IterableDatasetShard):
    """The rows of a stream that one rank of ``dp`` keeps; accelerate's class has the same arguments.

    A last incomplete batch is filled up with the first rows.  Without worker processes, ``gather_for_metrics`` leaves
    these rows out.
    """

    def __init__(self, dataset: Any, batch_size: int | None = 1, **settings: Any) -> None:
        super().__init__(dataset, batch_size=batch_size or 1, **settings)  # the data set may make the batches itself
        self._warns = dist.get_rank() == 0

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's rows; the order is the same as on one process, also with a torch generator."""
        total = self.batch_size * (1 if self.split_batches else self.num_processes)
        part = total // self.num_processes
        start = self.process_index * part
        rows, first = iter(self.dataset), None
        while batch := list(islice(rows, total)):
            if len(batch) < total:
                if self.drop_last:
                    return
                self._note_incomplete(len(batch), total)
                batch += islice(cycle(first or tuple(batch)), total - len(batch))
            first = first or batch
            yield from batch[start : start + part]

    def _note_incomplete(self, size: int, total: int) -> None:
        """Warn once; tell the loader of these rows how many rows of its last batch count."""
        for loader in GradientState().dataloader_references:
            if loader is not None and loader.dataset is self and torch.utils.data.get_worker_info() is None:
                loader.remainder = size
        warns, self._warns = self._warns and own_rank() == 0, False
        if warns:
            logger.warning(
                "the last batch of a stream has %d of its %d samples and is filled up with the first ones, which one "
                "process would not do; dataloader_drop_last=True, or drop_last=True in the data loader, leaves it out",
                size,
                total,
            )


#: Globals of accelerate's module that make it deal the rows of every stream, and never its files.
DEALING_ROWS = {"IterableDatasetShard": StreamPart, "is_datasets_available": lambda: False}


def check_stream(dataset: Any) -> None:
    """Raise :class:`OptionError` on every rank if ranks would read a stream in different orders; collective."""
    if not isinstance(dataset, IterableDataset):
        return
    own = node_of(dataset), *description(dataset)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    nodes, orders, files = zip(*by_rank, strict=True)
    if split := next((node for node in nodes if node is not None), None):
        raise OptionError(
            f"the stream is split for rank {split[0]} of {split[1]} ranks by split_dataset_by_node: pass the whole "
            "stream, which is dealt over dp here"
        )
    if other := next((rank for rank, order in enumerate(orders) if order != orders[0]), 0):
        raise OptionError(
            f"ranks 0 and {other} shuffle or interleave the stream by different seeds: pass every rank the same seed, "
            "as in shuffle(seed=0), also where one process needs none"
        )
    if other := next((rank for rank, names in enumerate(files) if names != files[0]), 0):
        raise OptionError(
            f"ranks 0 and {other} read a stream of different files ({files[0][:3]} and {files[other][:3]}): pass every "
            "rank all files: the trainer deals their rows over dp"
        )
