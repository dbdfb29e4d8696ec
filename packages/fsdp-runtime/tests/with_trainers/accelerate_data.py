"""What ranks read by ``MeshAccelerator``, however they are seeded; run by ``nox -s trainers``."""

from __future__ import annotations

import random

import numpy as np
import torch
from accelerate import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fsdp_runtime.trainers import MeshAccelerator
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import forget_accelerate


class Augmented(Dataset[Tensor]):
    """Samples of an index and of what is drawn for it by torch, Python and NumPy."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def read(axes: dict[str, int]) -> list[list[Tensor]]:
    """What a rank reads in two epochs, where no rank is seeded like another, by each kind of sampler."""
    found = []
    rank = torch.distributed.get_rank()
    for seedable in (False, True):
        forget_accelerate()
        config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=seedable)
        accelerator = MeshAccelerator(mesh_for(axes), dataloader_config=config)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + rank)
        loader = accelerator.prepare(DataLoader(Augmented(), batch_size=4, shuffle=True))
        epochs = []
        for _ in range(2):
            epochs.append(torch.cat(list(loader)))
            torch.rand(1 + rank)  # as a script that samples on one rank alone
        found.append(epochs)
    return found


def test_ranks_of_tp_read_the_same_batches(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(read, {"tp": 2}, timeout=100)
    for own, others in zip(first, second, strict=True):
        assert all(map(torch.equal, own, others))
        assert all(sorted(epoch[:, 0].tolist()) == list(range(8)) != epoch[:, 0].tolist() for epoch in own)


def test_ranks_of_dp_read_every_sample_once_and_those_of_tp_the_same(four_ranks: RankPool) -> None:
    first, second, third, fourth = four_ranks.run(read, {"dp_shard": 2, "tp": 2}, timeout=100)
    for pairs in ((first, second), (third, fourth)):
        for own, others in zip(*pairs, strict=True):
            assert all(map(torch.equal, own, others))
    for own, others in zip(first, third, strict=True):
        for parts in zip(own, others, strict=True):
            assert sorted(torch.cat(parts)[:, 0].tolist()) == list(range(8))
