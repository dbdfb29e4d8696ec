"""Errors of another process arrive as they were raised: Ray and pools of processes pickle them."""

from __future__ import annotations

import pickle

import pytest

from fsdp_runtime import errors
from fsdp_runtime.dry_run.trace.recorder import UntraceableError

#: Errors that are made from more than a message.
OF_PARTS = {errors.LostRankError: (3, "forward", "ended"), UntraceableError: ("aten.item", "model.layers.0")}
ALL = {each for each in vars(errors).values() if isinstance(each, type)} | OF_PARTS.keys()


@pytest.mark.parametrize("kind", sorted(ALL, key=lambda kind: kind.__name__))
def test_an_error_is_that_error_after_a_pickle(kind: type[Exception]) -> None:
    error = kind(*OF_PARTS.get(kind, ("the mesh has no axis tp",)))
    again = pickle.loads(pickle.dumps(error))  # our own
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
