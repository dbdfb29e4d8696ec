"""Context parallelism refuses what it would cut apart; its numbers are tested with the log-probabilities' package."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from coverage.table import row_or_skip
from coverage.table import tiny_model as tiny_row
from fsdp_runtime import LayoutError, MeshSpec, ModelError, describe_parallelism, parallelize, sequence_layout
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.setup import ModelFacts
from fsdp_runtime.steps import Compile, ContextAttention, ContextParallel
from fsdp_runtime.steps.context.mixers import eager_function, gather_for, gathered_mixers
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.context.step import (
    check_context_parallel,
    replace_attention,
    under_context_parallelism,
    whole_rows,
)
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool


def _attention() -> ContextAttention:
    """The attention of one rank."""
    return ContextAttention(MeshSpec().build(device_type="cpu").get_group("cp"), "headtail")


def _refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_context_parallel(ModelFacts.of(model))


def test_attention_of_another_kind_is_refused_with_the_fix() -> None:
    model = tiny_model("LlamaForCausalLM")
    model.config._attn_implementation = "flex_attention"
    _refused(
        model, r"computes attention by 'flex_attention': cp needs 'sdpa' or 'eager', as set by model\.set_attn_impl"
    )


def test_a_head_that_scores_one_token_of_each_row_is_refused_with_the_fix() -> None:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32)
    model = transformers.RobertaForSequenceClassification(config)
    _refused(model, r"picks one token of each row for its scores.*use cp=1, or parallelize its trunk \(AutoModel\)")


def test_an_encoder_with_a_decoder_is_refused() -> None:
    import transformers

    sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    _refused(
        transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)), "its decoder attends to an encoder"
    )


def test_masks_that_are_made_from_the_length_of_a_row_are_refused() -> None:
    import transformers

    config = transformers.CpmAntConfig(hidden_size=8, num_attention_heads=2, dim_head=4, dim_ff=8, num_hidden_layers=1)
    _refused(transformers.CpmAntForCausalLM(config), "computes its mask and positions from the length of a row")


@pytest.mark.parametrize(
    ("row", "ways"),
    [
        ("llama", {}),
        ("granite_swa", {}),  # sinks
        ("doge", {"DogeAttention": "mask"}),  # a mask from the values of all tokens
        ("glm_moe_dsa", {"GlmMoeDsaAttention": "mask"}),  # an indexer
        ("jamba", {"JambaMambaMixer": "documents"}),
    ],
)
def test_only_mixers_that_are_no_plain_attention_run_on_full_sequences(row: str, ways: dict[str, str]) -> None:
    model = tiny_row(row_or_skip(row))
    implementation = model.config.get_text_config()._attn_implementation
    found = gathered_mixers(ModelFacts.of(model).token_mixers, implementation)
    assert {mixer.kind: mixer.isolation for mixer in found} == ways


def test_chunks_of_attention_start_anew_in_each_packed_document() -> None:
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        attention_chunk_size=4,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        moe_layers=[],
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    positions = torch.tensor([[*range(5), *range(7)]])
    tokens = torch.arange(12)[None]
    inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    with torch.no_grad():  # transformers counts chunks over the row in releases such as 5.10
        expected = torch.cat([model(part, use_cache=False).logits for part in tokens.split([5, 7], 1)], 1)
        replace_attention(model, _attention())
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-6, rtol=0)


def test_frequencies_that_depend_on_the_longest_position_are_refused() -> None:
    model = tiny_model("LlamaForCausalLM")
    model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    _refused(model, "rotary embeddings of type longrope, and their frequencies depend on the longest position")


def test_a_model_of_ones_own_is_shown_what_to_call() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    _refused(model, r"not a transformers model.*call ContextAttention\(group, load_balancer\)\.attend")


def _alone() -> nn.Module:
    model = tiny_model("LlamaForCausalLM")
    replace_attention(model, _attention())
    return model


def test_another_model_of_the_same_config_keeps_its_attention() -> None:
    model = tiny_model("LlamaForCausalLM")
    twin = type(model)(model.config)
    replace_attention(model, _attention())
    assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation != "sdpa"
    assert model.model.layers[0].self_attn.config is model.config


def _own_attention() -> Any:
    """A model whose attention does not use ``transformers.AttentionInterface``."""
    import transformers

    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.FalconConfig(**sizes, attn_implementation="eager")
    model = transformers.FalconForCausalLM(config).eval()
    attention = _attention()
    attention.eager = eager_function
    keep = gather_for(gathered_mixers(ModelFacts.of(model).token_mixers, "eager"), attention)
    replace_attention(model, attention, keep=keep)
    return model


def test_attention_of_the_models_own_code_gets_the_masks_of_context_parallelism() -> None:
    model = _own_attention()
    assert model.config._attn_implementation.startswith("context_parallel_")
    assert model.transformer.h[0].self_attention.config._attn_implementation == "eager"
    model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_a_mask_that_context_parallelism_has_not_made_is_refused() -> None:
    model = _own_attention()
    with pytest.raises(
        LayoutError, match=r"a mask \(1, 1, 4, 4\) that does not come from transformers' mask functions"
    ):
        _attention().full_mask(torch.ones(1, 1, 4, 4), _attention().layout(4))
    with pytest.raises(LayoutError, match=r"FalconAttention has a mask \(1, 1, 3, 3\), and the full sequence 4 tokens"):
        model.transformer.h[0].self_attention(torch.ones(1, 4, 16), alibi=None, attention_mask=torch.zeros(1, 1, 3, 3))


def test_attention_that_is_set_after_parallelize_is_refused() -> None:
    model = _own_attention()
    model.config._attn_implementation = "eager"  # planted: transformers masks the first tokens on every rank
    with pytest.raises(ModelError, match="call set_attn_implementation before parallelize"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_one_rank_computes_what_the_plain_model_does() -> None:
    plain = tiny_model("LlamaForCausalLM")
    inputs = tiny_inputs(plain, batch=2, length=6)
    torch.testing.assert_close(_alone()(**inputs).logits, plain(**inputs).logits, atol=1e-6, rtol=0)


def _attends_in_ones_own_model() -> float:
    """Attention called directly, as a model of one's own would."""
    group = MeshSpec(cp=2).build(device_type="cpu").get_group("cp")
    layout = SequenceLayout(12, 2, group.rank())
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 8, generator=generator) for heads in (4, 2, 2))
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    parts = [layout.shard(each, dim=2) for each in (query, key, value)]
    output, _ = ContextAttention(group, "headtail").attend(nn.Identity(), *parts, attention_mask=None)
    return (output - layout.shard(expected, dim=2).transpose(1, 2)).abs().max().item()


