"""A dry run calls no recurrence in torch, whose loops over tokens would take minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import transformers

from fsdp_runtime.dry_run import Estimate, estimate

COMMON = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
#: Models of a delta rule and of both kinds of Mamba: their family, the function that loops, and their sizes.
LOOPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3_5TextConfig": (
        "qwen3_5",
        "torch_chunk_gated_delta_rule",
        {
            **COMMON,
            "vocab_size": 256,
            "intermediate_size": 128,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        }
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    "JambaConfig": (
        "jamba",
        "mamba_selective_scan",
        {**COMMON, "vocab_size": 256, "intermediate_size": 128, "num_experts": 2},
    ),
    "Mamba2Config": (
        "mamba2",
        "mamba2_chunk_scan",
        {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "vocab_size": 256, "num_hidden_layers": 2},
    ),
}


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"{function.__name__} was traced")

    return call


def run(name: str, tokens: int = 64, axis: str = "dp_shard") -> Estimate:
    config = getattr(transformers, name)(**LOOPS[name][2])
    return estimate(config, {axis: 2}, seq_len=tokens, activation_checkpointing="none", clip=False, plan=None)


@pytest.mark.parametrize("name", LOOPS)
def test_kernels_stand_for_loops_and_what_they_keep_grows_with_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, function, _ = LOOPS[name]
    path = f"transformers.models.{family}.modeling_{family}"
    __import__(path)
    original = getattr(sys.modules[path], function)
    monkeypatch.setattr(sys.modules[path], function, stub := refusing(original))
    short, long = (run(name, tokens) for tokens in (256, 2048))
    assert any(function in each.assumption for each in short.assumptions)
    assert getattr(sys.modules[path], function) is stub
    assert all(each.counted for each in short.assumptions)
    assert long.memory.after_forward.activations > 4 * short.memory.after_forward.activations


def test_mixers_are_counted_over_cp() -> None:
    found = run("Qwen3_5TextConfig", axis="cp")
    assert not [assumption for assumption in found.assumptions if "linear_attn" in assumption.module]
    assert found.flops > 0.4 * run("Qwen3_5TextConfig").flops
