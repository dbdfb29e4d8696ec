"""The vocabulary-parallel embedding; the vocabulary divides by nothing."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.compiler import forget_compiled, graphs_compiled
from harness.layers import mismatches, parallelized
from harness.ranks import RanksFailed
from tp_plans import Replicate, Shard, VocabParallelEmbedding
from tp_plans.styles import ColwiseEmbedding

VOCAB, WIDTH = 131, 6
FIRST_OF_RANK_1 = 66
DEFAULT, FEATURES = VocabParallelEmbedding(), ColwiseEmbedding()


def ids_of(kind, shape=(3, 5)):
    low, high = {"all": (0, VOCAB), "rank 0": (0, FIRST_OF_RANK_1), "rank 1": (FIRST_OF_RANK_1, VOCAB)}[kind]
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(3))


def embedding_faults(*, kind="all", shape=(3, 5), padding_idx=None, style=DEFAULT, **how):
    ids = ids_of(kind, shape)
    if padding_idx is not None:
        ids.view(-1)[0] = padding_idx % VOCAB
    return mismatches(
        lambda: nn.Embedding(VOCAB, WIDTH, padding_idx=padding_idx),
        {"": style},
        ids,
        leaves=style.output_layouts,
        leaves_plain=style.use_local_output,
        **how,
    )


@pytest.mark.parametrize("kind", ["all", "rank 0", "rank 1"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (3, 5), (2, 3, 5)])
def test_ids_of_any_rank_and_shape_are_looked_up(two_ranks, kind, shape):
    assert two_ranks.run(embedding_faults, kind=kind, shape=shape) == [[], []]


@pytest.mark.parametrize("use_local_output", [True, False])
@pytest.mark.parametrize("output", [Replicate(), Shard(1), Shard(-1)])
@pytest.mark.parametrize("length", [1, 5])
def test_output_has_the_layout_of_the_rule(two_ranks, output, use_local_output, length):
    style = VocabParallelEmbedding(output_layouts=output, use_local_output=use_local_output)
    assert two_ranks.run(embedding_faults, shape=(3, length), style=style) == [[], []]


@pytest.mark.parametrize("padding_idx", [0, 3, FIRST_OF_RANK_1 - 1, FIRST_OF_RANK_1, VOCAB - 1, -1])
def test_the_padding_row_gets_no_gradient_on_whichever_rank_holds_it(two_ranks, padding_idx):
    assert two_ranks.run(embedding_faults, padding_idx=padding_idx) == [[], []]


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)])
def test_ids_may_be_a_dtensor(two_ranks, layout):
    assert two_ranks.run(embedding_faults, arrives=layout, plain=False) == [[], []]


def test_ids_may_come_by_keyword(two_ranks):
    assert two_ranks.run(embedding_faults, keyword="input") == [[], []]


class Scaled(nn.Embedding):
    """As Gemma's: the lookup scaled inside the module."""

    def forward(self, ids):
        return super().forward(ids) * 3.5


def scaled_faults():
    return mismatches(lambda: Scaled(VOCAB, WIDTH, padding_idx=2), {"": VocabParallelEmbedding()}, ids_of("all"))


def test_a_subclass_that_changes_the_output_is_right(two_ranks):
    assert two_ranks.run(scaled_faults) == [[], []]


def contiguous_parts():
    """Whether this rank's part of a sharded sequence of odd length is contiguous, for both styles."""
    styles = (
        VocabParallelEmbedding(output_layouts=Shard(1), use_local_output=False),
        ColwiseEmbedding(output_layouts=Shard(1), use_local_output=False),
    )
    outputs = [parallelized(nn.Embedding(VOCAB, WIDTH), {"": style})(ids_of("all")) for style in styles]
    return [output.to_local().is_contiguous() for output in outputs]


def test_the_shorter_part_of_a_sequence_has_the_strides_of_any_other(two_ranks):  # compiled code guards on them
    assert two_ranks.run(contiguous_parts) == [[True, True]] * 2


def graphs_of_two_lengths(style):
    """The graphs that a compiled block takes for two lengths, behind the embedding and behind another block."""
    forget_compiled()
    embedding = parallelized(nn.Embedding(VOCAB, WIDTH), {"": style})
    block = torch.compile(torch.sin, backend="eager")
    for length in (5, 7):
        block(block(embedding(ids_of("all", (3, length)))))
    return graphs_compiled()


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, ColwiseEmbedding])
def test_a_block_behind_an_embedding_shares_the_graph_of_one_behind_a_block(two_ranks, kind):
    style = kind(output_layouts=Shard(1), use_local_output=False)
    assert two_ranks.run(graphs_of_two_lengths, style) == [2, 2]  # of the first length, and of any


