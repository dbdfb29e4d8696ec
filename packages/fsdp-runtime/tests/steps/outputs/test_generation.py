"""``generate`` of a model whose logits are sharded on the vocabulary."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_runtime import parallelize
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

TOKENS = torch.tensor([[5, 6, 7, 8], [0, 9, 10, 11]])
SETTINGS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": (TOKENS > 0).long()}


def _differences() -> list[str]:
    plain = tiny_model("Qwen3ForCausalLM")
    wanted = plain.generate(input_ids=TOKENS, **SETTINGS)  # type: ignore[operator]
    adapted: Any = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(target_modules=["q_proj"]))
    models = {
        "TP": parallelize(copy.deepcopy(plain), mesh_for({"tp": 2})),
        "SP": parallelize(copy.deepcopy(plain), mesh_for({"tp": 2}), sequence_parallel=True),
        "adapters": parallelize(adapted.double().eval(), mesh_for({"tp": 2})),
    }
    models["a copy"] = copy.deepcopy(models["TP"])
    wrong = []
    for name, model in models.items():
        found = model.generate(input_ids=TOKENS, **SETTINGS)  # type: ignore[operator]
        wrong += [] if torch.equal(found, wanted) else [name]
        logits = model(input_ids=TOKENS, use_cache=False).logits
        wrong += [] if isinstance(logits, DTensor) else [f"{name}: the logits of a forward are full"]
    wrong += [] if models["a copy"].generate.model is models["a copy"] else ["the copy generates by the first model"]  # type: ignore[union-attr]
    return wrong


def test_a_split_model_generates_the_tokens_of_one_process(two_ranks: RankPool) -> None:
    assert two_ranks.run(_differences) == [[], []]


def _sampled(equal_seeds: bool) -> tuple[list[Any], float]:
    plain = tiny_model("Qwen3ForCausalLM")
    model: Any = parallelize(copy.deepcopy(plain), mesh_for({"tp": 2}))
    settings = {**SETTINGS, "do_sample": True}
    torch.manual_seed(3)
    wanted = plain.generate(input_ids=TOKENS, **settings)  # type: ignore[operator]
    seed = 3 if equal_seeds else 3 + dist.get_rank()
    torch.manual_seed(seed)
    found = [model.generate(input_ids=TOKENS, **settings).tolist(), copy.deepcopy(model).generate is not model.generate]
    return [found, wanted.tolist()], torch.rand(()).item()


def test_ranks_sample_the_tokens_of_the_first_however_they_are_seeded(two_ranks: RankPool) -> None:
    (one, _), (other, own) = two_ranks.run(_sampled, False)
    assert one == other
    assert one[0] == [one[1], True]
    assert own == torch.rand((), generator=torch.Generator().manual_seed(4)).item()
    (_, first), (_, second) = two_ranks.run(_sampled, True)
    assert first == second
