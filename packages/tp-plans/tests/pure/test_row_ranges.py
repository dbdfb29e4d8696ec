"""Rows dealt over ranks: of one matrix or several, in whole units, shared where there are fewer units than ranks."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tp_plans import PlanError
from tp_plans.layouts import compute_ranges, intersect, shard_ranges

on_any_machine = settings(deadline=None)
sizes, ranks = st.integers(1, 200), st.integers(1, 9)
beside = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)


def rows_of(parts):
    return [row for part in parts for row in part]


def in_pieces(pieces, scale):
    """Where each piece begins and ends."""
    ends = [scale * sum(pieces[: place + 1]) for place in range(len(pieces))]
    return [range(end - scale * piece, end) for piece, end in zip(pieces, ends, strict=True)]


@on_any_machine
@given(sizes, ranks)
def test_every_row_is_stored_once_in_order_and_only_the_last_chunks_are_smaller(size, tp):
    chunks = shard_ranges(size, tp)
    assert rows_of(chunks) == list(range(size))
    lengths = [len(chunk) for chunk in chunks]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == -(-size // tp)


@on_any_machine
@given(sizes, ranks)
def test_one_matrix_is_used_where_it_is_stored(size, tp):
    assert [rows_of(rows) for rows in compute_ranges(size, tp)] == [list(chunk) for chunk in shard_ranges(size, tp)]


@on_any_machine
@given(beside, st.integers(1, 30), ranks)
def test_every_row_of_unshared_pieces_is_used_once_and_each_piece_is_dealt_by_itself(pieces, scale, tp):
    used = compute_ranges(scale * sum(pieces), tp, pieces=pieces)
    assert sorted(row for rows in used for row in rows_of(rows)) == list(range(scale * sum(pieces)))
    for piece in in_pieces(pieces, scale):
        own = [[row for row in rows_of(rows) if row in piece] for rows in used]
        chunks = shard_ranges(len(piece), tp)
        assert own == [list(range(piece.start + c.start, piece.start + c.stop)) for c in chunks]


@on_any_machine
@given(beside, st.integers(1, 4), st.integers(2, 6), ranks, st.booleans())
def test_every_rank_uses_whole_units_in_ascending_order_and_all_ranks_equally_many(pieces, scale, unit, tp, shared):
    used = compute_ranges(unit * scale * tp * sum(pieces), tp, unit=unit, pieces=pieces, shared=shared)
    for rows in used:
        assert rows_of(rows) == sorted(set(rows_of(rows)))
        assert all(part.start % unit == 0 and part.stop % unit == 0 for part in rows)
    assert len({len(rows_of(rows)) for rows in used}) == 1


@on_any_machine
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 8))
def test_a_shared_unit_goes_to_as_many_neighbours_as_there_are_ranks_for_each(units, share, unit):
    tp = units * share
    owners = [[rank // share] for rank in range(tp)]
    used = compute_ranges(units * unit, tp, unit=unit, shared=True)
    assert [sorted({row // unit for row in rows_of(rows)}) for rows in used] == owners
    assert all(len(rows_of(rows)) == unit for rows in used)


def test_queries_are_dealt_and_keys_and_values_are_shared_in_one_fused_weight():
    used = compute_ranges(2 * (4 + 1 + 1), 4, unit=2, pieces=(4, 1, 1), shared=True)
    keys_values = [8, 9, 10, 11]
    assert [rows_of(rows) for rows in used] == [[2 * rank, 2 * rank + 1, *keys_values] for rank in range(4)]


@pytest.mark.parametrize(
    ("size", "tp", "options", "message"),
    [
        (10, 2, {"pieces": (2, 1)}, r"10 features are not a multiple of 3, the sum of the fused sizes \(2, 1\)"),
        (10, 2, {"unit": 4}, r"10 features are not a multiple of 4"),
        (12, 4, {"unit": 2}, r"6 blocks of 2 features cannot be split over tp=4: use a tp out of 1, 2, 3, 6$"),
        (12, 4, {"unit": 2, "shared": True}, r"a tp out of 1, 2, 3, 6, or a multiple of 6$"),
        (
            4,
            3,
            {"unit": 2, "shared": True},
            r"2 blocks of 2 features .* tp=3: use a tp out of 1, 2, or a multiple of 2$",
        ),
        (2, 4, {"unit": 2}, r"1 blocks of 2 features .* use a tp out of 1$"),
        (24, 4, {"unit": 2, "pieces": (8, 2, 2)}, r"2 blocks of 2 features cannot be split over tp=4"),
    ],
)
def test_compute_ranges_refuses_sizes_with_the_numbers_that_fit(size, tp, options, message):
    with pytest.raises(PlanError, match=message):
        compute_ranges(size, tp, **options)


@on_any_machine
@given(st.integers(1, 12), st.integers(2, 6), ranks, st.booleans())
def test_every_legal_size_named_by_an_error_is_legal(units, unit, tp, shared):
    def deals(ranks):
        try:
            compute_ranges(units * unit, ranks, unit=unit, shared=shared)
        except PlanError as error:
            return str(error)
        return None

    message = deals(tp)
    assume(message is not None)
    told = message.partition("out of ")[2].partition(", or")[0]
    assert [deals(int(number)) for number in told.split(", ")] == [None] * len(told.split(", "))
    if shared:
        assert deals(3 * units) is None


@on_any_machine
@given(beside, st.integers(1, 20), ranks)
def test_intersect_finds_all_rows_of_a_rank_in_the_chunks_in_order(pieces, scale, tp):
    size = scale * sum(pieces)
    stored = shard_ranges(size, tp)
    for rows in compute_ranges(size, tp, pieces=pieces):
        fetched = [chunk.start + row for chunk in stored for row in rows_of(intersect(rows, chunk))]
        assert fetched == rows_of(rows)


def test_an_overlap_counts_from_the_chunk_and_leaves_out_what_is_empty():
    assert intersect([range(3), range(5, 9), range(20, 22)], range(2, 7)) == [range(1), range(3, 5)]
    assert intersect([range(3)], range(3, 3)) == []