def scaled_in_place():
    """The outputs of both styles, which code above scales in place, and the gradients that it sees."""
    found = []
    for style in (DEFAULT, FEATURES):
        embedding = parallelized(nn.Embedding(VOCAB, WIDTH), {"": style})
        output = embedding(ids_of("all"))
        output *= 2  # as CTRL's code does
        output.sum().backward()
        found.append(embedding.weight.grad.full_tensor().sum().item())
    return found


def test_code_above_may_change_the_local_output_in_place(two_ranks):
    assert two_ranks.run(scaled_in_place) == [[2 * 15 * WIDTH] * 2] * 2


def padding_after(ids):
    embedding = parallelized(nn.Embedding(VOCAB, WIDTH, padding_idx=70), {"": VocabParallelEmbedding()})
    embedding(torch.tensor(ids))
    return embedding.padding_idx


def test_the_module_keeps_its_padding_index(two_ranks):
    assert two_ranks.run(padding_after, [1, 70, 130]) == [70, 70]


def padding_after_failure():
    embedding = parallelized(nn.Embedding(VOCAB, WIDTH, padding_idx=70), {"": VocabParallelEmbedding()})
    with pytest.raises(RuntimeError):
        embedding(torch.tensor([0.5]))
    return embedding.padding_idx, isinstance(embedding.weight, DTensor)


def test_the_module_keeps_its_padding_index_when_the_lookup_fails(two_ranks):
    assert two_ranks.run(padding_after_failure) == [(70, True), (70, True)]


def local_gradient_shape():
    embedding = parallelized(nn.Embedding(VOCAB, WIDTH), {"": VocabParallelEmbedding()})
    embedding(ids_of("all")).sum().backward()
    return list(embedding.weight.grad.to_local().shape)


def test_a_rank_holds_the_gradient_of_its_own_rows_only(two_ranks):
    assert two_ranks.run(local_gradient_shape) == [[66, WIDTH], [65, WIDTH]]


def look_up(index):
    parallelized(nn.Embedding(VOCAB, WIDTH), {"": VocabParallelEmbedding()})(torch.tensor([3, index]))


@pytest.mark.parametrize("index", [VOCAB, -1])
def test_an_id_outside_the_vocabulary_is_an_error_as_in_one_process(two_ranks, index):
    with pytest.raises(RanksFailed, match="IndexError"):
        two_ranks.run(look_up, index)


def feature_faults(*, shape=(3, 5), style=FEATURES, width=7, padding_idx=None, **how):
    return mismatches(
        lambda: nn.Embedding(VOCAB, width, padding_idx=padding_idx),
        {"": style},
        ids_of("all", shape),
        leaves=style.output_layouts,
        leaves_plain=style.use_local_output,
        **how,
    )


@pytest.mark.parametrize("use_local_output", [True, False])
@pytest.mark.parametrize("output", [Replicate(), Shard(1), Shard(-1)])
@pytest.mark.parametrize("width", [6, 7])
def test_a_table_split_on_its_features_gives_what_is_asked(two_ranks, width, output, use_local_output):
    style = ColwiseEmbedding(output_layouts=output, use_local_output=use_local_output)
    assert two_ranks.run(feature_faults, width=width, style=style) == [[], []]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 5)])
def test_features_are_looked_up_for_ids_of_any_shape(two_ranks, shape):
    assert two_ranks.run(feature_faults, shape=shape, padding_idx=3) == [[], []]


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)])
def test_features_are_looked_up_for_ids_in_a_dtensor(two_ranks, layout):
    assert two_ranks.run(feature_faults, arrives=layout, plain=False) == [[], []]


def features_stored():
    embedding = parallelized(nn.Embedding(VOCAB, 7), {"": FEATURES})
    embedding(ids_of("all")).sum().backward()
    return list(embedding.weight.to_local().shape), list(embedding.weight.grad.to_local().shape)


def test_a_rank_holds_its_features_of_every_row(two_ranks):
    assert two_ranks.run(features_stored) == [([VOCAB, 4], [VOCAB, 4]), ([VOCAB, 3], [VOCAB, 3])]
