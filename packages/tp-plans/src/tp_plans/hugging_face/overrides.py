"""Corrections of plans that transformers ships, by the class of the module, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import lcm
from typing import Any

from tp_plans import styles
from tp_plans.layouts import Replicate, Shard
from tp_plans.model_tree import ModelTree, join
from tp_plans.patterns import wildcard
from tp_plans.plan import Plan
from tp_plans.planned_tree import merge_per_block

_WHOLE_COLUMN = styles.ColwiseParallel(output_layouts=Replicate())
_WHOLE_ROW = styles.RowwiseParallel(input_layouts=Replicate())
_STORED = styles.ParameterStyle(gathered=True)
#: Attention that computes all heads on every rank; its weights are stored sharded.
_ALL_HEADS: dict[str, styles.Style | None] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _WHOLE_COLUMN),
    "o_proj": _WHOLE_ROW,
}

_OWN_HEADS_PART = styles.ParameterStyle(layout=Replicate(), gradient="partial")


def _whole_heads_of_quarters(attention: Any) -> int:
    return lcm(int(attention.embed_dim) // int(attention.mp_num), int(attention.head_dim))


#: Rules below a module of a class, ``""`` for itself, or functions of the module; ``None`` takes a rule away.
OVERRIDES: dict[str, Mapping[str, styles.Style | Callable[[Any], styles.Style] | None]] = {
    # The sparsity threshold is a mean and deviation over all columns.
    "Gemma3nTextMLP": {"gate_proj": _WHOLE_COLUMN, "up_proj": _WHOLE_COLUMN, "down_proj": _WHOLE_ROW},
    # Queries, values and keys alternate, a quarter of the features of each; a head may be larger than a quarter.
    "CodeGenAttention": {
        "qkv_proj": lambda attention: styles.ColwiseParallel(multiple_of=3 * _whole_heads_of_quarters(attention)),
        "out_proj": lambda attention: styles.RowwiseParallel(multiple_of=_whole_heads_of_quarters(attention)),
    },
    # The norms of queries and keys are over the features of all heads.
    "EsmcAttention": _ALL_HEADS,
    # A table outside of the layer is added to the values of all heads.
    "NeoMMEAttention": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "output_projection.gate_proj"), _WHOLE_COLUMN),
        "output_projection.o_proj": _WHOLE_ROW,
    },
    # The mask is one of every key/value head, computed from the values of all of them; ranks cannot share some of them.
    "DogeAttention": {
        "A": lambda attention: _OWN_HEADS_PART if attention.A.shape[0] == 1 else styles.ParameterStyle(),
        "dt_proj": lambda attention: (
            styles.NoParallel(gradient="partial")
            if attention.A.shape[0] == 1
            else styles.RowwiseParallel(output_layouts=Shard(-1))
        ),
        "q_norm": styles.NoParallel(gradient="partial"),
        "k_norm": styles.NoParallel(gradient="partial"),
    },
    # The shipped plan has a rule for the output projection only, which full attention has under the same name.
    "Glm5NextTextLinearAttention": {**_ALL_HEADS, "g_a_proj": _WHOLE_COLUMN, "g_b_proj": _WHOLE_COLUMN},
    # Its mask holds a bias for every head, which the encoder adds.
    "Phi4MultimodalAudioAttention": _ALL_HEADS,
    # Indices beyond the routed experts stand for identities, so none is left to stand for another rank's expert.
    "LongcatFlashExperts": {"": None, "identity_expert": None, "gate_up_proj": _STORED, "down_proj": _STORED},
    # Until 5.16 the plan shards the features inside of experts, for code that works on DTensors.
    "Llama4TextExperts": {"": styles.ExpertsParallel(), "gate_up_proj": None, "down_proj": None},
    # Replicated for the norm inside it, but the norm's gradient can be summed instead.
    "Inkling2TextModel": {"embed_tokens": styles.VocabParallelEmbedding()},
    # Its eager forward runs every index that a token has.
    "NemotronHExperts": {"": styles.ExpertsParallel(skips_sentinel_index=False)},
    # It compares the token ids with the id of a separately embedded token.
    "T5Gemma2TextScaledWordEmbedding": {"": None, "weight": _STORED},
    # The table is indexed for the padding token outside its own forward.
    "Gemma4Model": {
        "": styles.GatheredParameters(names=("language_model.embed_tokens.weight",)),
        "language_model.embed_tokens": None,
    },
}


def with_overrides(plan: Plan, tree: ModelTree) -> Plan:
    """The plan with the corrections for the classes that the model has."""
    changes = dict(_changes(tree))
    rules: dict[str, styles.Style | None] = {
        pattern: None for path, style in changes.items() if style is None and (pattern := wildcard(path)) in plan
    }
    corrected = merge_per_block(((path, style) for path, style in changes.items() if style is not None), tree)
    for pattern in dict.fromkeys(map(wildcard, corrected)):
        if pattern in plan and pattern not in corrected:  # the pattern also matches layers that are not corrected
            rules |= {pattern: None, **dict.fromkeys(tree.by_wildcard[pattern], plan[pattern])}
    return plan.override({**rules, **corrected})


def _changes(tree: ModelTree) -> Iterator[tuple[str, styles.Style | None]]:
    for path, module in tree.modules.items():
        for name, style in OVERRIDES.get(type(module).__name__, {}).items():
            where = join(path, name) if name else path
            yield where, style(module) if callable(style) else style
