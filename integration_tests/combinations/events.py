"""Calls between the calls of a training step: each compares its own result, and must change nothing else."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp_runtime
from combinations.batches import LENGTH, Batch, Share, full, outputs_of
from harness.parity import GRADIENT_BOUND, gradient_errors, largest, own_part

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

    def logits_of(self, part: Batch) -> Tensor:
        """Return the parallelized model's logits of this rank's rows."""
        return full(self.model(**self.share.inputs(part), use_cache=False).logits)

    def loss_of(self, logits: Tensor, part: Batch) -> Tensor:
        """Return a rank's part of the loss of some logits; FSDP2 averages over the ranks of ``dp``."""
        return (logits * self.tokens_of(part.weights)).sum() * self.share.ranks

    def reference_loss(self) -> Tensor:
        """Return the loss of the batch on one process."""
        return (outputs_of(self.reference, self.batch) * self.batch.weights).sum()

    def compare_gradients(self, least_share: float) -> None:
        """Compare the gradients of the two models."""
        wanted = {name: parameter.grad for name, parameter in self.reference.named_parameters()}
        for name, error in gradient_errors(wanted, self.model, least_share=least_share).items():
            if not error <= GRADIENT_BOUND:
                raise Wrong(f"gradient of {name} off by {error:.1e} of its largest element")

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


def _generate(at: Training, **options: Any) -> None:
    found = []
    for model in (at.reference, at.model):
        torch.manual_seed(11)
        with torch.no_grad():
            found.append(generated(model, **options))
    if not torch.equal(*found):
        raise Wrong(f"generated {found[1].tolist()} in the place of {found[0].tolist()}")


def generated(model: Any, **options: Any) -> Tensor:
    """Return the ids that a model generates after two rows of five."""
    options = {"do_sample": False, **options}
    ids: Tensor = model.generate(input_ids=torch.arange(3, 13).view(2, 5), max_new_tokens=3, pad_token_id=0, **options)
    return ids


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


def _functional(at: Training) -> None:
    model, parameters = at.model, dict(at.model.named_parameters())
    called = replace(at, model=lambda **inputs: torch.func.functional_call(model, parameters, (), inputs))
    with torch.no_grad():
        called.evaluate("logits of a functional call")


def _without_adapter(at: Training) -> None:
    with torch.no_grad(), at.model.disable_adapter(), at.reference.disable_adapter():
        at.evaluate("logits without the adapter")


def _merged(at: Training) -> None:
    at.model.merge_adapter()
    at.reference.merge_adapter()
    try:
        with torch.no_grad():
            at.evaluate("logits of merged weights")
    finally:
        at.model.unmerge_adapter()
        at.reference.unmerge_adapter()


def _deepcopy(at: Training) -> None:
    with torch.no_grad():
        replace(at, model=copy.deepcopy(at.model)).evaluate("logits of a copy")


def _state_dict(at: Training) -> None:
    wanted = at.reference.state_dict()
    for name, tensor in at.model.state_dict().items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        part = own_part(wanted[name], tensor) if hasattr(tensor, "to_local") else wanted[name]
        compare(f"state dict: {name}", local, part)


_FULL = StateDictOptions(full_state_dict=True)
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _full_state_dict(at: Training) -> None:
    found, wanted = get_model_state_dict(at.model, options=_FULL), get_model_state_dict(at.reference)
    if dist.get_rank() == 0:
        _same_weights("full state dict", found, wanted)  # type: ignore[arg-type]


def _set_state_dict(at: Training) -> None:
    state = get_model_state_dict(at.reference) if dist.get_rank() == 0 else {}
    with torch.no_grad():
        for parameter in at.model.parameters():
            parameter.mul_(1.5)
    set_model_state_dict(at.model, state, options=_FROM_RANK_0)
    _state_dict(at)


def _optimizer_state_dict(at: Training) -> None:
    """Write an optimizer's state, as shards and in full, and read it back."""
    if at.optimizer is None or len(at.optimizer.state) < sum(len(g["params"]) for g in at.optimizer.param_groups):
        return  # torch refuses parameters without a state
    before = {key: full(value).clone() for key, value in _states(at.optimizer).items()}
    for write, read in ((StateDictOptions(), StateDictOptions()), (_FULL, _FROM_RANK_0)):
        state = copy.deepcopy(get_optimizer_state_dict(at.model, at.optimizer, options=write))
        for value in _states(at.optimizer).values():
            value.zero_()
        state = {} if read is _FROM_RANK_0 and dist.get_rank() else state
        set_optimizer_state_dict(at.model, at.optimizer, state, options=read)
        found = _states(at.optimizer)
        for key, wanted in before.items():
            compare(f"state of the optimizer: {key[1]}", full(found[key]), wanted)


def _states(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    """The tensors of the state, by parameter and name."""
    return {
        (id(parameter), name): value
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


#: Calls by name.
EVENTS: dict[str, Callable[[Training], None]] = {
    "evaluation": _evaluate,
    "inference": _inference,
    "forward without backward": _without_backward,
    "train and eval": _train_and_eval,
    "generation": _generate,
    "beams": partial(_generate, num_beams=2),
    "sampling": partial(_generate, do_sample=True, top_k=20),
    "static cache": partial(_generate, cache_implementation="static", disable_compile=True),
    "loss from hidden states": _hidden_loss,
    "stream": _stream,
    "save": _save,
    "resume": _resume,
    "offload": _offload,
    "unsharded": _unsharded,
    "routes": _routes,
    "hidden states": _hidden_states,
    "router logits": _router_logits,
    "last logits": _last_logits,
    "labels": _labels,
    "deepcopy": _deepcopy,
    "state dict": _state_dict,
    "full state dict": _full_state_dict,
    "set state dict": _set_state_dict,
    "state dict of the optimizer": _optimizer_state_dict,
    "functional call": _functional,
    "without adapter": _without_adapter,
    "merged": _merged,
}
#: Calls of adapters, of models that generate, and of mixtures.
OF_ADAPTERS = ("without adapter", "merged")
GENERATIONS = ("generation", "beams", "sampling", "static cache")
OF_DECODERS = (*GENERATIONS, "last logits", "loss from hidden states")
OF_MIXTURES = ("routes", "router logits")
#: Where a call can stand in a step.
SLOTS = ("before the optimizer", "before backward", "before clipping", "before the step", "after the step")
