"""A small copy of a model with all of its blocks, its inputs, and the comparison of its stages with the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._torch_compat import own_buffers, own_parameters
from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps.pipeline.parts import StagedModel
from fsdp_runtime.steps.pipeline.runs import StageRun, running, stage_inputs
from fsdp_runtime.steps.pipeline.trace import Record, logits_of
from fsdp_runtime.steps.pipeline.values import Value
from tp_plans import TpPlansError
from tp_plans.runtime import tiny_model

#: Two shapes of rows: dims of tensors that differ between them are rows or tokens.
SHAPES = ((2, 7), (3, 11))
#: The largest difference of stages from the whole, relative to the largest element.
_BOUND = 1e-9


def small_copy(model: nn.Module, blocks: int) -> Any:
    """Return a copy with the same number of blocks that runs on the CPU in float64."""
    name = type(model).__name__
    try:
        small: Any = tiny_model(model, tp=1, all_blocks=True).model
    except TpPlansError as error:
        raise ModelError(f"the stages of {name} cannot be verified, since no small copy of it runs: {error}") from error
    if len(inspect_model(small).decoder) != blocks:
        raise ModelError(f"no small copy of {name} has its {blocks} blocks: use a mesh without pp")
    return small


def rows(model: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return token ids and an attention mask."""
    vocabulary = len(model.get_input_embeddings().weight)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, shape, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def kept_parts(staged: StagedModel, rank: int) -> set[str]:
    """Return the paths of the blocks and outer modules of a rank of ``pp``."""
    stages = staged.stages_of(rank)
    kept = {path for stage in stages for path in staged.blocks[slice(*staged.ranges[stage])]}
    ends = {"every", *(["first"] if 0 in stages else []), *(["last"] if len(staged.ranks) - 1 in stages else [])}
    return kept | {path for path, where in staged.outer.items() if where in ends}


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of an absent part, and the dict that holds it."""

    module: nn.Module
    tensors: dict[str, Any]
    name: str
    tensor: Tensor

    def remove(self) -> None:
        """Leave ``None`` in its place."""
        self.tensors[self.name] = None
        if (part := runtime_state(self.module).part) is not None:
            part.removed.add(self.name)

    def restore(self) -> None:
        """Undo :meth:`remove`."""
        self.tensors[self.name] = self.tensor
        if (part := runtime_state(self.module).part) is not None:
            part.removed.discard(self.name)


def absent_tensors(model: nn.Module, staged: StagedModel, rank: int) -> list[Slot]:
    """Return the parameters and buffers that a rank of ``pp`` does not need; tied parameters stay where one does."""
    kept = kept_parts(staged, rank)
    absent = [path for path in (*staged.blocks, *staged.outer) if path not in kept]
    others = {module for path in absent for module in model.get_submodule(path).modules()}
    used = {id(slot.tensor) for module in model.modules() if module not in others for slot in _own(module)}
    return [slot for module in others for slot in _own(module) if id(slot.tensor) not in used]


def _own(module: nn.Module) -> Iterator[Slot]:
    for tensors in (own_parameters(module), own_buffers(module)):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield Slot(module, tensors, name, tensor)


@contextmanager
def without(slots: list[Slot]) -> Iterator[None]:
    """Remove tensors from their modules inside the ``with``."""
    for slot in slots:
        slot.remove()
    try:
        yield
    finally:
        for slot in slots:
            slot.restore()


def require_equal(model: Any, staged: StagedModel, inputs: Mapping[str, Any]) -> frozenset[str]:
    """Check that the stages give the logits and gradients of the whole copy; return parameters without a gradient."""
    weights: Tensor | None = None
    results = []
    for forward in (_whole, _staged):
        logits = forward(model, staged, inputs)
        weights = torch.rand(logits.shape, dtype=logits.dtype) if weights is None else weights
        (logits * weights).sum().backward()  # type: ignore[no-untyped-call]
        results.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
        model.zero_grad(set_to_none=True)
    (logits, gradients), (staged_logits, staged_gradients) = results
    name = type(model).__name__
    if error := _error(staged_logits, logits):
        raise ModelError(f"{name} computes other logits in stages, by {error:.1e} in a small copy: use no pp")
    for path, gradient in gradients.items():
        other = staged_gradients[path]
        if (gradient is None) != (other is None) or (gradient is not None and _error(other, gradient)):
            raise ModelError(
                f"the gradient of {path} of {name} differs in stages of a small copy: use a mesh without pp"
            )
    return frozenset(path for path, gradient in gradients.items() if gradient is None)


def _whole(model: Any, staged: StagedModel, inputs: Mapping[str, Any]) -> Tensor:
    with running(staged, Record()):
        return logits_of(model(**{**inputs, "use_cache": False}))


def _staged(model: Any, staged: StagedModel, inputs: Mapping[str, Any]) -> Tensor:
    received: dict[Value, Tensor] = {}
    for stage, rank in enumerate(staged.ranks):
        run = StageRun(staged, stage, received)
        with running(staged, run), without(absent_tensors(model, staged, rank)):
            output = model(**stage_inputs(inputs, stage, len(staged.ranks)))
        received = dict(zip(run.sending, run.sent(), strict=True))
    return logits_of(output)


def _error(actual: Tensor | None, expected: Tensor) -> float:
    """Return the error relative to the largest element, 0 within the bound."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    error = float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
    return 0.0 if error <= _BOUND else error
