"""Calls of ``fsdp_runtime``: over tensors, layers, samples, ranks and transfers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_runtime import MeshSpec, load_weights, parallelize, save_weights, stream_weights
from fsdp_runtime.batching import pack, pack_tree
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.sync import digest
from fsdp_runtime.sync.execute import rounds_of, split_transfers, windows_of
from growth.measure import Case
from growth.models import llama
from growth.transfers import RANKS, TENSORS, experts_on_ranks, mesh
from tp_plans import Shard
from tp_plans.transfer import TransferPlan, plan_transfer

LAYERS = (2, 6, 20, 60, 200)
SAMPLES = (300, 1000, 3000, 10_000, 30_000)


def _plain(layers: int) -> nn.Module:
    return llama(layers).to_empty(device="cpu")


@contextmanager
def _saved(layers: int) -> Iterator[Callable[[], Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model = _plain(layers)
        yield lambda: save_weights(model, folder)


@contextmanager
def _loaded(layers: int) -> Iterator[Callable[[], Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model, path = _plain(layers), Path(folder)
        save_weights(model, path)
        yield lambda: load_weights(model, path)


def _of_plain(call: Callable[[nn.Module], Any], layers: int) -> Callable[[], Any]:
    model = _plain(layers)
    return lambda: call(model)


def _streamed(model: nn.Module) -> int:
    return sum(tensor.numel() for _, tensor in stream_weights(model))


@contextmanager
def _parallelized(layers: int) -> Iterator[Callable[[], Any]]:
    with fake_world(MeshSpec(dp_shard=4, tp=2), rank=0) as device_mesh:
        model = llama(layers)
        yield lambda: parallelize(model, device_mesh)


def _samples(size: int) -> list[torch.Tensor]:
    """Log-normal lengths, 100 tokens on average."""
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randn(size, generator=draw) + 4).exp().long().clamp(1, 800)
    return [torch.arange(int(length)) for length in lengths]


def _packed(size: int) -> Callable[[], Any]:
    samples = _samples(size)
    return lambda: pack(samples, 800, ranks=8)


def _packed_trees(size: int) -> Callable[[], Any]:
    prompts = _samples(size // 4)
    groups = [[torch.cat([prompt, prompt[:1] + turn])[-800:] for turn in range(4)] for prompt in prompts]
    return lambda: pack_tree(groups, 800, ranks=8)


def _schedule(make: Callable[[int], TransferPlan], size: int) -> Callable[[], Any]:
    """The rounds of one rank, of a plan that has been asked for another's."""
    plan = make(size)
    rounds_of(plan, plan.for_rank(1), 1)

    def call() -> Any:
        own = split_transfers(plan, plan.for_rank(0), 2**16)
        return rounds_of(plan, own, windows_of(plan, own, 2**16))

    return call


def _rows_of_ranks(ranks: int) -> TransferPlan:
    have = mesh(2, ranks, Shard(0))
    return plan_transfer(have, have.shifted(ranks))


def _rows_of_tensors(tensors: int) -> TransferPlan:
    have = mesh(tensors, 8, Shard(0))
    return plan_transfer(have, have.shifted(8))


def _experts_of_ranks(ranks: int) -> TransferPlan:
    have = experts_on_ranks(ranks)
    return plan_transfer(have, have.shifted(ranks))


CASES = [
    Case("save_weights: layers", LAYERS, _saved),
    Case("load_weights: layers", LAYERS, _loaded),
    Case("stream_weights: layers", LAYERS, partial(_of_plain, _streamed)),
    Case("sync.digest: layers", LAYERS, partial(_of_plain, digest)),
    Case("parallelize on the meta device: layers", LAYERS, _parallelized),
    Case("pack: samples", SAMPLES, _packed),
    Case("pack_tree: samples", SAMPLES, _packed_trees),
    Case("rounds of one rank, rows: ranks", RANKS, partial(_schedule, _rows_of_ranks), slope=0.0, memory=0.0),
    Case("rounds of one rank, experts: ranks", TENSORS, partial(_schedule, _experts_of_ranks), slope=0.0, memory=0.0),
    Case("rounds of one rank, rows: tensors", TENSORS, partial(_schedule, _rows_of_tensors)),
]
