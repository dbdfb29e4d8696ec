"""Multimodal models under FSDP2 where the rows of one data-parallel rank have media and those of the other have none.

The ranks with media have rows of two media and of one.
"""

from __future__ import annotations

import copy
import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from coverage.measure import MODES, Refused, default_dtype, gradient_errors
from coverage.multimodal import DEFAULT_FLOAT64, multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from coverage.multimodal_media import BUILDERS, IMAGES_PER_ROW, MEDIA_BY_ROW
from coverage.multimodal_rows import WITHOUT_PLACEHOLDERS
from coverage.outcome import Outcome, failure
from fsdp_runtime import FsdpRuntimeError, submesh
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, largest, logits_of, mesh_for
from harness.ranks import RankPool, RanksFailed
from tp_plans import TpPlansError

#: The columns, with the ranks of ``tp``; each has two data-parallel ranks.
COLUMNS = {"media on one rank, dp_shard=2": 1, "media on one rank, dp_shard=2 tp=2": 2}
#: The status of a model whose code does not run on rows without media.
FAILS_ALONE = "alone"
#: Inputs that rows without media have, too; their first dim is that of the rows.
_OF_TEXT = ("input_ids", "mm_token_type_ids", "token_type_ids", "decoder_input_ids", "bbox")


class OneProcessFailedError(Exception):
    """The model does not run on rows without media in one process, with what its code raises."""


def evaluate_absent_media(pool: RankPool, model_type: str, mode: str, *, media: str, timeout: float) -> Outcome:
    """Measure one model type with media on one of two data-parallel ranks.

    Args:
        pool: two ranks, or four of which two each are ranks of ``tp``.
        model_type: the model type.
        mode: ``"TP"`` or ``"SP"``, which makes no difference on two ranks.
        media: ``"image"``, ``"video"`` or ``"audio"``.
        timeout: in seconds.
    """
    start = time.monotonic()
    try:
        ranks = pool.run(measure_absent_media, model_type, mode, media, tp=pool.world_size // 2, timeout=timeout)
    except RanksFailed as failed:
        seconds = time.monotonic() - start
        error = failed.errors[min(failed.errors)]
        if error.type_name == OneProcessFailedError.__name__:
            return Outcome(FAILS_ALONE, error.message, seconds=seconds)
        return failure(failed, seconds)
    worst = {name: max(found.get(name, 0.0) for found in ranks) for found in ranks for name in found}
    note = "; ".join(f"{name} off by {error:.1e}" for name, error in [*worst.items()][:4])
    return Outcome("wrong" if worst else "right", note, seconds=time.monotonic() - start)


def measure_absent_media(model_type: str, mode: str, media: str, *, tp: int) -> dict[str, float]:
    """Return what is off by more than the bounds on this rank; every rank of the world must call it."""
    with default_dtype(torch.float64 if model_type in DEFAULT_FLOAT64 else torch.float32):
        reference, gradients, expected, rows = _reference(model_type, media)
        mesh = mesh_for({"dp_shard": 2, **({"tp": tp} if tp > 1 else {})})
        rank = submesh(mesh, "dp").get_local_rank()
        candidate = copy.deepcopy(reference)
        try:
            candidate = MODES[mode if tp > 1 else "TP"](candidate, mesh)
            logits, loss = _weighted(candidate, rows[rank])  # here ranks find out what the others have
        except (TpPlansError, FsdpRuntimeError) as error:
            raise Refused(str(error)) from error
        (2 * loss).backward()  # FSDP2 takes the mean of the data-parallel ranks
        errors = dict(gradient_errors(reference, candidate, gradients))
        found = {f"gradient of {path}": error for path, error in errors.items() if not error <= GRADIENT_BOUND}
        if not (error := largest(logits - expected[rank])) <= OUTPUT_BOUND:
            found["output"] = error
        return found


@lru_cache(maxsize=1)
def _reference(
    model_type: str, media: str
) -> tuple[nn.Module, dict[str, Tensor | None], list[Tensor], list[dict[str, Any]]]:
    """Return a model, the gradients of one process for all rows, and for each rank its logits and rows."""
    model = multimodal_model(model_type)
    inputs = multimodal_inputs(model, media=media)
    rows = [rows_of_rank(model_type, media, inputs, rank) for rank in range(2)]
    running = copy.deepcopy(model)
    expected = []
    for rank, own in enumerate(rows):
        try:
            logits, loss = _weighted(running, own)
        except Exception as error:  # the code of a model may raise anything
            if rank == 0:
                raise
            raise OneProcessFailedError(f"{type(error).__name__}: {error}") from error
        loss.backward()
        expected.append(logits.detach())
    return model, {path: parameter.grad for path, parameter in running.named_parameters()}, expected, rows


def rows_of_rank(model_type: str, media: str, inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the inputs of the rows with media for rank 0, and of those without for rank 1."""
    rows = [row for row, count in enumerate(IMAGES_PER_ROW) if (count > 0) is (rank == 0)]
    by_row = model_type in WITHOUT_PLACEHOLDERS or BUILDERS[media].get(model_type) in MEDIA_BY_ROW
    text = {name: value[rows] for name, value in inputs.items() if name in _OF_TEXT}
    if rank == 1:
        return text
    return {name: value[rows] if by_row else value for name, value in inputs.items()} | text


def _weighted(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits = logits_of(model, inputs)
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
    return logits, (logits * weights).sum()
