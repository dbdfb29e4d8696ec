"""Storage of checkpoint tensors in vLLM and SGLang: fused tensors and cuts.

Sources: vLLM 0.32 and 0.33, ``model_executor/layers/linear.py`` (``QKVParallelLinear``,
``MergedColumnParallelLinear``), ``vocab_parallel_embedding.py``, ``fused_moe/layer.py`` (``determine_expert_map``),
``fused_moe/routed_experts.py`` and ``models/deepseek_v2.py``; SGLang 0.5, the files of the same names under
``sglang/srt``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from tp_plans.errors import TransferError

#: How a tensor is cut over an engine's ``tp``: not at all; by output features (dim 0), in pairs, in heads; key/value
#: heads, copied where there are fewer than ranks; by input features (dim 1); by rows of the padded vocabulary; not at
#: all, and stored by the first rank only (the other ranks hold zeros).
EngineSplit = Literal["replicated", "rows", "row_pairs", "heads", "kv_heads", "columns", "vocabulary", "first_rank"]

#: Engines with built-in rules.
Engine = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRule:
    """An engine's storage of checkpoint tensors with names that match a pattern."""

    pattern: str  # a shell-style pattern for full names, as ``"*.self_attn.q_proj.weight"``
    split: EngineSplit  # how the tensor is cut over ``tp``
    # the module that takes the place of the tensor's own, where the engine fuses several; ``None`` where it keeps its
    # own
    fused_into: str | None = None
    position: int = 0  # the place among the fused matrices, from 0: they follow one another on dim 0
    # whether the name has the number of an expert, and the engine stacks the experts in one parameter
    expert: bool = False
    # whether the checkpoint stacks the experts: ``[experts, in, out]``, a bias ``[experts, out]``.  The engine keeps
    # ``[experts, out, in]``; rows are output features, columns are input features
    stacked: bool = False
    # how many matrices follow one another in the output features of a stacked tensor; each is cut for itself
    matrices: int = 1
    only_with: str | None = None  # the rule holds only where the tensor's module has a sibling of this name

    def __post_init__(self) -> None:
        if self.split not in get_args(EngineSplit):
            raise TransferError(f"split is {self.split!r}: write one of {', '.join(get_args(EngineSplit))}")
        if self.position < 0:
            raise TransferError(f"position is {self.position}: write 0 or more")
        if (self.expert or self.stacked) and not self.fused_into:
            raise TransferError("fused_into is missing: name the engine's parameter for the stacked experts")
        if self.expert and self.stacked:
            raise TransferError("expert and stacked are both set: experts are numbered in names, or stacked")
        if self.matrices < 1 or (self.matrices > 1 and not self.stacked):
            raise TransferError(f"matrices is {self.matrices}: write 1, or more for a stacked tensor")


def _experts(parent: str, stack: str, gate: str, up: str, down: str) -> list[EngineRule]:
    names: tuple[tuple[str, str, int, EngineSplit], ...] = (
        (gate, f"{stack}w13_weight", 0, "rows"),
        (up, f"{stack}w13_weight", 1, "rows"),
        (down, f"{stack}w2_weight", 0, "columns"),
    )
    pattern = f"*.{parent}.experts.*.{{}}.weight"
    return [
        EngineRule(pattern=pattern.format(name), split=split, fused_into=into, position=position, expert=True)
        for name, into, position, split in names
    ]


def _stacked(parent: str, stack: str, split: EngineSplit, matrices: int) -> list[EngineRule]:
    """Experts that the checkpoint stacks: gpt-oss alternates gate and up, Llama 4 has one after the other."""
    names: tuple[tuple[str, str, EngineSplit, int], ...] = (
        ("gate_up_proj", f"{stack}w13_weight", split, matrices),
        ("gate_up_proj_bias", f"{stack}w13_bias", split, matrices),
        ("down_proj", f"{stack}w2_weight", "columns", 1),
        ("down_proj_bias", f"{stack}w2_bias", "first_rank", 1),
    )
    return [
        EngineRule(pattern=f"*.{parent}.experts.{name}", split=cut, fused_into=into, stacked=True, matrices=count)
        for name, into, cut, count in names
    ]


