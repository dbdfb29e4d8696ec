"""Run one case on this rank: two steps of training with calls between them, beside those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from combinations.batches import BATCH, Batch, Share, full, make_batch, outputs_of
from combinations.cases import ACCUMULATE, CALLS, Case
from combinations.changes import APART, CHANGES
from combinations.events import EVENTS, GENERATIONS, SLOTS, Training, Wrong, compare, generated
from combinations.families import FAMILIES
from combinations.optimizers import OPTIMIZERS
from fsdp_runtime import FsdpRuntimeError, no_sync, parallelize
from fsdp_runtime.model import inspect_model
from harness.parity import largest, mesh_for, own_part, structural_problems
from rl_logprobs import clip_grad_norm_
from rl_logprobs.errors import LogprobsError
from tp_plans import TpPlansError

STEPS = 2
TYPED = (FsdpRuntimeError, TpPlansError, LogprobsError)
RIGHT, REFUSED, FAILED, ALONE = "right", "refused", "failed", "fails in one process"


@dataclass(frozen=True)
class Result:
    """What a rank found."""

    outcome: str
    detail: str = ""


def run(case: Case) -> Result:
    """Run a case on this rank; every rank of the world must call it.

    Raises:
        Wrong: a number differs from that of one process.
        Exception: any other error that is not typed; raised, so that ranks that wait for this one do not wait long.
    """
    try:
        reference = _model(case)
        batches = [make_batch(reference, case.rows, seed) for seed in range(1, STEPS + 1)]
        _alone(_model(case), batches, case)
    except Exception as error:  # what one process cannot do is no case
        return Result(ALONE, f"{type(error).__name__}: {error}")
    try:
        return _run(case, reference, batches)
    except RuntimeError as error:
        if "compile" in case.options and _alone_compiled(case, error):
            return Result(ALONE, f"compiled: {error}")
        raise


def _alone_compiled(case: Case, error: RuntimeError) -> bool:
    """Whether one process with compiled blocks and as many rows as a rank has fails with the same error."""
    torch.compiler.reset()  # at its limit of recompilations, that of earlier cases, a block runs eagerly
    model = _model(case)
    for block in inspect_model(model).blocks.values():
        block.compile(**case.options["compile"].options)
    ranks = prod(size for axis, size in case.mesh if axis.startswith("dp"))
    batch = make_batch(_model(case), case.rows, 1).rows(slice(0, BATCH // ranks))
    try:
        (outputs_of(model, batch) * batch.weights).sum().backward()
    except RuntimeError as other:
        return str(other) == str(error)
    return False


def _model(case: Case) -> Any:
    """Return the model of a case, always the same; copies would be without the hooks of their parameters."""
    torch.manual_seed(0)
    model: Any = FAMILIES[case.family]()
    for name in case.names("change"):
        model = CHANGES[name](model)
    return model


def _alone(model: Any, batches: list[Batch], case: Case) -> None:
    """Run the calls of a case on one process."""
    for batch in batches:
        (outputs_of(model, batch) * batch.weights).sum().backward()
    inputs = {**batches[0].inputs, "use_cache": False}
    with torch.no_grad():
        for name in (event.partition("@")[0] for event in case.names("event")):
            if name in GENERATIONS:
                generated(model, **getattr(EVENTS[name], "keywords", {}))
            flags = {"hidden states": "output_hidden_states", "router logits": "output_router_logits"}
            if name in flags:
                found = model(**inputs, **{flags[name]: True})
                if not found[flags[name].removeprefix("output_")]:
                    raise ValueError("the model has no such output")
            if name == "last logits":
                model(**inputs, logits_to_keep=2)
            if name == "labels" and case.rows == "packed":
                raise ValueError("labels cross documents")


def _run(case: Case, reference: nn.Module, batches: list[Batch]) -> Result:
    mesh, options = mesh_for(dict(case.mesh)), case.options
    share = Share(mesh, options)
    model = _model(case)
    for name in case.names("apart"):
        APART[name](model)
    try:
        model = parallelize(model, mesh, **options)
    except TYPED as error:
        if not case.names("apart"):
            _unchanged(model, reference, batches[0])
        return Result(REFUSED, f"{type(error).__name__}: {error}")
    at = Training(model, reference, share, batches[0])
    refused: list[str] = []
    _events(case, SLOTS[0], at, refused)
    at.optimizer, other = (_optimizer(each, case) for each in (model, reference))
    for place, batch in enumerate(batches):
        at.batch = batch
        try:
            _gradients(case, at, refused)
        except TYPED as error:
            return Result(REFUSED, f"{type(error).__name__}: {error}")
        _events(case, SLOTS[2], at, refused)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        ratio = full(norm).double() / wanted.double()
        compare("the ratio of gradient norms", ratio, torch.ones_like(ratio))
        _events(case, SLOTS[3], at, refused)
        at.optimizer.step()
        other.step()
        at.optimizer.zero_grad()
        other.zero_grad()
        _events(case, SLOTS[4], at, refused)
        _same_parameters(f"step {place}", reference, model)
    return Result(REFUSED, "; ".join(refused)) if refused else Result(RIGHT)


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    return OPTIMIZERS[case.optimizer]([parameter for parameter in model.parameters() if parameter.requires_grad])


def _events(case: Case, slot: str, at: Training, refused: list[str]) -> None:
    """Make the calls of one slot; one that is refused must have changed nothing."""
    for name in case.names("event"):
        event, _, place = name.partition("@")
        if place == slot:
            try:
                CALLS[event](at)
            except TYPED as error:
                refused.append(f"{event}: {type(error).__name__}: {error}")


def _gradients(case: Case, at: Training, refused: list[str]) -> None:
    """Compute the gradients of the batch in both models, and compare outputs and gradients."""
    batch, share = at.batch, at.share
    at.reference_loss().backward()
    own = batch.rows(share.own)
    parts = own.halves() if ACCUMULATE in case.names("loop") else (own,)
    for part in parts[:-1]:
        with no_sync(at.model):
            _loss(at, part).backward()
    loss = _loss(at, parts[-1])
    _events(case, SLOTS[1], at, refused)
    loss.backward()
    eager = "eager attention" in case.names("change")  # its softmax in float32 leaves that of a key bias, which is zero
    at.compare_gradients(least_share=1e-3 if eager else 1e-9)
    for problem in structural_problems(at.reference, at.model):
        raise Wrong(problem)


def _loss(at: Training, part: Batch) -> Tensor:
    """Return a rank's part of the loss, after its logits were compared."""
    logits = at.logits_of(part)
    with torch.no_grad():
        wanted = at.tokens_of(outputs_of(at.reference, part))
        compare("logits of training", logits, wanted, at.tokens_of(part.weights) != 0)
    return at.loss_of(logits, part)


def _same_parameters(when: str, reference: nn.Module, model: nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part = own_part(wanted[name].detach(), parameter) if isinstance(parameter, DTensor) else wanted[name]
        if local.shape != part.shape or not largest(local.detach() - part.detach()) <= 1e-6:
            raise Wrong(f"{name} differs after {when}")


def _unchanged(model: nn.Module, reference: nn.Module, batch: Batch) -> None:
    """Check that a model that was refused computes what it did."""
    batch = Batch(batch.inputs, batch.weights)
    (full(outputs_of(model, batch)) * batch.weights).sum().backward()
    (outputs_of(reference, batch) * batch.weights).sum().backward()
    for name, parameter in model.named_parameters():
        wanted = reference.get_parameter(name).grad
        if type(parameter) is not nn.Parameter or (parameter.grad is None) != (wanted is None):
            raise Wrong(f"parallelize refused the model and left {name} changed")
        if wanted is not None and not torch.equal(parameter.grad, wanted):
            raise Wrong(f"parallelize refused the model, and the gradient of {name} is another one now")
