"""Shapes of the tensors between stages: found by one forward, then computed from rows and tokens.

Micro-batches may have different lengths: a sent tensor is padded to the longest, and the receiver cuts the padding off.
So the code of the model sees no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.nn.functional import pad

from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.sharded.boxes import local_box
from fsdp_runtime.steps.guards.check_inputs import assert_inputs_equal
from fsdp_runtime.steps.pipeline.parts import StagedModel, StageRun, running, stage_inputs
from fsdp_runtime.steps.pipeline.values import Value
from tp_plans.boxes import box_shape


@dataclass(frozen=True)
class Sent:
    """A tensor between two stages; ``shape`` is of this rank's part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: tuple[int, ...] | None = None  # of a DTensor over ``tp``
    placements: tuple[Placement, ...] = ()
    mesh: Any = None

    def buffer(self, backward: bool) -> Tensor:
        """Return a tensor on the meta device, for torch to allocate the buffer of the receiver."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=backward and self.dtype.is_floating_point
        )

    def sent(self, tensor: Tensor, expected: Sent) -> Tensor:
        """Return this rank's part, padded to the shape; the receiver cuts it to the ``expected`` shape."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if (tuple(local.shape), local.dtype) != (expected.shape, expected.dtype):
            raise ModelError(
                f"a stage sends {local.dtype} {tuple(local.shape)}, and the next stage receives {expected.dtype} "
                f"{expected.shape}: call the model in the same mode, autocast included, as in its first call"
            )
        missing = [size - actual for size, actual in zip(self.shape, local.shape, strict=True)]
        return pad(local, [n for m in reversed(missing) for n in (0, m)]) if any(missing) else local.contiguous()

    def received(self, buffer: Tensor) -> Tensor:
        """Return the tensor without padding."""
        local = buffer[tuple(slice(size) for size in self.shape)]
        if local.requires_grad:
            local.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]  # the layout of sends
        if self.whole is None:
            return local
        strides = torch.empty(self.whole, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, self.placements, shape=torch.Size(self.whole), stride=strides, run_check=False
        )


Shapes = list[dict[int | None, tuple[Sent, ...]]]


def sent_shapes(model: nn.Module, staged: StagedModel, batches: Sequence[Mapping[str, Any]]) -> Shapes:
    """Return the tensors that each stage but the last sends, by micro-batch; ``None`` has their largest sizes."""
    sizes = [rows_and_tokens(batch) for batch in batches]
    known = staged.shapes
    if not known:
        names = ("input_ids", "attention_mask", "position_ids")  # every stage computes masks and positions with them
        inputs = {
            f"micro-batch {index}": {"rows and tokens": size, **{name: batch.get(name) for name in names}}
            for index, (batch, size) in enumerate(zip(batches, sizes, strict=True))
        }
        assert_inputs_equal(staged.mesh, inputs, axis="pp")
    for index, size in enumerate(sizes):
        if size not in known:
            known[size] = _computed(staged, size) or _probe(model, staged, batches[index])
    shapes: Shapes = []
    for boundary in range(len(staged.sent)):
        by_batch: dict[int | None, tuple[Sent, ...]] = {i: known[size][boundary] for i, size in enumerate(sizes)}
        by_batch[None] = tuple(_largest(same) for same in zip(*by_batch.values(), strict=True))
        shapes.append(by_batch)
    return shapes


def _computed(staged: StagedModel, size: tuple[int, ...]) -> list[tuple[Sent, ...]] | None:
    """Return the tensors of micro-batches of a new size from known ones; ``None`` where that is not certain."""
    first, known = next(iter(staged.shapes.items()), ((), None))
    if known is None or any("unknown" in dims for dims in staged.varying.values()):
        return None

    def resized(size: tuple[int, ...], value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = dict(zip(("rows", "tokens"), size, strict=True))
        dims = zip(staged.varying[value], shape, strict=True)
        return tuple(fixed if dim is None else sizes[dim] for dim, fixed in dims)

    def of(size: tuple[int, ...], value: Value, sent: Sent) -> Sent:
        if sent.whole is None:
            return replace(sent, shape=resized(size, value, sent.shape))
        whole = resized(size, value, sent.whole)
        box = local_box(whole, sent.placements, sent.mesh.shape, sent.mesh.get_coordinate())
        return replace(sent, shape=box_shape(box), whole=whole)

    def boundaries(size: tuple[int, ...]) -> list[tuple[Sent, ...]]:
        return [tuple(map(partial(of, size), *both)) for both in zip(staged.sent, known, strict=True)]

    return boundaries(size) if boundaries(first) == known else None  # else a hook cuts the rows over ``cp``


def rows_and_tokens(batch: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of rows of a micro-batch and their length."""
    tensor = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tensor, Tensor):
        raise OptionError("a micro-batch has neither input_ids nor inputs_embeds: give one of the two")
    return tuple(tensor.shape[:2])


def _largest(same: Sequence[Sent]) -> Sent:
    shape = tuple(max(sizes) for sizes in zip(*(sent.shape for sent in same), strict=True))
    return Sent(shape, same[0].dtype)


def _probe(model: nn.Module, staged: StagedModel, batch: Mapping[str, Any]) -> list[tuple[Sent, ...]]:
    """Run one micro-batch through all stages without gradients, and return the tensors that each stage sends."""
    group, results = staged.mesh.get_group(), list[tuple[Sent, ...]]()
    for stage, rank in enumerate(staged.ranks[:-1]):
        answer: list[Any] = [None]
        if rank == staged.rank:
            try:
                with _evaluating(model):
                    answer = [[described(tensor) for tensor in _on_zeros(model, staged, stage, batch, results)]]
            except Exception as error:  # noqa: BLE001 (the code of a model may raise anything)
                answer = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(answer, dist.get_global_rank(group, rank), group=group)
        if isinstance(answer[0], str):
            raise ModelError(f"the forward of stage {stage} on rank {rank} of pp raises {answer[0]}")
        results.append(tuple(replace(sent, mesh=staged.tp) for sent in answer[0]))
    return results


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _on_zeros(
    model: nn.Module, staged: StagedModel, stage: int, batch: Mapping[str, Any], results: Sequence[tuple[Sent, ...]]
) -> tuple[Tensor, ...]:
    values = staged.sent[stage - 1] if stage else ()
    zeros = partial(torch.zeros, device=device_of(model))
    tensors = [each.received(zeros(each.shape, dtype=each.dtype)) for each in results[-1]] if stage else []
    run = StageRun(staged, stage, dict(zip(values, tensors, strict=True)))
    with torch.no_grad(), running(staged, run):
        model(**stage_inputs(batch, stage, len(staged.ranks)))
    return run.sent()


def described(tensor: Tensor) -> Sent:
    """Return the shape, dtype and layout of a tensor to send."""
    if isinstance(tensor, DTensor):
        return Sent(tuple(tensor.to_local().shape), tensor.dtype, tuple(tensor.shape), tuple(tensor.placements))
    return Sent(tuple(tensor.shape), tensor.dtype)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's tensors."""
    return local_tensor(next(model.parameters())).device