def _linear(
    name: str, split: EngineSplit, into: str | None = None, position: int = 0, only_with: str | None = None
) -> list[EngineRule]:
    bias: EngineSplit = "replicated" if split == "columns" else split
    return [
        EngineRule(pattern=f"*.{name}.{kind}", split=cut, fused_into=into, position=position, only_with=only_with)
        for kind, cut in (("weight", split), ("bias", bias))
    ]


def _common(latent: str, stack: str) -> list[EngineRule]:
    return [
        *_experts("mlp", stack, "gate_proj", "up_proj", "down_proj"),
        *_experts("block_sparse_moe", stack, "w1", "w3", "w2"),
        *_stacked("mlp", stack, "row_pairs", 1),
        *_stacked("feed_forward", stack, "rows", 2),
        *_linear("self_attn.q_proj", "heads", "qkv_proj", 0, only_with="k_proj"),
        *_linear("self_attn.q_proj", "heads"),
        *_linear("self_attn.k_proj", "kv_heads", "qkv_proj", 1),
        *_linear("self_attn.v_proj", "kv_heads", "qkv_proj", 2),
        *_linear("self_attn.o_proj", "columns"),
        EngineRule(pattern="*.self_attn.sinks", split="heads"),
        *_linear("self_attn.q_a_proj", "replicated", latent, 0),
        *_linear("self_attn.kv_a_proj_with_mqa", "replicated", latent, 1, only_with="q_a_proj"),
        *_linear("self_attn.kv_a_proj_with_mqa", "replicated"),
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
        *_linear("router", "replicated"),
        EngineRule(pattern="*.shared_expert_gate.weight", split="replicated"),
    ]


_RULES: dict[str, list[EngineRule]] = {
    "vllm": _common("fused_qkv_a_proj", "routed_experts."),
    "sglang": _common("fused_qkv_a_proj_with_mqa", ""),
}


def engine_rules(engine: Engine) -> list[EngineRule]:
    """Return an engine's built-in rules.

    For Llama, Qwen 2 and 3, Gemma 3, Mixtral, Qwen 3 MoE, DeepSeek V2 and V3, gpt-oss in bfloat16 and Llama 4's text.

    Args:
        engine: ``"vllm"`` or ``"sglang"``.

    Returns:
        Rules in order of precedence.

    Raises:
        TransferError: the engine is none of these.

    Example:
        >>> import tp_plans
        >>> rules = tp_plans.transfer.engine_rules("vllm")
        >>> [rule.fused_into for rule in rules if rule.pattern == "*.self_attn.k_proj.weight"]
        ['qkv_proj']
    """
    if engine not in _RULES:
        raise TransferError(f"engine is {engine!r}: write one of {', '.join(_RULES)}")
    return list(_RULES[engine])


class RuleBook:
    """Rules in order of precedence, looked up by the name of a tensor; some need a sibling among all names."""

    def __init__(self, rules: Sequence[EngineRule], names: Iterable[str]) -> None:
        self._rules = rules
        self._modules = {name.rpartition(".")[0] for name in names}
        # Whether no rule tells one number in a path from another.
        self._are_alike = not any(re.search(r"(^|[.*])\d|[?\[]", rule.pattern) for rule in rules)
        self._matching: dict[str, list[EngineRule]] = {}

    def find(self, name: str) -> EngineRule:
        """Return the first rule that holds for a checkpoint name."""
        parent = name.rpartition(".")[0].rpartition(".")[0]
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "0", name) if self._are_alike else name
        if kind not in self._matching:
            self._matching[kind] = [rule for rule in self._rules if fnmatchcase(name, rule.pattern)]
        for rule in self._matching[kind]:
            if rule.only_with is None or f"{parent}.{rule.only_with}" in self._modules:
                return rule
        raise TransferError(
            f"no rule says how the engine stores {name}: add an EngineRule for it to rules=, before engine_rules(...)"
        )
