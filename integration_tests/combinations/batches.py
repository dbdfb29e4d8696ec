"""The rows that a case trains on, and each rank's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime import sequence_layout, submesh
from harness.models import tiny_inputs
from harness.options import load_balancer_of
from harness.parity import padding_mask

BATCH, LENGTH = 4, 8  # of two ranks of `cp` each has two chunks
#: The lengths of the documents of a packed row.
DOCUMENTS = (3, 5)
KINDS = ("token ids", "left padding", "right padding", "embeddings", "positions", "packed")


@dataclass(frozen=True)
class Batch:
    """Rows with the weights of their outputs in the loss.

    Args:
        inputs: keyword arguments of a forward.
        weights: of the shape of the logits.
        packed: rows have several documents.
    """

    inputs: Mapping[str, Tensor]
    weights: Tensor
    packed: bool = False

    def rows(self, rows: slice) -> Batch:
        """Return some rows."""
        return Batch({name: value[rows] for name, value in self.inputs.items()}, self.weights[rows], self.packed)

    def halves(self) -> tuple[Batch, Batch]:
        """Return the two halves of the rows; of one row, twice the row with half its weights."""
        half = len(self.weights) // 2
        if not half:
            part = Batch(self.inputs, self.weights / 2, self.packed)
            return part, part
        return self.rows(slice(0, half)), self.rows(slice(half, None))


def make_batch(model: nn.Module, kind: str, seed: int) -> Batch:
    """Return rows of one kind; the loss of padding is zero.

    Raises:
        ValueError: one process has no such outputs: not a number, or one for each packed row in the place of documents.
    """
    inputs = tiny_inputs(model, batch=BATCH, length=LENGTH, seed=seed)
    ids = inputs["input_ids"]
    if kind.endswith("padding"):
        inputs["attention_mask"] = padding_mask(ids, kind.split()[0])
    if kind == "positions":
        inputs["position_ids"] = (torch.arange(LENGTH) + 3).expand_as(ids)
    if kind == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand_as(ids)
    if kind == "embeddings":
        with torch.no_grad():
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).clone()
    batch = Batch(inputs, torch.ones(BATCH, LENGTH), kind == "packed")
    with torch.no_grad():
        logits = outputs_of(model, batch)
    if not logits.isfinite().all():  # eager attention in float64 of a row that begins with padding
        raise ValueError("the model's outputs are not finite")
    if batch.packed and logits.shape[:2] != ids.shape:
        raise ValueError("the model has one output for a row, not for a document")
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(seed))
    if "attention_mask" in inputs and logits.shape[:2] == ids.shape:
        weights = weights * inputs["attention_mask"].unsqueeze(-1)  # what padding computes is undefined
    return Batch(inputs, weights, kind == "packed")


def outputs_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of one process; each document of a packed row is computed alone."""
    if not batch.packed:
        return full(model(**batch.inputs, use_cache=False).logits)
    parts = [model(**inputs, use_cache=False).logits for _, inputs in documents(batch)]
    return torch.cat(parts, dim=1)


def documents(batch: Batch) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Yield what one process computes alone: each document of packed rows with its tokens, else whole rows."""
    for span in _spans() if batch.packed else (slice(None),):
        yield span, {name: value[:, span] for name, value in batch.inputs.items()}


def _spans() -> Iterator[slice]:
    start = 0
    for length in DOCUMENTS:
        yield slice(start, start + length)
        start += length


class Share:
    """A rank's part of batches: its rows over ``dp`` and its tokens over ``cp``."""

    def __init__(self, mesh: DeviceMesh, options: Mapping[str, Any]) -> None:
        data = submesh(mesh, "dp")
        self.ranks = data.size()
        share = BATCH // self.ranks
        self.own = slice(share * data.get_local_rank(), share * (data.get_local_rank() + 1))
        balancer = load_balancer_of(options)
        self.layout = sequence_layout(mesh, LENGTH, load_balancer=balancer)

    @property
    def over_cp(self) -> bool:
        """Whether the rank has a part of the tokens."""
        return self.layout.ranks > 1

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return this rank's tokens of its own rows."""
        images = {name: value for name, value in batch.inputs.items() if name == "pixel_values"}
        inputs = {name: value for name, value in batch.inputs.items() if name not in images}
        return {**(self.layout.shard_batch(inputs) if self.over_cp else inputs), **images}

    def tokens(self, values: Tensor) -> Tensor:
        """Return this rank's tokens of values of full rows."""
        return self.layout.shard(values) if self.over_cp else values


def full(tensor: Tensor) -> Tensor:
    """Return a plain tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
