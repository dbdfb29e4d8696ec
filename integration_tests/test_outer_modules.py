"""Modules around a trunk of transformers that are no model of transformers themselves: whose plan they get."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import parallelize
from harness.float64 import compute_in_float64
from harness.models import HIDDEN, VOCAB, jitter, tiny_config
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool
from tp_plans import architectures, plan_for, register

BOUND = 1e-9


class Qwen3ForCausalLM(nn.Module):
    """A class of the name, paths and config of transformers', and of other bases."""

    def __init__(self, *, tied: bool = False, value: bool = False) -> None:
        from transformers import Qwen3Model

        super().__init__()
        self.config = tiny_config("Qwen3ForCausalLM", tied=tied)
        self.model = Qwen3Model(self.config)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.value_head = nn.Linear(HIDDEN, 1) if value else None
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.lm_head(hidden), None if self.value_head is None else self.value_head(hidden)


class RegisteredPolicy(nn.Module):
    """A class of a name that the test registers."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.__dict__.update(Qwen3ForCausalLM(**options).__dict__)

    forward = Qwen3ForCausalLM.forward


class UnknownPolicy(nn.Module):
    """A class of no known name, with the blocks where no known plan has them."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        known = Qwen3ForCausalLM(**options)
        self.trunk, self.head, self.value_head = known.model, known.lm_head, known.value_head

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = self.trunk(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.head(hidden), None if self.value_head is None else self.value_head(hidden)


def derived(**options: bool) -> nn.Module:
    """Return a model of transformers of a class derived from a known one, with a value head of its own."""
    import transformers

    class WithValue(transformers.Qwen3ForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.value_head = nn.Linear(HIDDEN, 1)

        forward = Qwen3ForCausalLM.forward

    return WithValue(tiny_config("Qwen3ForCausalLM", tied=options["tied"]))


def _register() -> None:
    entry = next(each for each in architectures() if each.class_name == "Qwen3ForCausalLM")
    register(replace(entry, class_name="RegisteredPolicy", model_type="registered_policy", aliases=()))


#: What is built, and whether its logits stay sharded on the vocabulary.
CASES: dict[Any, bool] = {Qwen3ForCausalLM: True, RegisteredPolicy: True, UnknownPolicy: False, derived: True}


def _loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    outputs = [each for each in model(ids) if each is not None]
    full = [each.full_tensor() if isinstance(each, DTensor) else each for each in outputs]
    return sum((each.logsumexp(-1).square().sum() for each in full), torch.zeros(())), outputs


def compared() -> list[str]:
    """Return what differs from one process on this rank, by class, tie, value head and mode."""
    _register()
    mesh = mesh_for({"tp": 2})
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    faults = []
    for build, sharded in CASES.items():
        for tied, value, sequence_parallel in ((False, True, True), (True, False, False), (True, True, True)):
            torch.manual_seed(0)
            single = build(tied=tied, value=value).double()
            jitter(single)
            model = parallelize(copy.deepcopy(single), mesh, sequence_parallel=sequence_parallel)
            with compute_in_float64():
                loss, expected = _loss(single, ids)
                loss.backward()
                loss, outputs = _loss(model, ids)
                loss.backward()
            case = f"{build.__name__}, tied {tied}, value head {value}, SP {sequence_parallel}"
            if isinstance(outputs[0], DTensor) != sharded:
                faults.append(f"{case}: the logits are a {type(outputs[0]).__name__}")
            for found, wanted in zip(outputs, expected, strict=True):
                found = found.full_tensor() if isinstance(found, DTensor) else found
                if not largest(found - wanted) <= BOUND:
                    faults.append(f"{case}: outputs off by {largest(found - wanted):.1e}")
            errors = gradient_errors({path: each.grad for path, each in single.named_parameters()}, model)
            faults += [f"{case}: {path} off by {error:.1e}" for path, error in errors.items() if not error <= BOUND]
    return faults


def test_a_module_around_a_trunk_computes_what_one_process_does(two_ranks: RankPool) -> None:
    for faults in two_ranks.run(compared):
        assert faults == []


def test_a_known_class_name_counts_before_the_trunk_inside() -> None:
    _register()
    for build in (Qwen3ForCausalLM, RegisteredPolicy):
        model = build()
        for sequence_parallel in (False, True):
            found = plan_for(model, sequence_parallel=sequence_parallel)
            assert dict(found) == dict(plan_for(model, sequence_parallel=sequence_parallel))


def test_a_known_class_name_around_a_whole_model_leaves_the_plan_to_the_model() -> None:
    class Qwen3ForCausalLM(nn.Module):
        def __init__(self) -> None:
            import transformers

            super().__init__()
            self.policy = transformers.Qwen3ForCausalLM(tiny_config("Qwen3ForCausalLM"))

    model = Qwen3ForCausalLM()
    assert dict(plan_for(model)) == dict(plan_for(model.policy).with_prefix("policy"))
