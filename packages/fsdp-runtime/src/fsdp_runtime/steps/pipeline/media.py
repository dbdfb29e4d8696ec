"""Images, videos and sound: towers are on the first stage, which adds their features to the token embeddings.

Later stages get a micro-batch without its pixels and samples.  The first stage checks that no input of a later block
depends on them, before the first schedule with media.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.collectives import all_gather_objects, raise_on_all, ranks_of
from fsdp_runtime.steps.pipeline.parts import Call, StagedModel, StagePart
from fsdp_runtime.steps.pipeline.runs import media_names, media_of, running, stage_inputs
from fsdp_runtime.steps.pipeline.values import Value, filled, tensors_in

Batches = Sequence[Mapping[str, Any]]


def require_media_on_first_stage(model: nn.Module, staged: StagedModel, batches: Batches) -> None:
    """Check once for each set of media that only the first stage needs them.  Collective over the mesh."""
    media = [frozenset(media_of(batch)) for batch in batches]
    largest = max(range(len(batches)), key=lambda index: len(media[index]))
    taken = signature(type(base_model(model)).forward).parameters
    if not media_names(taken):
        if media[largest]:
            raise OptionError(
                f"micro-batch {largest} has {', '.join(sorted(media[largest]))}, which the forward of "
                f"{type(model).__name__} does not take: leave the media out"
            )
        return
    ranks = ranks_of(runtime_state(model).mesh)
    names = frozenset[str]().union(*all_gather_objects(ranks, frozenset[str]().union(*media)).values())
    if names <= staged.media:
        return
    with raise_on_all(ranks) as step:
        step.value = _later_features(model, staged, batches[largest]) if 0 in staged.stages else ""
    if refusal := next(filter(None, step.values.values()), ""):
        raise ModelError(refusal)
    staged.media |= names


def _later_features(model: nn.Module, staged: StagedModel, batch: Mapping[str, Any]) -> str:
    """Return a message unless later blocks and the final norm get the same inputs without media."""
    runs = []
    for stage in (0, 1):
        run = _LaterInputs(staged)
        with torch.no_grad(), running(staged, run):
            model(**stage_inputs(batch, stage, len(staged.ranks)))
        runs.append(run.inputs)
    with_media, without = runs
    sent = {value for values in staged.sent for value in values}
    differing = sorted(v for v in {*with_media, *without} - sent if not _equal(with_media, without, v))
    if not differing:
        return ""
    least = max(value.block for value in differing) + 1
    fix = f"give the first stage at least {least} blocks by Pipeline(layers=...)"
    return (
        f"{type(model).__name__} injects features of {', '.join(media_of(batch))} after the first stage, as "
        f"{differing[0]}: {fix if least < len(staged.blocks) else 'use a mesh without pp'}"
    )


def _equal(inputs: Mapping[Value, Tensor], others: Mapping[Value, Tensor], value: Value) -> bool:
    tensors = [each[value] for each in (inputs, others) if value in each]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return len(local) == 2 and local[0].shape == local[1].shape and torch.equal(*local)


class _LaterInputs:
    """A forward of the first stage's outer modules that records the inputs of later blocks; blocks return zeros."""

    def __init__(self, staged: StagedModel) -> None:
        self.staged, self.inputs = staged, dict[Value, Tensor]()

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the inputs, and return zeros."""
        inputs = [list(args), kwargs]
        if index >= self.staged.ranges[0][1]:
            self._record(index, inputs)
        zeros = torch.zeros_like(next(tensor for _, tensor in tensors_in(inputs)))
        return filled(self.staged.skeletons[index], lambda _: zeros)

    def outer(self, part: StagePart, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the first stage; return zeros for others."""
        if part.where != "last":
            return call(*args, **kwargs)
        self._record(len(self.staged.blocks), [list(args), kwargs])
        return part.zeros(args, kwargs, None)

    def _record(self, index: int, inputs: Any) -> None:
        self.inputs |= {Value(index, "input", path): tensor for path, tensor in tensors_in(inputs)}
