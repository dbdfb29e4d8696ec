"""Dropout over ``tp``: equal where activations are, whatever the ranks are seeded with, and recomputed alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import ModelError, describe_parallelism, parallelize
from fsdp_runtime.steps import Compile
from fsdp_runtime.steps.random_states import _SEEDS
from harness.collectives import RecordCollectives
from harness.models import jitter, tiny_inputs, tiny_model
from harness.parity import gradient_errors, mesh_for
from harness.ranks import RankPool


def _gpt2(**probabilities: float) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=32, **{**none, **probabilities}
    )
    model = transformers.GPT2LMHeadModel(config).double().train()
    jitter(model)
    return model


def _backward(model: nn.Module) -> None:
    logits = model(input_ids=torch.arange(3, 19).view(2, 8), use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    torch.manual_seed(77)  # recomputed modules go back to the state of their forward
    (logits * weights).sum().backward()


def _errors(options: dict[str, Any]) -> tuple[float, bool]:
    """Errors of gradients against one process, and whether this rank's random state is its own after the forward."""
    reference = _gpt2(resid_pdrop=0.2, embd_pdrop=0.2)
    torch.manual_seed(5)
    torch.manual_seed(int(torch.randint(_SEEDS, ())))  # as drawn by the first rank of tp
    _backward(reference)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    model = _gpt2(resid_pdrop=0.2, embd_pdrop=0.2)
    parallelize(model, mesh_for({"tp": 2}), logits="full", **options)
    torch.manual_seed(5 + dist.get_rank())
    torch.randint(_SEEDS, ())
    after = torch.get_rng_state()
    torch.manual_seed(5 + dist.get_rank())
    kept: list[bool] = []
    model.register_forward_hook(lambda *_: kept.append(torch.equal(torch.get_rng_state(), after)))
    _backward(model)
    return max(gradient_errors(expected, model).values()), kept[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": "block"},
        {"activation_checkpointing": "selective"},
        pytest.param(
            {"activation_checkpointing": "block", "compile": Compile({"backend": "eager"})}, marks=pytest.mark.slow
        ),
        pytest.param({"compile": Compile({"backend": "aot_eager"})}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_of_other_seeds_drop_what_one_process_drops(two_ranks: RankPool, options: dict[str, Any]) -> None:
    for error, own_state in two_ranks.run(_errors, options):
        assert error < 1e-4
        assert own_state


def _of_heads(options: dict[str, Any]) -> list[Tensor]:
    """What the output projections of attention with equal heads are given, by rank; the second run is recomputed."""
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=1, attention_dropout=0.4).train()
    attention = model.model.layers[0].self_attn
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        for parameter in layer.parameters():
            half = len(parameter) // 2
            parameter.data[half:] = parameter.data[:half]
    parallelize(model, mesh_for({"tp": 2}), **options)
    found: list[Tensor] = []
    attention.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().clone()))
    torch.manual_seed(dist.get_rank())
    model(**tiny_inputs(model, batch=2, length=6)).logits.full_tensor().square().sum().backward()
    return found


def test_attention_drops_other_weights_for_the_heads_of_another_rank(two_ranks: RankPool) -> None:
    (first, first_again), (second, second_again) = two_ranks.run(_of_heads, {"activation_checkpointing": "block"})
    assert first.shape == second.shape
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(first, first_again)
    assert torch.equal(second, second_again)


