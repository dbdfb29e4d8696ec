"""Attention maps have all heads on every rank of ``tp``, with gradients, and are refused over ``cp``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from fsdp_runtime import LayoutError, MeshSpec, parallelize, sequence_layout
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from harness.models import jitter, tiny_model
from harness.parity import gradient_errors, mesh_for
from harness.ranks import RankPool

IDS = torch.randint(3, 130, (2, 8), generator=torch.Generator().manual_seed(1))
SEQUENCE_PARALLEL = {"sequence_parallel": True}


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=131, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    jitter(model)
    return model


#: The model, options of ``parallelize`` and inputs.  GPT-OSS computes all heads on every rank.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "decoder": (lambda: tiny_model("Qwen3ForCausalLM"), {}, {}),
    "recomputed": (
        lambda: tiny_model("LlamaForCausalLM"),
        {**SEQUENCE_PARALLEL, "activation_checkpointing": "block"},
        {},
    ),
    "tuples": (lambda: tiny_model("Qwen2ForCausalLM"), SEQUENCE_PARALLEL, {"return_dict": False}),
    "one key head": (lambda: tiny_model("Qwen3ForCausalLM", num_key_value_heads=1), SEQUENCE_PARALLEL, {}),
    "all heads on every rank": (lambda: tiny_model("GptOssForCausalLM"), SEQUENCE_PARALLEL, {}),
    "biases of scores": (_t5, SEQUENCE_PARALLEL, {"decoder_input_ids": IDS[:, :5]}),
}


def _maps(model: Any, inputs: dict[str, Any], ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    model(input_ids=ids, use_cache=False, **inputs)  # one that is not asked for maps
    found = model(input_ids=ids, use_cache=False, output_attentions=True, **inputs)
    groups = found if isinstance(found, tuple) else [found[name] for name in found if "attentions" in name]
    maps = [each for group in groups if isinstance(group, tuple) for each in group if each.ndim == 4]
    sum(((index + 1) * each.square().sum() for index, each in enumerate(maps)), torch.zeros(())).backward()
    return [each.detach() for each in maps]


def _errors(name: str) -> tuple[int, dict[str, float]]:
    build, options, inputs = CASES[name]
    reference = build()
    reference.set_attn_implementation("eager")
    model = parallelize(copy.deepcopy(reference), mesh_for({"tp": 2}), **options)
    wanted, found = _maps(reference, inputs), _maps(model, inputs)
    errors = gradient_errors({n: p.grad for n, p in reference.named_parameters()}, model, least_share=1e-3)
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        errors[f"map {index}"] = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")
    return len(found), {name: error for name, error in errors.items() if not error <= 1e-4}


def _all_errors() -> dict[str, tuple[int, dict[str, float]]]:
    return {name: _errors(name) for name in CASES}


def test_maps_have_all_heads_on_every_rank(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_all_errors):
        assert found == {name: (6 if name == "biases of scores" else 2, {}) for name in CASES}


def _packed_maps() -> list[float]:
    """How far the maps of a packed row are from those of its documents alone, and from zero between documents."""
    model = tiny_model("Qwen3ForCausalLM")
    model.set_attn_implementation("eager")  # type: ignore[operator]
    alone = [_maps(model, {}, part) for part in (IDS[:, :5], IDS[:, 5:])]
    model.zero_grad()
    packed = parallelize(model, mesh_for({"tp": 2}), packed_sequences=True, **SEQUENCE_PARALLEL)
    positions = torch.cat([torch.arange(5), torch.arange(3)]).expand(2, -1)
    errors = []
    for layer, found in enumerate(_maps(packed, {"position_ids": positions})):
        wanted = torch.zeros(2, 4, 8, 8, dtype=found.dtype)
        wanted[..., :5, :5], wanted[..., 5:, 5:] = alone[0][layer], alone[1][layer]
        errors.append((found - wanted).abs().max().item())
    return errors


def test_maps_of_packed_rows_are_those_of_the_documents(two_ranks: RankPool) -> None:
    for errors in two_ranks.run(_packed_maps):
        assert len(errors) == 2
        assert max(errors) < 1e-6


def _over_cp() -> str:
    mesh = mesh_for({"cp": 2})
    model: Any = tiny_model("Qwen3ForCausalLM")
    model.set_attn_implementation("eager")
    alone = model(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states
    parallelize(model, mesh)
    layout = sequence_layout(mesh, IDS.shape[1])
    batch = layout.shard_batch({"input_ids": IDS})
    found = model(**batch, use_cache=False, output_hidden_states=True).hidden_states
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, layout.shard(theirs), rtol=0, atol=1e-6)
    with pytest.raises(LayoutError) as error:
        model(**batch, use_cache=False, output_attentions=True)
    return str(error.value)


def test_over_cp_maps_are_refused_and_hidden_states_are_those_of_the_ranks_tokens(two_ranks: RankPool) -> None:
    for error in two_ranks.run(_over_cp):
        assert "under cp no rank computes the attention map of a full row" in error


def test_an_error_in_a_forward_that_is_asked_for_maps_arrives_as_it_is() -> None:
    with fake_world(MeshSpec(tp=2), rank=0) as mesh:
        model = parallelize(tiny_model("LlamaForCausalLM", num_hidden_layers=1), mesh)
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(input_ids=None, output_attentions=True)
