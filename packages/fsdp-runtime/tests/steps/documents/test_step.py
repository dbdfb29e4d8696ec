"""Packing refuses what it cannot keep apart, and warns of rows that nobody keeps apart."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fsdp_runtime import LayoutError, MeshSpec, ModelError, OptionError, parallelize
from fsdp_runtime._transformers_compat.masks import chunks_count_the_row
from fsdp_runtime._transformers_compat.models import CACHES
from fsdp_runtime.model import inspect_model
from fsdp_runtime.model.token_mixers import token_mixers
from fsdp_runtime.steps import SharedPrefixes
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool

PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]])


def _jamba() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.JambaConfig(
        vocab_size=131,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    )
    return transformers.JambaForCausalLM(config).eval()


def _parallelized(model: nn.Module, **options: Any) -> nn.Module:
    return parallelize(model, MeshSpec().build(device_type="cpu"), **options)


def _run(model: nn.Module, **changes: Any) -> Any:
    return model(input_ids=torch.arange(3, 9)[None], **{"position_ids": PACKED, "use_cache": False, **changes})


def test_mixers_are_found_by_what_they_take() -> None:
    found = token_mixers(inspect_model(_jamba()))
    assert [(mixer.path, mixer.isolation) for mixer in found] == [
        ("model.layers.0.mamba", "documents"),
        ("model.layers.1.self_attn", "mask"),
    ]


def test_a_model_of_ones_own_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
    with pytest.raises(ModelError, match=r"not a transformers model, .*leave packed_sequences out"):
        _parallelized(model, packed_sequences=True)


def test_masks_that_a_model_makes_from_the_rows_length_are_refused() -> None:
    config = transformers.CpmAntConfig(hidden_size=8, num_attention_heads=2, dim_head=4, dim_ff=8, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"self_attention of CpmAntForCausalLM computes its mask and positions"):
        _parallelized(transformers.CpmAntForCausalLM(config), packed_sequences=True)


def test_a_cache_is_refused_and_the_default_one_left_out() -> None:
    model = _parallelized(_jamba(), packed_sequences=True)
    for given in ({"use_cache": True}, *({name: transformers.DynamicCache()} for name in CACHES)):
        with pytest.raises(LayoutError, match="a key/value cache has no boundaries of documents: pass use_cache=False"):
            _run(model, **given)
    assert _run(model, use_cache=None).past_key_values is None


def test_rows_of_documents_and_rows_of_trees_are_not_taken_by_one_model() -> None:
    model = tiny_model("LlamaForCausalLM")
    with pytest.raises(OptionError, match="leave packed_sequences out, and pack single samples with pack_tree"):
        _parallelized(model, packed_sequences=True, steps=(SharedPrefixes(),))


def test_a_copied_model_keeps_documents_apart() -> None:
    model = copy.deepcopy(_parallelized(_jamba(), packed_sequences=True))
    with torch.no_grad():
        together = _run(model).logits
        alone = model(input_ids=torch.arange(6, 9)[None], position_ids=PACKED[:, :3], use_cache=False).logits
    torch.testing.assert_close(together[:, 3:], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("counts_the_row", [False, True])
def test_chunks_of_attention_begin_at_documents_under_a_mask_of_ones(
    monkeypatch: pytest.MonkeyPatch, counts_the_row: bool
) -> None:
    if counts_the_row:  # as in transformers 5.10
        monkeypatch.setattr("fsdp_runtime.steps.attention.rows.chunks_count_the_row", lambda config: True)
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=131, hidden_size=16, intermediate_size=16, intermediate_size_mlp=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=4,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config).double().eval()
    documents = torch.arange(3, 19)[None].split([5, 7, 4], dim=1)
    alone = torch.cat([model(document, use_cache=False).logits for document in documents], dim=1)
    _parallelized(model, packed_sequences=True)
    tokens, ones = torch.cat(documents, dim=1), torch.ones(1, 16, dtype=torch.int64)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    for mask in (None, ones):
        torch.testing.assert_close(
            model(tokens, position_ids=positions, attention_mask=mask).logits, alone, atol=1e-6, rtol=0
        )  # the router computes in float32
    padded = {"position_ids": positions, "attention_mask": ones.index_fill(1, torch.tensor(15), 0)}
    if counts_the_row or chunks_count_the_row(config):
        torch.testing.assert_close(model(tokens, **padded).logits[:, :15], alone[:, :15], atol=1e-6, rtol=0)
        return
    with pytest.raises(LayoutError, match=r"padding in packed rows of Llama4ForCausalLM, .* give the padding its own"):
        model(tokens, **padded)


def test_packed_rows_without_the_option_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _parallelized(_jamba())
    for _ in range(2):
        _run(model)
    (record,) = [each for each in caplog.records if "position_ids" in each.getMessage()]
    message = "1 layers of JambaForCausalLM let documents read one another: JambaMambaMixer (model.layers.0.mamba)"
    assert message in record.getMessage()
    assert "pass packed_sequences=True to parallelize" in record.getMessage()


@pytest.mark.parametrize("positions", [PACKED, torch.arange(6)[None], None], ids=["packed", "one document", "none"])
def test_a_model_that_keeps_documents_apart_is_not_warned_of(
    caplog: pytest.LogCaptureFixture, positions: torch.Tensor | None
) -> None:
    model = _parallelized(tiny_model("LlamaForCausalLM"))
    model(**tiny_inputs(model, batch=1, length=6), position_ids=positions, use_cache=False)
    assert "let documents read" not in caplog.text


def test_masks_that_ignore_positions_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = _parallelized(tiny_model("LlamaForCausalLM"))
    inputs = tiny_inputs(model, batch=1, length=6)
    model(**inputs, position_ids=PACKED, attention_mask=torch.ones(1, 6), use_cache=False)
    assert "2 layers of LlamaForCausalLM let documents read one another: LlamaAttention" in caplog.text


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_whose_positions_restart_is_not_warned_of(caplog: pytest.LogCaptureFixture, side: str) -> None:
    model = _parallelized(tiny_model("LlamaForCausalLM"))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    mask = mask.flip(-1) if side == "left" else mask
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    model(**tiny_inputs(model, batch=2, length=6), position_ids=positions, attention_mask=mask, use_cache=False)
    assert "let documents read" not in caplog.text


def _warned_under_tensor_parallelism() -> list[str]:
    """Messages of a rank, whose modules' classes are not their own."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_runtime.steps.documents.step")
    logger.addHandler(handler)
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(tp=2).build(device_type="cpu"))
    inputs = tiny_inputs(model, batch=1, length=6)
    model(**inputs, position_ids=PACKED, attention_mask=torch.ones(1, 6), use_cache=False)
    logger.removeHandler(handler)
    return messages


def test_layers_under_tensor_parallelism_are_examined_too(two_ranks: RankPool) -> None:
    for (message,) in two_ranks.run(_warned_under_tensor_parallelism):
        assert "2 layers of LlamaForCausalLM let documents read one another" in message


@pytest.mark.parametrize("padding", [0, 2])
def test_a_model_of_packed_rows_generates_from_prompts(padding: int) -> None:
    plain = tiny_model("Qwen3ForCausalLM")
    packed = _parallelized(copy.deepcopy(plain), plan=None, packed_sequences=True)
    mask = (torch.arange(6).expand(2, -1) >= torch.tensor([[padding], [0]])).long()
    tokens = torch.arange(3, 15).view(2, 6) * mask
    wanted, found = (
        model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
        for model in (plain, packed)
    )
    assert torch.equal(found, wanted)
    with pytest.raises(LayoutError, match="a key/value cache has no boundaries of documents"):
        _run(packed, use_cache=True)