def _of_heads_and_residuals() -> tuple[list[Tensor], Tensor]:
    """The same of attention that drops its output too, and that output."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTJConfig(
        vocab_size=131, n_embd=64, n_layer=1, n_head=4, rotary_dim=8, embd_pdrop=0.0, attn_pdrop=0.4, resid_pdrop=0.4
    )
    model = transformers.GPTJForCausalLM(config).double().train()
    attention = model.transformer.h[0].attn
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        layer.weight.data[32:] = layer.weight.data[:32]
    parallelize(model, mesh_for({"tp": 2}), activation_checkpointing="block")
    found: list[Tensor] = []
    outputs: list[Tensor] = []
    attention.out_proj.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().clone()))
    attention.register_forward_hook(lambda _module, _args, output: outputs.append(output[0].detach()))
    torch.manual_seed(dist.get_rank())
    model(**tiny_inputs(model, batch=2, length=6), use_cache=False).logits.full_tensor().square().sum().backward()
    return found, outputs[0]


def test_attention_that_drops_its_output_too_drops_other_weights_for_other_heads(two_ranks: RankPool) -> None:
    ((first, again), output), ((second, _), same) = two_ranks.run(_of_heads_and_residuals)
    assert first.shape == second.shape
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(first, again)
    assert torch.equal(output, same)
    assert (output == 0).any()


def _replicas(plan: Any, config: dict[str, Any]) -> list[Tensor]:
    """Gradients of replicated parameters under attention dropout."""
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=1, **config).train()
    parallelize(model, mesh_for({"tp": 2}), plan=plan, logits="full")
    torch.manual_seed(dist.get_rank())
    _backward(model)
    gradients = [parameter.grad for name, parameter in model.named_parameters() if "norm" in name]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]


@pytest.mark.parametrize("plan", ["auto", None])
def test_replicated_parameters_have_equal_gradients(two_ranks: RankPool, plan: Any) -> None:
    first, second = two_ranks.run(_replicas, plan, {"attention_dropout": 0.4})
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def _tokens_that_ranks_do_not_divide(head: str) -> list[list[Tensor]]:
    """Gradients of a model with dropout under SP, for 11 tokens on two ranks, without and with recomputation."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=131, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_labels=3
    )
    llama = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_labels": 3}
    found = []
    for checkpointing in ("none", "block"):
        torch.manual_seed(0)
        cls: Any = getattr(transformers, head)
        bert = head.startswith("Bert")
        other: Any = transformers.LlamaConfig(**llama, num_hidden_layers=1, classifier_dropout=0.3)
        if head.startswith("Falcon"):  # which calls F.dropout in its blocks
            other = transformers.FalconConfig(
                vocab_size=131, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.3
            )
        model = cls(config if bert else other)
        parallelize(
            model.double().train(),
            mesh_for({"tp": 2}),
            sequence_parallel=True,
            logits="full",
            activation_checkpointing=checkpointing,  # type: ignore[arg-type]
        )
        torch.manual_seed(5 + dist.get_rank())
        output = model(input_ids=torch.arange(22).view(2, 11)).logits
        torch.manual_seed(77)
        (output**2).sum().backward()
        found.append([_full_gradient(parameter) for parameter in model.parameters() if parameter.grad is not None])
    return found


def _full_gradient(parameter: Tensor) -> Tensor:
    gradient: Any = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize(
    "head", ["BertForMaskedLM", "BertForTokenClassification", "LlamaForTokenClassification", "FalconForCausalLM"]
)
def test_dropout_of_tokens_that_ranks_do_not_divide_is_recomputed_alike(two_ranks: RankPool, head: str) -> None:
    (first, recomputed), (second, _) = two_ranks.run(_tokens_that_ranks_do_not_divide, head)
    for one, again, other in zip(first, recomputed, second, strict=True):
        torch.testing.assert_close(one, again, rtol=1e-4, atol=1e-7)  # norms compute in float32
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _uneven() -> str:
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=1, intermediate_size=97).train()
    mlp = model.model.layers[0].mlp
    mlp.act_fn = nn.Sequential(mlp.act_fn, nn.Dropout(0.2))
    parallelize(model, mesh_for({"tp": 2}))
    try:
        model(**tiny_inputs(model, batch=2, length=6))
    except ModelError as error:
        return str(error)
    return "accepted"


def test_ranks_that_draw_different_amounts_all_say_so(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_uneven):
        assert "ranks [0, 1] of tp drew different amounts of random numbers" in said


def _effects() -> list[bool]:
    """Whether a model and a copy of it draw alike."""
    dropping = parallelize(_gpt2(resid_pdrop=0.1), mesh_for({"tp": 2}))
    copied = copy.deepcopy(dropping)
    torch.manual_seed(dist.get_rank())
    outputs = [each(input_ids=torch.arange(8)[None], use_cache=False).logits for each in (dropping, copied)]
    assert all(each.isfinite().all() for each in outputs)
    return ["draws equal numbers over tp" in describe_parallelism(each).wrapped[""] for each in (dropping, copied)]


def test_a_copy_of_a_model_draws_alike(two_ranks: RankPool) -> None:
    assert all(map(all, two_ranks.run(_effects)))


def _collectives(training: bool) -> int:
    """Collectives of random states in a forward."""
    model = parallelize(_gpt2(resid_pdrop=0.1).train(training), mesh_for({"tp": 2}))
    with RecordCollectives() as recorded:
        model(input_ids=torch.arange(8)[None], use_cache=False)
    return sum(call.nbytes == 8 for call in recorded.calls)


def test_evaluation_exchanges_no_seeds(two_ranks: RankPool) -> None:
    assert two_ranks.run(_collectives, False) == [0, 0]
    assert two_ranks.run(_collectives, True) == [2, 2]
