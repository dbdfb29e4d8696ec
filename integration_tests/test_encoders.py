"""Encoders over ``cp`` and in packed rows: tokens attend to later ones, and positions may begin at another number."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bert.modeling_bert import BertEmbeddings

from coverage.heads import BATCH, HeadRow, head_model, head_rows
from coverage.measure import gradient_errors
from coverage.packing import PACKED_BOUND, measure_packing
from fsdp_runtime import LayoutError, ModelError, parallelize, sequence_layout
from fsdp_runtime.model import inspect_model
from fsdp_runtime.model.positions import derived_positions
from fsdp_runtime.setup import ModelFacts
from fsdp_runtime.steps.context.step import check_context_parallel
from fsdp_runtime.steps.documents import isolation as run
from fsdp_runtime.steps.documents.step import check_packing
from harness.float64 import compute_in_float64
from harness.models import VOCAB
from harness.parity import largest, mesh_for, padding_mask
from harness.ranks import RankPool

BOUND = 1e-12
LENGTH = 16


def _row(model_type: str, head: str) -> HeadRow:
    return next(row for row in head_rows() if (row.model_type, row.head) == (model_type, head))


def _inputs(offset: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = padding_mask(ids, "left")
    positions = (mask.cumsum(1) - 1 + offset) * mask
    return {"input_ids": ids * mask, "attention_mask": mask} | ({"position_ids": positions} if offset else {})


def over_cp(model_type: str, way: str, offset: int = 0) -> dict[str, float]:
    """The largest errors of a masked language model over two ranks of ``cp`` against one process."""
    with compute_in_float64():
        reference = head_model(_row(model_type, "masked"))
        model = copy.deepcopy(reference)
        inputs = _inputs(offset)
        expected = reference(**_inputs()).logits  # the positions that the model derives itself
        weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
        weights = weights * inputs["attention_mask"].unsqueeze(-1)
        (expected * weights).sum().backward()
        mesh = mesh_for({"cp": 2})
        parallelize(model, mesh, plan=None, context_parallel=way)
        layout = sequence_layout(mesh, LENGTH)
        logits, own = model(**layout.shard_batch(inputs)).logits, layout.shard(weights)
        (logits * own).sum().backward()
        errors = {"logits": largest((logits - layout.shard(expected)) * (own != 0))}
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        floor = 1e-3 * max(largest(each) for each in wanted.values() if each is not None)
        return errors | dict(gradient_errors(reference, model, wanted, floor=floor))


class _Mixed(BertEmbeddings):
    """Embeddings to which those of the token before are added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        embedded: Tensor = super().forward(*args, **kwargs)
        return embedded + embedded.roll(1, dims=1)


def over_ranks() -> tuple[dict[str, float], str, dict[str, float]]:
    """Errors of encoders over ``cp``, refusals, and errors of packed rows."""
    found = {f"{way}": max(over_cp("eurobert", way).values()) for way in ("allgather", "ring")}
    found["roberta"] = max(over_cp("roberta", "allgather", offset=1).values())  # its padding id is 0
    try:
        over_cp("roberta", "allgather")
        refused = ""
    except LayoutError as error:
        refused = str(error)
    model = parallelize(head_model(_row("bert", "masked")), mesh_for({"cp": 2}), plan=None)
    restarted = {"input_ids": _inputs()["input_ids"], "position_ids": torch.arange(LENGTH).remainder(8).expand(3, -1)}
    try:
        model(**sequence_layout(mesh_for({"cp": 2}), LENGTH).shard_batch(restarted))
    except LayoutError as error:
        refused += str(error)
    model = head_model(_row("bert", "masked"))
    model.bert.embeddings.__class__ = _Mixed
    try:
        parallelize(model, mesh_for({"cp": 2}), plan=None)
    except ModelError as error:
        refused += str(error)
    mesh = mesh_for({"tp": 2})  # which plan=None leaves alone
    prepare = partial(parallelize, mesh=mesh, plan=None, packed_sequences=True)
    with pytest.MonkeyPatch.context() as patch:
        packed = _packing(prepare)
        patch.setattr(run, "is_bidirectional", lambda module: False)
        planted = _packing(prepare)
    return found | {"packed": max(packed.values())}, refused, planted


def _packing(prepare: Any) -> dict[str, float]:
    found = measure_packing(head_model(_row("eurobert", "masked")), prepare)
    return {"error": found.error, "leak": found.leak, "gradient leak": found.gradient_leak}


def test_encoders_over_cp_and_in_packed_rows_compute_what_one_process_does(two_ranks: RankPool) -> None:
    for found, refused, planted in two_ranks.run(over_ranks):
        assert {case: error for case, error in found.items() if not error <= max(BOUND, PACKED_BOUND)} == {}
        assert "derives positions from the token ids" in refused
        assert "position_ids restart within a row" in refused
        assert "in a run of a small copy, the output of bert.embeddings is off by" in refused
        assert max(planted.values()) > 1e-6  # a causal mask in place of the documents'


@pytest.mark.parametrize(
    ("model_type", "head", "what"),
    [
        ("bert", "trunk", "makes one vector of each row"),
        ("mobilebert", "masked", "embeds each token with those next to it"),
        ("deberta", "masked", "multiplies this rank's embeddings with the padding mask"),
        ("roformer", "masked", "not by position_ids"),
    ],
)
def test_an_encoder_that_needs_full_rows_is_refused_over_cp(model_type: str, head: str, what: str) -> None:
    model = head_model(_row(model_type, head))
    with pytest.raises(ModelError, match=what):
        check_context_parallel(ModelFacts.of(model))


def test_documents_of_an_encoder_without_masks_of_its_own_are_refused() -> None:
    model = head_model(_row("bert", "masked"))
    with pytest.raises(ModelError, match="attends to later tokens"):
        check_packing(ModelFacts.of(model))


def test_places_are_taken_for_positions_only_where_the_model_derives_the_same() -> None:
    derived = derived_positions(inspect_model(head_model(_row("opt", "trunk"))))
    assert derived is not None
    places, mask = torch.arange(4), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    right = torch.tensor([[1, 1, 1, 0]])
    assert not derived.differ(None, places, right)
    assert derived.differ(None, places, mask)
    assert derived.differ(places.expand(2, -1), places, mask)
    assert not derived.differ(places.expand(2, -1) + 1, places, mask)  # the caller's own
