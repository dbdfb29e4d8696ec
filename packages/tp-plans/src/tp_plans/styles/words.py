"""transformers' style words, 4.57 to 5.24, as data.

A word says how a module computes.  Releases differ in the use of local tensors or DTensors, and in the module that sums
(``local_rowwise`` under ``gather``).  Each style here is right alone, so words that only divide such work need no
rule.
"""

from __future__ import annotations

from tp_plans import styles
from tp_plans.errors import UnknownStyleError
from tp_plans.layouts import Replicate, Shard

#: Words of module rules, with the releases that have them in their registry.
STYLE_BY_NAME: dict[str, styles.Style] = {
    "colwise": styles.ColwiseParallel(),  # 4.57 on
    "colwise_rep": styles.ColwiseParallel(output_layouts=Replicate()),  # 4.57 to 5.0, and 5.20 on
    "colwise_gather_output": styles.ColwiseParallel(output_layouts=Replicate()),  # 5.5 on
    "local_colwise": styles.ColwiseParallel(),  # 4.57 to 5.0
    "packed_colwise": styles.ColwiseParallel(fused_sizes=(1, 1)),  # 5.5 on: gate and up, one after the other
    "rowwise": styles.RowwiseParallel(),  # 4.57 on
    "rowwise_rep": styles.RowwiseParallel(input_layouts=Replicate()),  # 4.57 to 5.0, and 5.20 on
    "rowwise_split_input": styles.RowwiseParallel(input_layouts=Replicate()),  # 5.5 on
    "local_rowwise": styles.RowwiseParallel(),  # 4.57 to 5.0
    "packed_rowwise": styles.RowwiseParallel(fused_sizes=(1, 1)),  # 5.5 on
    "local_packed_rowwise": styles.RowwiseParallel(fused_sizes=(1, 1)),  # 4.57 to 5.0
    "embedding_rowwise": styles.VocabParallelEmbedding(),  # 5.5 on
    "embedding_colwise": styles.ColwiseEmbedding(),  # 5.5 on
    "mla_kv_a_proj": styles.MLAKVProjection(),  # 5.5 on
    "sequence_parallel": styles.SequenceParallel(),  # 4.57 on
    "replicate": styles.NoParallel(),  # 4.57 to 5.0, and since 5.23
    "replicated_with_grad_allreduce": styles.NoParallel(gradient="partial"),  # 5.5 on
    "ep_router": styles.NoParallel(),  # 4.57 to 5.20: routes of other ranks are masked where the experts run
    "megamoe_router": styles.NoParallel(),  # 5.12 to 5.20
    "moe_tp_experts": styles.ExpertsParallel(),  # 5.5 on
    "ep_dispatch_experts": styles.ExpertsParallel(),  # 5.20 on
    "megamoe_experts": styles.ExpertsParallel(),  # 5.12 to 5.20
    "moe_identity_expert": styles.ScaleInput(),  # 5.5 on
    "all_reduce": styles.AllReduceOutput(),  # 5.12 on
    "local_params": styles.ParallelAttention(layout=None),  # since 5.23: attention that has a split parameter itself
}

#: Words that ask for nothing where every style is right alone, with the reason.
IGNORED_STYLES: dict[str, str] = {
    "gather": "sums partial sums of local_rowwise layers inside; our row-wise layers sum them",  # to 5.0
    "local": "keeps a module's tensors plain; ours are plain during every forward",  # 4.57 to 5.0
}

_COLUMN_WORDS = {"colwise", "local_colwise", "colwise_rep", "colwise_gather_output"}
_ROW_WORDS = {"rowwise", "local_rowwise", "rowwise_rep", "rowwise_split_input"}
_PACKED_WORDS = {"packed_colwise": -2, "packed_rowwise": -1, "local_packed_rowwise": -1}
_EXPERT_WORD = "grouped_gemm"  # 5.0 on: stacked experts, in the plans for expert parallelism


def style_from_name(word: str, *, where: str = "") -> styles.Style:
    """The style that a word of transformers' plans means for a module."""
    try:
        return STYLE_BY_NAME[word]
    except (KeyError, TypeError):
        raise _unknown(word, where) from None


def parameter_style_from_name(word: str, ndim: int, *, where: str = "") -> styles.ParameterStyle:
    """The rule that a word means for a bare parameter of ``ndim`` dims, ``[..., out, in]``."""
    if word in _COLUMN_WORDS:
        return styles.ParameterStyle(layout=Shard(max(0, ndim - 2)))
    if word in _ROW_WORDS:
        return styles.ParameterStyle(layout=Shard(ndim - 1) if ndim > 1 else Replicate())
    if word in _PACKED_WORDS:  # no layout of torch describes its parts: it is stored sharded and gathered for use
        return styles.ParameterStyle(layout=Shard(max(0, ndim + _PACKED_WORDS[word])), gathered=True)
    if word == _EXPERT_WORD:
        return styles.ParameterStyle(layout=Shard(0))
    if word in ("replicate", "replicated_with_grad_allreduce"):
        return styles.ParameterStyle(layout=Replicate(), gradient="full" if word == "replicate" else "partial")
    raise _unknown(word, where)


def _unknown(word: object, where: str) -> UnknownStyleError:
    place = f" for {where!r}" if where else ""
    return UnknownStyleError(
        f"unknown style word {word!r}{place}: known are {', '.join(sorted(STYLE_BY_NAME))}, and {_EXPERT_WORD} for "
        f"parameters; leave {' and '.join(sorted(IGNORED_STYLES))} out, which ask for nothing here. "
        "Or give a plan with a style of tp_plans for this rule, as ColwiseParallel()."
    )
