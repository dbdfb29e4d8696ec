"""Pipeline stages with four stages, every schedule and every other axis: logits, losses, norms and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from coverage.pipeline import PIPELINE_BOUND, measure_pipeline
from fsdp_runtime.steps import Pipeline
from harness.ranks import RankPool

PACKED = {"packed": True, "packed_sequences": True}
INTERLEAVED, ZERO_BUBBLE = Pipeline("Interleaved1F1B"), Pipeline("InterleavedZeroBubble")
ZBV, DUAL = Pipeline("ZBVZeroBubble"), Pipeline("DualPipeV", microbatches=8)
PP4, TP, EP = {"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 2, "ep": 2}
FSDP, CP = {"pp": 2, "dp_shard": 2}, {"pp": 2, "cp": 2}

#: Row of the coverage table, mesh of four ranks, schedule, and options of ``measure_pipeline``.
MATRIX: dict[str, tuple[str, Mapping[str, int], Pipeline, dict[str, Any]]] = {
    # four stages and more
    "dense, GPipe": ("llama", PP4, Pipeline("GPipe"), {"layers": 4}),
    "tied positions and head, DualPipeV": ("gpt2", PP4, DUAL, {"layers": 8}),
    "tied, sliding window, interleaved": ("gemma2", PP4, INTERLEAVED, {"layers": 8}),
    "MLA and mixture": ("deepseek_v3", PP4, Pipeline(), {"layers": 4}),
    "mixture, zero bubble": ("qwen3_moe", PP4, ZERO_BUBBLE, {"layers": 8}),
    "sinks and mixture, interleaved": ("gpt_oss", PP4, INTERLEAVED, {"layers": 8}),
    "hybrid of attention, Mamba and mixture": ("jamba", PP4, Pipeline(), {}),
    "hybrid of attention and linear attention, packed": ("qwen3_next", PP4, Pipeline(), {"layers": 4, **PACKED}),
    "state space alone, zero bubble": ("mamba2", PP4, ZERO_BUBBLE, {"layers": 8}),
    "attention and Mamba in a block, ZBV": ("falcon_h1", PP4, ZBV, {"layers": 8}),
    "AltUp, per-layer embeddings": ("gemma3n_text", PP4, Pipeline(), {}),
    "chunked attention of a vision model": ("llama4", PP4, Pipeline("GPipe"), {}),
    "two kinds of blocks of a vision model, interleaved": ("gemma3", PP4, INTERLEAVED, {"layers": 8}),
    "sliding window, packed": ("gemma3_text", PP4, Pipeline(), {"layers": 4, **PACKED}),
    # tensor, sequence and expert parallelism
    "SP, interleaved": ("llama", TP, INTERLEAVED, {"layers": 4, "sequence_parallel": True}),
    "tied, TP, ZBV": ("gemma2", TP, ZBV, {"layers": 4}),
    "shared keys, per-layer embeddings, TP, ZBV": ("gemma4_text", TP, ZBV, {}),
    "MLA, TP, DualPipeV": ("deepseek_v2", TP, DUAL, {"layers": 4}),
    "hybrid of a vision model, TP": ("qwen3_5, vision", TP, Pipeline(), {}),
    "vision and audio, shared keys, TP": ("gemma4", TP, INTERLEAVED, {}),
    "audio of another kind, TP": ("phi4_multimodal", TP, Pipeline(), {}),
    "mixture, EP, interleaved": ("qwen3_moe", EP, INTERLEAVED, {"layers": 4}),
    "mixture, EP, ZBV": ("mixtral", EP, ZBV, {"layers": 4}),
    # FSDP2
    "tied, FSDP2, interleaved": ("gemma2", FSDP, INTERLEAVED, {"layers": 4}),
    "shared keys, FSDP2": ("gemma4_text", FSDP, Pipeline(), {"activation_checkpointing": "block"}),
    "MLA and mixture, FSDP2, EP": ("deepseek_v3", {**FSDP, "ep": 2}, Pipeline(), {}),
    "hybrid mixture of a vision model, FSDP2": ("qwen3_5_moe, vision", FSDP, Pipeline("GPipe"), {}),
    "vision model, replicas": ("mistral3", {"pp": 2, "dp_replicate": 2}, Pipeline(), {}),
    # context parallelism
    "dense, ring": ("llama", CP, Pipeline(), {"context_parallel": "ring"}),
    "mixture, Ulysses, interleaved": ("qwen3_moe", CP, INTERLEAVED, {"layers": 4, "context_parallel": "ulysses"}),
    "sliding window, CP, packed": ("gemma3_text", CP, Pipeline(), PACKED),
    "hybrid, CP": ("qwen3_next", CP, Pipeline(), {}),
    # adapters
    "adapters of a mixture, interleaved": ("qwen3_moe", PP4, INTERLEAVED, {"layers": 8, "adapted": "all-linear"}),
    "adapters of MLA, TP": ("deepseek_v2", TP, Pipeline(), {"adapted": "all-linear"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX)
def test_stages_on_four_ranks_are_right_in_every_combination(case: str, four_ranks: RankPool) -> None:
    name, axes, step, options = MATRIX[case]
    reports = four_ranks.run(measure_pipeline, name, axes, step, timeout=120, **options)
    errors = [{path: error for path, error in report.items() if not error <= PIPELINE_BOUND} for report in reports]
    assert not any(errors), errors
    assert sum("logits" in report for report in reports) == 4 // axes["pp"]
