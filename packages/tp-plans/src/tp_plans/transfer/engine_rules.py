"""How vLLM and SGLang store the tensors of a checkpoint: fused with which, and cut how.

Sources: vLLM 0.32 and 0.33, ``model_executor/layers/linear.py`` (``QKVParallelLinear``,
``MergedColumnParallelLinear``), ``vocab_parallel_embedding.py``, ``fused_moe/layer.py`` (``determine_expert_map``),
``fused_moe/routed_experts.py`` and ``models/deepseek_v2.py``; SGLang 0.5, the files of the same names under
``sglang/srt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from tp_plans._validate import transfer_checked
from tp_plans.errors import TransferError

#: How a tensor is cut over an engine's ``tp``: not at all; by output features (dim 0), in whole heads; key/value heads,
#: copied where there are fewer than ranks; by input features (dim 1); by rows of the padded vocabulary.
EngineSplit = Literal["replicated", "rows", "heads", "kv_heads", "columns", "vocabulary"]

#: Engines with built-in rules.
Engine = Literal["vllm", "sglang"]


@transfer_checked
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRule:
    """How an engine stores the checkpoint tensors whose names match a pattern.

    Args:
        pattern: a shell-style pattern for full names, as ``"*.self_attn.q_proj.weight"``.
        split: how the tensor is cut over ``tp``.
        fused_into: the module that takes the place of the tensor's own, where the engine fuses several; ``None``
            where it keeps its own.
        position: the place among the fused matrices, from 0: they follow one another on dim 0.
        expert: whether the name has the number of an expert, and the engine stacks the experts in one parameter.
    """

    pattern: str
    split: EngineSplit
    fused_into: str | None = None
    position: int = 0
    expert: bool = False

    def __post_init__(self) -> None:
        if self.split not in get_args(EngineSplit):
            raise TransferError(f"split is {self.split!r}: write one of {', '.join(get_args(EngineSplit))}")
        if self.position < 0:
            raise TransferError(f"position is {self.position}: write 0 or more")
        if self.expert and not self.fused_into:
            raise TransferError("fused_into is missing: name the parameter in which the engine stacks the experts")


def _experts(parent: str, stack: str, gate: str, up: str, down: str) -> list[EngineRule]:
    names = (
        (gate, f"{stack}w13_weight", 0, "rows"),
        (up, f"{stack}w13_weight", 1, "rows"),
        (down, f"{stack}w2_weight", 0, "columns"),
    )
    return [
        EngineRule(
            pattern=f"*.{parent}.experts.*.{name}.weight",
            split="rows" if split == "rows" else "columns",
            fused_into=into,
            position=position,
            expert=True,
        )
        for name, into, position, split in names
    ]


def _linear(name: str, split: EngineSplit, into: str | None = None, position: int = 0) -> list[EngineRule]:
    bias: EngineSplit = "replicated" if split == "columns" else split
    return [
        EngineRule(pattern=f"*.{name}.weight", split=split, fused_into=into, position=position),
        EngineRule(pattern=f"*.{name}.bias", split=bias, fused_into=into, position=position),
    ]


def _common(latent: str, stack: str) -> list[EngineRule]:
    return [
        *_experts("mlp", stack, "gate_proj", "up_proj", "down_proj"),
        *_experts("block_sparse_moe", stack, "w1", "w3", "w2"),
        *_linear("self_attn.q_proj", "heads", "qkv_proj", 0),
        *_linear("self_attn.k_proj", "kv_heads", "qkv_proj", 1),
        *_linear("self_attn.v_proj", "kv_heads", "qkv_proj", 2),
        *_linear("self_attn.o_proj", "columns"),
        *_linear("self_attn.q_a_proj", "replicated", latent, 0),
        *_linear("self_attn.kv_a_proj_with_mqa", "replicated", latent, 1),
        *_linear("self_attn.q_b_proj", "heads"),
        *_linear("self_attn.kv_b_proj", "heads"),
        *_linear("gate_proj", "rows", "gate_up_proj", 0),
        *_linear("up_proj", "rows", "gate_up_proj", 1),
        *_linear("down_proj", "columns"),
        EngineRule(pattern="*embed_tokens.weight", split="vocabulary"),
        EngineRule(pattern="*lm_head.weight", split="vocabulary"),
        EngineRule(pattern="*norm.weight", split="replicated"),
        EngineRule(pattern="*layernorm.weight", split="replicated"),
        EngineRule(pattern="*.gate.weight", split="replicated"),
        EngineRule(pattern="*.gate.e_score_correction_bias", split="replicated"),
        EngineRule(pattern="*.shared_expert_gate.weight", split="replicated"),
    ]


_RULES: dict[str, list[EngineRule]] = {
    "vllm": _common("fused_qkv_a_proj", "routed_experts."),
    "sglang": _common("fused_qkv_a_proj_with_mqa", ""),
}


@transfer_checked
def engine_rules(engine: Engine) -> list[EngineRule]:
    """Return an engine's built-in rules, for Llama, Qwen 2 and 3, Gemma 3, Mixtral, Qwen 3 MoE and DeepSeek V2 and V3.

    Args:
        engine: ``"vllm"`` or ``"sglang"``.

    Returns:
        Rules in order of precedence.

    Raises:
        TransferError: the engine is none of these.

    Example:
        >>> import tp_plans
        >>> rules = tp_plans.engine_rules("vllm")
        >>> [rule.fused_into for rule in rules if rule.pattern == "*.self_attn.k_proj.weight"]
        ['qkv_proj']
    """
    if engine not in _RULES:
        raise TransferError(f"engine is {engine!r}: write one of {', '.join(_RULES)}")
    return list(_RULES[engine])


def rule_for(name: str, rules: Sequence[EngineRule]) -> EngineRule:
    """Return the first rule whose pattern matches a checkpoint name.

    Raises:
        TransferError: no pattern does.
    """
    for rule in rules:
        if fnmatchcase(name, rule.pattern):
            return rule
    raise TransferError(
        f"no rule says how the engine stores {name}: add an EngineRule for it to rules=, before engine_rules(...)"
    )
