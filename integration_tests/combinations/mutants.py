"""Defects planted in this process, each with a case that must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from combinations import scenario
from combinations.cases import Case
from fsdp_runtime import OptionError, parallelism
from fsdp_runtime.memory import offload
from fsdp_runtime.steps.context import exchange
from fsdp_runtime.steps.documents import step as documents
from fsdp_runtime.steps.documents.isolation import CurrentDocuments
from fsdp_runtime.steps.fsdp import step as fsdp
from fsdp_runtime.steps.outputs import step as outputs
from fsdp_runtime.steps.routing import replay
from fsdp_runtime.training_state import load
from fsdp_runtime.weights.stream import ExportedModel
from harness.mutants import DetachedWeights, LosesAToken, add_bias_again
from rl_logprobs.norms import grad_norm
from tp_plans.runtime import AllToAllExchange
from tp_plans.torch_styles import boundaries, linear

Planted = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """A defect and the case that finds it."""

    planted: Planted
    case: Case


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing in the place of a step's part."""


def _without(place: Any, name: str) -> Planted:
    return partial(mock.patch.object, place, name, _nothing)


def _replaced(place: Any, name: str, value: Any) -> Planted:
    return partial(mock.patch.object, place, name, value)


def _afterwards(change: Callable[[nn.Module], Any]) -> Planted:
    """Change each model after ``parallelize``."""
    original = scenario.parallelize

    def changed(*args: Any, **kwargs: Any) -> nn.Module:
        model = original(*args, **kwargs)
        change(model)
        return model

    return partial(mock.patch.object, scenario, "parallelize", changed)


def _case(family: str, mesh: dict[str, int], *parts: tuple[str, str]) -> Case:
    return Case(family, tuple(mesh.items()), parts)


def _event(name: str, slot: str = "before the optimizer") -> tuple[str, str]:
    return "event", f"{name}@{slot}"