def test_attention_can_be_called_from_a_model_of_ones_own(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_attends_in_ones_own_model)) < 1e-6


def _gradients(**options: Any) -> float:
    """The largest difference of any gradient to the model without those options."""
    mesh = MeshSpec(cp=2).build(device_type="cpu")
    models = [tiny_model("Qwen3ForCausalLM", num_hidden_layers=1) for _ in range(2)]
    layout = sequence_layout(mesh, 8)
    for model, chosen in zip(models, ({}, options), strict=True):
        parallelize(model, mesh, **chosen)
        local = layout.shard_batch(tiny_inputs(model, batch=1, length=8))
        model(**local).logits.square().sum().backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max((one.grad.to_local() - other.grad.to_local()).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "selective"},
        pytest.param(
            {"activation_checkpointing": "block", "compile": Compile({"backend": "aot_eager"})}, marks=pytest.mark.slow
        ),
    ],
    ids=["selective", "compiled"],
)
def test_recomputing_and_compiled_blocks_gather_alike(two_ranks: RankPool, options: dict[str, Any]) -> None:
    assert max(two_ranks.run(_gradients, **copy.deepcopy(options))) < 1e-9


class _OwnModel(nn.Module):
    """Not a transformers model; its attention would call ``ContextAttention`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])


def _own_model_on_cp() -> tuple[bool, set[tuple[str, ...]]]:
    mesh = MeshSpec(cp=2).build(device_type="cpu")
    model = parallelize(_OwnModel(), mesh, plan=None, context_parallel=ContextParallel(attention=False))
    return under_context_parallelism(model), set(describe_parallelism(model).sharded.values())


def test_a_model_of_ones_own_keeps_its_attention_and_is_sharded_over_cp(two_ranks: RankPool) -> None:
    attention_is_replaced, axes = two_ranks.run(_own_model_on_cp)[0]
    assert axes == {("dp_shard_cp",)}
    assert not attention_is_replaced


def _generated(architecture: str, axes: dict[str, int] | None, method: str) -> tuple[Any, ...]:
    """Greedy tokens of rows with padding on the left, their scores, and logits of a forward before and afterwards."""
    model: Any = tiny_model(architecture, dtype=torch.float32)
    tokens = torch.randint(4, 130, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    rows = {"input_ids": tokens, "attention_mask": mask}
    if axes is not None:
        mesh = MeshSpec(**axes).build(device_type="cpu")
        parallelize(model, mesh, context_parallel=method)
        rows = sequence_layout(mesh, 8).shard_batch(rows)
    own = {"do_sample": False, "max_new_tokens": 5, "output_scores": True, "return_dict_in_generate": True}
    before = model(**rows).logits.detach()
    with torch.no_grad(), unsharded(model), whole_rows(model):
        found = model.generate(tokens, attention_mask=mask, pad_token_id=0, **own)
    return found.sequences, torch.stack(found.scores), before, model(**rows).logits.detach()


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("Qwen3ForCausalLM", "ring"), ("GptOssForCausalLM", "allgather"), ("Qwen3_5ForCausalLM", "ulysses")],
)
def test_whole_rows_are_generated_with_a_cache_as_by_one_process(
    two_ranks: RankPool, architecture: str, method: str
) -> None:
    expected, scores, _, _ = _generated(architecture, None, method)
    for tokens, own, before, after in two_ranks.run(_generated, architecture, {"cp": 2}, method):
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(own, scores, rtol=1e-5, atol=1e-5)
        assert torch.equal(before, after)
