"""Calls between the calls of a training step: each compares its own result, and must change nothing else."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_runtime
from combinations.batches import LENGTH, Batch, Share, documents, full, outputs_of
from harness.parity import largest, own_part

#: Bound of the numerics contract for outputs and weights.
BOUND = 1e-5


class Wrong(AssertionError):
    """A number differs from that of one process."""


@dataclass
class Training:
    """A parallelized model and that of one process, at the same place of the same training."""

    model: Any
    reference: Any
    share: Share
    batch: Batch
    optimizer: torch.optim.Optimizer | None = None

    def evaluate(self, what: str, **options: Any) -> Any:
        """Compare the logits of the batch, and return the output of the parallelized model."""
        batch = self.batch.rows(self.share.own)
        output = self.model(**self.share.inputs(batch), use_cache=False, **options)
        wanted = outputs_of(self.reference, self.batch)[self.share.own]
        masked = batch.weights != 0
        compare(what, full(output.logits), self.tokens_of(wanted), self.tokens_of(masked))
        return output

    def tokens_of(self, values: Tensor) -> Tensor:
        """Return this rank's tokens, where values have tokens."""
        return self.share.tokens(values) if values.dim() > 1 and values.shape[1] == LENGTH else values


def compare(what: str, found: Tensor, wanted: Tensor, mask: Tensor | None = None) -> None:
    """Raise :class:`Wrong` where two tensors differ by more than rounding."""
    if found.shape != wanted.shape:
        raise Wrong(f"{what}: {tuple(found.shape)} in the place of {tuple(wanted.shape)}")
    difference = (found - wanted) if mask is None else (found - wanted) * mask
    if not (error := largest(difference)) <= BOUND:
        raise Wrong(f"{what} off by {error:.1e}")


def _evaluate(at: Training) -> None:
    with torch.no_grad():
        at.evaluate("logits of an evaluation")


def _inference(at: Training) -> None:
    with torch.inference_mode():
        at.evaluate("logits under inference_mode")


def _without_backward(at: Training) -> None:
    at.evaluate("logits whose backward never comes")


def _train_and_eval(at: Training) -> None:
    at.model.train()
    at.model.eval()


def _generate(at: Training) -> None:
    ids = torch.arange(3, 3 + 2 * 5).view(2, 5)
    with torch.no_grad():
        wanted, found = (
            each.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
            for each in (at.reference, at.model)
        )
    if not torch.equal(wanted, found):
        raise Wrong(f"generated {found.tolist()} in the place of {wanted.tolist()}")


def _hidden_loss(at: Training) -> None:
    batch = at.batch.rows(at.share.own)

    def logits(hidden: Tensor, head: Any) -> Tensor:
        weight = full(head.weight)
        bias = None if head.bias is None else full(head.bias)
        logits = nn.functional.linear(full(hidden), weight, bias) * head.logit_scale  # a DTensor under SP
        return logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()

    with torch.no_grad():
        found = fsdp_runtime.forward_with_lm_head(at.model, logits, **at.share.inputs(batch))
        wanted = outputs_of(at.reference, at.batch)[at.share.own]
    compare("logits from hidden states", found, at.tokens_of(wanted), at.tokens_of(batch.weights != 0))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(tensor).detach() for name, tensor in fsdp_runtime.stream_weights(model)}