def _bias_again(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_hook(add_bias_again)


def _broken_tie(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())


def _larger_on_rank_one(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model.get_parameter("model.norm.weight").register_hook(lambda gradient: gradient * 1.01)


def _other_at_every_second_forward(model: nn.Module) -> None:
    forwards = count(1)
    model.get_submodule("model.norm").register_forward_hook(
        lambda _, args, output: output if next(forwards) % 2 else output * 1.01
    )


def _changed_and_refused(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).mul_(1.001)
    raise OptionError("refused after a change")


def _exchanged(kind: type[AllToAllExchange]) -> Planted:
    from fsdp_runtime.steps.experts.step import ExpertParallel

    original = scenario.parallelize

    def parallelize(model: nn.Module, mesh: Any, *, steps: Any = (), **options: Any) -> nn.Module:
        return original(model, mesh, steps=(*steps, ExpertParallel(kind)), **options)

    return partial(mock.patch.object, scenario, "parallelize", parallelize)


def _scaled_weights(original: Any) -> Any:
    def gather(self: Any, groups: Any) -> Iterator[Any]:
        sharded = any(isinstance(source, DTensor) for group in groups for source in group.sources.values())
        for item, full in original(self, groups):
            yield item, (full * 1.001 if sharded else full)

    return gather


def _unsummed(function: type[torch.autograd.Function]) -> Planted:
    """Leave each rank its part of the gradients that a function sums over ranks."""
    original = function.backward

    def backward(*args: Any) -> Any:
        with mock.patch.object(boundaries, "all_reduce", lambda gradient, mesh: gradient):
            return original(*args)

    return _replaced(function, "backward", staticmethod(backward))


def _local_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Keep this rank's part of its own gradient in the place of the sum over the ranks."""
    return None, None, *(ctx.layout.shard(gradient, dim=2) for gradient in gradients)


def _bias_on_every_rank(ctx: Any, bias: Tensor, is_first: bool) -> Tensor:
    return bias.view_as(bias)


_TP, _FSDP, _CP, _EP = {"tp": 2}, {"dp_shard": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2}
SEQUENCE_PARALLEL = ("step", "TensorParallel(plan='auto', sequence_parallel=True, towers='sharded', logits='sharded')")

MUTANTS: Mapping[str, Mutant] = {
    "an optimizer gets gathered copies": Mutant(
        _without(fsdp, "keep_readers_on_shards"), _case("dense", _FSDP, _event("evaluation"))
    ),
    "a norm counts gathered copies": Mutant(
        _without(fsdp, "keep_readers_on_shards"), _case("dense", _FSDP, _event("evaluation", "before clipping"))
    ),
    "hidden states of one rank": Mutant(
        _without(outputs, "return_full_hidden_states"), _case("dense", _TP, SEQUENCE_PARALLEL, _event("hidden states"))
    ),
    "labels against one rank's logits": Mutant(
        _without(outputs, "gather_logits_for_labels"), _case("dense", _TP, _event("labels"))
    ),
    "generation from one rank's logits": Mutant(
        _without(outputs, "gather_logits_in_generate"), _case("dense", _TP, _event("generation"))
    ),
    "documents read one another": Mutant(
        _without(documents, "find_documents"), _case("delta net", _FSDP, ("rows", "packed"))
    ),
    "recomputation without documents": Mutant(
        _replaced(CurrentDocuments, "bind", lambda self, module, forward: forward),
        _case(
            "delta net",
            _FSDP,
            ("rows", "packed"),
            ("step", "ActivationCheckpointing(mode='block')"),
            _event("generation", "before backward"),
        ),
    ),
    "gradients averaged over cp": Mutant(
        _replaced(parallelism, "_ranks_with_different_batches", lambda mesh: 2), _case("dense", _CP)
    ),
    "keys without the gradients of other ranks": Mutant(
        _replaced(exchange._Gather, "backward", staticmethod(_local_backward)), _case("dense", _CP)
    ),
    "head norms with one rank's gradient": Mutant(_unsummed(boundaries._Parts), _case("head norms", _TP)),
    "norms of the stream with one rank's gradient": Mutant(
        _unsummed(boundaries._Parts), _case("dense", _TP, SEQUENCE_PARALLEL)
    ),
    "a shared key with one rank's gradient": Mutant(_unsummed(boundaries._SumGradient), _case("latent attention", _TP)),
    "a row-wise bias on every rank": Mutant(
        _replaced(linear._OnFirstRank, "forward", staticmethod(_bias_on_every_rank)), _case("dense", _TP)
    ),
    "a bias added twice": Mutant(_afterwards(_bias_again), _case("dense", _TP, SEQUENCE_PARALLEL)),
    "a broken tie": Mutant(_afterwards(_broken_tie), _case("tied", _TP)),
    "a gradient that is larger on one rank": Mutant(_afterwards(_larger_on_rank_one), _case("head norms", _TP)),
    "a second forward that differs": Mutant(
        _afterwards(_other_at_every_second_forward), _case("dense", _TP, _event("the sum of two losses"))
    ),
    "a token sent to no expert": Mutant(_exchanged(LosesAToken), _case("mixture", _EP)),
    "routing weights without gradients": Mutant(_exchanged(DetachedWeights), _case("mixture", _EP)),
    "a norm that is too large": Mutant(
        _replaced(grad_norm, "norm_power", lambda *args: 1.02 * _power(*args)),
        _case("dense", _FSDP),
    ),
    "weights of other values in exports": Mutant(
        _replaced(ExportedModel, "gather", _scaled_weights(ExportedModel.gather)),
        _case("dense", _TP, _event("stream")),
    ),
    "weights of other values in files": Mutant(
        _replaced(ExportedModel, "gather", _scaled_weights(ExportedModel.gather)), _case("dense", _FSDP, _event("save"))
    ),
    "momentum lost at a resume": Mutant(
        _replaced(load, "restore_optimizer", lambda *_: iter(())),
        _case("dense", _FSDP, _event("resume", "after the step")),
    ),
    "zeros back from host memory": Mutant(
        _replaced(offload, "_to_host", lambda storage: torch.zeros(storage.nbytes(), dtype=torch.uint8)),
        _case("dense", _FSDP, _event("offload", "before clipping")),
    ),
    "routes of other tokens": Mutant(
        _replaced(replay._Tokens, "local", lambda self, full: full.flip(0)), _case("mixture", _FSDP, _event("routes"))
    ),
    "a change before a refusal": Mutant(_replaced(scenario, "parallelize", _changed_and_refused), _case("dense", _TP)),
}
_power = grad_norm.norm_power


def run_planted(case: Case, name: str = "") -> scenario.Result:
    """Run a case on this rank, with a planted defect if one is named."""
    with MUTANTS[name].planted() if name else nullcontext():
        return scenario.run(case)
