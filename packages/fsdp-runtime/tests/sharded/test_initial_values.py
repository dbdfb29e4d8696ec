"""Ranks that hold different values when a model is sharded: all of them take the first rank's, with one warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import meta_device, parallelize
from fsdp_runtime.sharded.hashing import hash_words
from fsdp_runtime.sharded.initial_values import logger
from harness.collectives import RecordCollectives
from harness.models import tiny_config, tiny_model
from harness.parity import mesh_for, own_part
from harness.ranks import RankPool


class _Plain(nn.Module):
    """Two blocks and buffers of every kind, outside of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.layers[1][0].weight = self.layers[0][0].weight
        self.register_buffer("scale", torch.randn(3, 5).t(), persistent=False)
        self.register_buffer("count", torch.randint(9, ()))
        self.register_buffer("low", torch.randn(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base: Any = tiny_model("LlamaForCausalLM")
    torch.manual_seed(100 + dist.get_rank())  # models of the harness begin from a seed of their own
    config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    return get_peft_model(base, config)


def _new_head() -> nn.Module:
    model = tiny_model("LlamaForCausalLM")
    torch.manual_seed(100 + dist.get_rank())
    torch.nn.init.normal_(model.lm_head.weight)
    return model


def _mixture() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, vocab_size=131, head_dim=16))


def _tied() -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(tiny_config("LlamaForCausalLM", tied=True))


MODELS = {"plain": _Plain, "adapters": _adapted, "new head": _new_head, "mixture": _mixture, "tied": _tied}


def _taken(model_name: str, axes: dict[str, int], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of tensors that are not the first rank's after a draw by rank, and the warnings."""
    mesh = mesh_for(axes)
    torch.manual_seed(100 + dist.get_rank())
    model = MODELS[model_name]()
    drawn = [{name: each.clone() for name, each in (*model.named_parameters(), *model.named_buffers())}]
    dist.broadcast_object_list(drawn)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        parallelize(model, mesh, **options)
    finally:
        logger.removeHandler(handler)
    wrong = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        expected = own_part(drawn[0][name], tensor) if isinstance(tensor, DTensor) else drawn[0][name]
        actual = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(actual, expected):
            wrong.append(name)
    return wrong, said


@pytest.mark.parametrize(
    ("model", "axes", "options"),
    [
        ("plain", {"dp_replicate": 2}, {"plan": None}),
        ("plain", {"tp": 2}, {"plan": None}),
        ("adapters", {"dp_shard": 2}, {}),
        ("adapters", {"tp": 2}, {}),
        ("new head", {"cp": 2}, {}),
        ("mixture", {"dp_shard": 2, "ep": 2}, {}),
        ("mixture", {"tp": 2, "ep": 2}, {}),
        ("tied", {"tp": 2}, {"sequence_parallel": True}),
    ],
)
def test_all_ranks_take_the_first_ranks_values(
    two_ranks: RankPool, model: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    (wrong, said), (other_wrong, other_said) = two_ranks.run(_taken, model, axes, options)
    assert (wrong, other_wrong, other_said) == ([], [], [])
    assert len(said) == 1
    assert "all ranks take the values of rank 0" in said[0]


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_two_axes_take_the_values_of_one_rank(four_ranks: RankPool, axes: dict[str, int]) -> None:
    results = four_ranks.run(_taken, "new head", axes, {})
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert [len(said) for _, said in results] == [1, 0, 0, 0]
    assert "1 of " in results[0][1][0]
    assert "(lm_head.weight)" in results[0][1][0]


def _collectives() -> list[int]:
    """Collectives of ``parallelize`` for a model on the meta device, for one with values, and for rank 1's on meta."""
    counts = []
    for kind in ("meta", "values", "mixed"):
        model = tiny_model("LlamaForCausalLM")
        if kind == "meta":
            with meta_device():
                model = type(model)(model.config)
        if kind == "mixed" and dist.get_rank() == 1:
            model = model.to("meta")
        with RecordCollectives() as recorded:
            parallelize(model, mesh_for({"dp_shard": 2}))
        counts.append(len(recorded.calls))
    return counts


def test_equal_values_cost_one_collective_and_none_on_meta(two_ranks: RankPool) -> None:
    for on_meta, with_values, mixed in two_ranks.run(_collectives):
        assert with_values == mixed == on_meta + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_a_digest_sees_every_bit_and_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 33).to(dtype)
    digests = {int(hash_words(tensor))}
    for place in range(32):
        changed = tensor.clone()
        changed.view(torch.uint8)[(place + 1) * tensor.element_size() - 1] ^= 128  # the sign of the last word
        digests.add(int(hash_words(changed)))
        digests.add(int(hash_words(tensor.roll(place))))
    assert len(digests) == 1 + 32 + (0 if dtype == torch.bool else 31)
    assert int(hash_words(torch.cat([tensor[:1], tensor])[1:])) == int(hash_words(tensor))