def _same_weights(what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    if set(found) != set(wanted):
        raise Wrong(f"{what}: names in only one of the two: {sorted(set(found) ^ set(wanted))[:4]}")
    for name, tensor in wanted.items():
        compare(f"{what}: {name}", found[name], tensor)


def _stream(at: Training) -> None:
    _same_weights("streamed weights", _weights(at.model), _weights(at.reference))


def _save(at: Training) -> None:
    with _shared_folder() as folder:
        fsdp_runtime.save_weights(at.model, folder)
        files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        saved = {name: tensor for file in files for name, tensor in file.items()}
        dist.barrier()
    wanted = {name: tensor for name, tensor in _weights(at.reference).items() if name in saved}
    _same_weights("saved weights", saved, wanted)


def _resume(at: Training) -> None:
    assert at.optimizer is not None
    with _shared_folder() as folder:
        fsdp_runtime.save_training_state(folder, at.model, at.optimizer, step=1)
        with torch.no_grad():
            for parameter in at.model.parameters():
                parameter.mul_(1.5)
            for state in at.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.mul_(1.5)
        fsdp_runtime.load_training_state(folder, at.model, at.optimizer)
        dist.barrier()


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Give all ranks a folder, removed at the end."""
    folder = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    name = [folder.name if folder else None]
    dist.broadcast_object_list(name)
    try:
        yield Path(str(name[0]), "saved")
    finally:
        if folder is not None:
            folder.cleanup()


def _offload(at: Training) -> None:
    optimizers = () if at.optimizer is None else (at.optimizer,)
    fsdp_runtime.offload(at.model, *optimizers, device="cpu")  # which is freed only where it is named
    fsdp_runtime.onload(at.model)


def _unsharded(at: Training) -> None:
    with torch.no_grad(), fsdp_runtime.unsharded(at.model):
        at.evaluate("logits of gathered parameters")


def _routes(at: Training) -> None:
    with torch.no_grad(), fsdp_runtime.record_routes(at.model) as routes:
        at.evaluate("logits while routes are recorded")
    with torch.no_grad(), fsdp_runtime.replay_routes(at.model, routes):
        at.evaluate("logits of replayed routes")


def _hidden_states(at: Training) -> None:
    batch = at.batch.rows(at.share.own)
    with torch.no_grad():
        found = at.evaluate("logits beside hidden states", output_hidden_states=True).hidden_states
        if at.batch.packed:
            return
        wanted = at.reference(**batch.inputs, use_cache=False, output_hidden_states=True).hidden_states
    mask = at.tokens_of((batch.weights != 0).any(-1, keepdim=True))
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(one, DTensor):
            raise Wrong(f"hidden state {place} is a DTensor")
        compare(f"hidden state {place}", one, at.tokens_of(other), mask if mask.dim() == 3 else None)


def _router_logits(at: Training) -> None:
    with torch.no_grad():
        found = at.evaluate("logits beside router logits", output_router_logits=True)
        if at.batch.packed:
            return
        wanted = at.reference(**at.batch.rows(at.share.own).inputs, use_cache=False, output_router_logits=True)
    for place, (one, other) in enumerate(zip(found.router_logits, wanted.router_logits, strict=True)):
        compare(f"router logits {place}", full(one), other)  # under cp also of the full rows


def _attentions(at: Training) -> None:
    batch = at.batch.rows(at.share.own)
    with torch.no_grad():
        found = at.model(**at.share.inputs(batch), use_cache=False, output_attentions=True).attentions
        for span, inputs in documents(batch):
            wanted = at.reference(**inputs, use_cache=False, output_attentions=True).attentions
            for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
                if other is not None:
                    compare(f"attention {place}", full(one)[..., span, span], other)


def _last_logits(at: Training) -> None:
    batch = at.batch.rows(at.share.own)
    with torch.no_grad():
        found = at.model(**at.share.inputs(batch), use_cache=False, logits_to_keep=2).logits
        wanted = outputs_of(at.reference, at.batch)[at.share.own][:, -2:]
    compare("the last two logits", full(found), wanted, batch.weights[:, -2:] != 0)


def _labels(at: Training) -> None:
    batch = at.batch.rows(at.share.own)
    ids = torch.arange(len(batch.weights) * LENGTH).view(-1, LENGTH) % 100 + 3
    labels = ids if batch.weights.dim() == 3 else torch.ones(len(batch.weights), 1, dtype=batch.weights.dtype)
    with torch.no_grad():
        wanted, found = (
            model(**inputs, use_cache=False, labels=labels).loss
            for model, inputs in ((at.reference, batch.inputs), (at.model, at.share.inputs(batch)))
        )
    compare("the model's own loss", full(found), wanted)


def _deepcopy(at: Training) -> None:
    original = at.model
    at.model = copy.deepcopy(original)
    try:
        with torch.no_grad():
            at.evaluate("logits of a copy")
    finally:
        at.model = original


def _state_dict(at: Training) -> None:
    wanted = at.reference.state_dict()
    for name, tensor in at.model.state_dict().items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        part = own_part(wanted[name], tensor) if hasattr(tensor, "to_local") else wanted[name]
        compare(f"state dict: {name}", local, part)


#: Calls by name.
EVENTS: Mapping[str, Callable[[Training], None]] = {
    "evaluation": _evaluate,
    "inference": _inference,
    "forward without backward": _without_backward,
    "train and eval": _train_and_eval,
    "generation": _generate,
    "loss from hidden states": _hidden_loss,
    "stream": _stream,
    "save": _save,
    "resume": _resume,
    "offload": _offload,
    "unsharded": _unsharded,
    "routes": _routes,
    "hidden states": _hidden_states,
    "router logits": _router_logits,
    "attentions": _attentions,
    "last logits": _last_logits,
    "labels": _labels,
    "deepcopy": _deepcopy,
    "state dict": _state_dict,
}
#: Where a call can stand in a step.
SLOTS = ("before the optimizer", "before backward", "before clipping", "before the step", "after the step")
