"""Every style word of transformers 4.57 to 5.24: for modules, for bare parameters of any ndim, idle, unknown."""

import pytest

from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    NoParallel,
    ParameterStyle,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
)
from tp_plans.errors import UnknownStyleError
from tp_plans.styles import AllReduceOutput, ColwiseEmbedding, MLAKVProjection, ParallelAttention, ScaleInput
from tp_plans.styles.words import IGNORED_STYLES, STYLE_BY_NAME, parameter_style_from_name, style_from_name

WORDS = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "local_colwise": ColwiseParallel(),
    "packed_colwise": ColwiseParallel(fused_sizes=(1, 1)),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "local_rowwise": RowwiseParallel(),
    "packed_rowwise": RowwiseParallel(fused_sizes=(1, 1)),
    "local_packed_rowwise": RowwiseParallel(fused_sizes=(1, 1)),
    "embedding_rowwise": VocabParallelEmbedding(),
    "embedding_colwise": ColwiseEmbedding(),
    "mla_kv_a_proj": MLAKVProjection(),
    "sequence_parallel": SequenceParallel(),
    "replicate": NoParallel(),
    "replicated_with_grad_allreduce": NoParallel(gradient="partial"),
    "ep_router": NoParallel(),
    "megamoe_router": NoParallel(),
    "moe_tp_experts": ExpertsParallel(),
    "ep_dispatch_experts": ExpertsParallel(),
    "megamoe_experts": ExpertsParallel(),
    "moe_identity_expert": ScaleInput(),
    "all_reduce": AllReduceOutput(),
    "local_params": ParallelAttention(layout=None),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_means_its_style_for_a_module(word):
    assert style_from_name(word) == WORDS[word]


def test_no_word_of_the_table_is_untested():
    assert WORDS.keys() == STYLE_BY_NAME.keys()


@pytest.mark.parametrize(
    ("word", "ndim", "layout"),
    [
        # [..., out, in]: columns are the outputs, rows the inputs
        ("colwise", 1, Shard(0)),
        ("colwise", 2, Shard(0)),
        ("colwise", 3, Shard(1)),
        ("local_colwise", 3, Shard(1)),
        ("colwise_rep", 2, Shard(0)),
        ("colwise_gather_output", 2, Shard(0)),
        ("rowwise", 2, Shard(1)),
        ("rowwise", 3, Shard(2)),
        ("rowwise", 1, Replicate()),  # a bias is added once, by whoever sums
        ("local_rowwise", 3, Shard(2)),
        ("rowwise_rep", 2, Shard(1)),
        ("rowwise_split_input", 2, Shard(1)),
        ("grouped_gemm", 3, Shard(0)),
        ("grouped_gemm", 2, Shard(0)),
        ("replicate", 1, Replicate()),
    ],
)
def test_a_word_cuts_a_bare_parameter_where_it_would_cut_a_weight(word, ndim, layout):
    assert parameter_style_from_name(word, ndim) == ParameterStyle(layout=layout)


@pytest.mark.parametrize(
    ("word", "ndim", "dim"),
    [
        ("packed_colwise", 1, 0),
        ("packed_colwise", 2, 0),
        ("packed_colwise", 3, 1),
        ("packed_rowwise", 2, 1),
        ("packed_rowwise", 3, 2),
        ("local_packed_rowwise", 3, 2),
    ],
)
def test_a_packed_bare_parameter_is_stored_split_and_used_whole(word, ndim, dim):
    assert parameter_style_from_name(word, ndim) == ParameterStyle(layout=Shard(dim), gathered=True)


def test_a_whole_bare_parameter_that_meets_own_heads_sums_its_gradient():
    style = parameter_style_from_name("replicated_with_grad_allreduce", 1)
    assert style == ParameterStyle(layout=Replicate(), gradient="partial")


@pytest.mark.parametrize("word", ["moe_tp_experts", "mla_kv_a_proj", "sequence_parallel", "all_reduce", "nothing"])
def test_a_word_that_means_nothing_for_a_parameter_is_refused_by_its_name(word):
    with pytest.raises(UnknownStyleError, match=f"unknown style word '{word}' for 'layers.0.sinks'"):
        parameter_style_from_name(word, 1, where="layers.0.sinks")


def test_a_word_asks_for_something_or_for_nothing_and_says_why():
    assert STYLE_BY_NAME.keys().isdisjoint(IGNORED_STYLES)
    assert all(reason for reason in IGNORED_STYLES.values())


@pytest.mark.parametrize("word", ["", "Colwise", None, 3, ["colwise"], *IGNORED_STYLES])
def test_style_from_name_refuses_unknown_words_with_the_known_ones(word):
    with pytest.raises(UnknownStyleError) as caught:
        style_from_name(word, where="a.b")
    assert f"unknown style word {word!r} for 'a.b'" in str(caught.value)
    assert all(known in str(caught.value) for known in {*STYLE_BY_NAME, *IGNORED_STYLES, "grouped_gemm"})
