"""The report says what a model really is, whoever made it so."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import fully_shard

from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
from harness.models import tiny_model
from harness.ranks import RankPool


def test_a_plain_model_is_whole() -> None:
    model = tiny_model("LlamaForCausalLM", tied=True)
    report = describe_parallelism(model)
    assert (report.fsdp_modules, report.recomputing, report.compiled, dict(report.sharded)) == ((), (), (), {})
    assert {"model.embed_tokens.weight", "lm_head.weight"} < set(report.replicated)
    assert report.local_bytes == report.full_bytes == sum(p.nbytes for p in model.parameters())
    assert "replicated on every rank (all axes): 35 (model.embed_tokens.weight, " in str(report)


def _report_of_a_parallel_model() -> tuple[object, ...]:
    mesh = MeshSpec(dp_shard=2, tp=2).build(device_type="cpu")
    model = parallelize(tiny_model("Qwen3ForCausalLM"), mesh, activation_checkpointing="mlp")
    report = describe_parallelism(model)
    shown = [report.sharded[name] for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")]
    return (
        report.fsdp_modules,
        report.recomputing,
        shown,
        report.replicated,
        report.local_bytes / report.full_bytes,
        str(report),
    )


def test_what_was_wrapped_recomputes_and_is_cut_over_which_axes(four_ranks: RankPool) -> None:
    units, recomputing, shown, replicated, share, text = four_ranks.run(_report_of_a_parallel_model)[0]
    assert units == ("", "model.layers.0", "model.layers.1")
    assert recomputing == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert shown == [("dp_shard",), ("dp_shard", "tp")]
    assert replicated == ()
    assert share == pytest.approx(0.25, rel=0.05)
    assert "FSDP modules: 3 ((root), model.layers.0, model.layers.1)" in text
    assert "sharded over dp_shard and tp: " in text


def _report_of_a_hand_wrapped_model() -> tuple[str, ...]:
    model = tiny_model("LlamaForCausalLM")
    fully_shard(model.model, mesh=MeshSpec(dp_shard=2).build(device_type="cpu")["dp_shard"])
    return describe_parallelism(model).fsdp_modules


def test_a_model_wrapped_elsewhere_is_read_too(two_ranks: RankPool) -> None:
    assert two_ranks.run(_report_of_a_hand_wrapped_model)[0] == ("model",)
