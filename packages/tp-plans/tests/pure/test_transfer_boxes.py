"""Boxes of tensors: intersections, cells and splits lose no element and repeat none."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tp_plans.boxes import box_shape, cells, intersection, split_box, volume

on_any_machine = settings(deadline=None, max_examples=50)
ranges = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (min(pair), max(pair)))
boxes = st.tuples(ranges, ranges)


def elements(box):
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def all_once(found, expected):
    return sorted(index for box in found for index in elements(box)) == sorted(expected)


@on_any_machine
@given(boxes, boxes)
def test_an_intersection_has_the_common_elements(one, other):
    common = intersection(one, other)
    assert elements(one) & elements(other) == (elements(common) if common else set())


@on_any_machine
@given(st.lists(boxes.filter(volume), max_size=5))
def test_cells_have_every_element_once_and_say_which_boxes_have_it(several):
    found = list(cells(several))
    assert all_once([box for box, _ in found], set().union(*map(elements, several)))
    for box, numbers in found:
        assert volume(box)
        assert numbers == tuple(n for n, other in enumerate(several) if intersection(box, other) == box)
        assert all(intersection(box, other) is None for n, other in enumerate(several) if n not in numbers)


def test_boxes_that_do_not_overlap_are_cut_no_smaller_than_the_others_cut_them():
    rows = [((start, start + 2), (0, 6)) for start in range(0, 8, 2)]
    columns = [((0, 8), (start, start + 3)) for start in (0, 3)]
    assert [box for box, _ in cells(rows)] == rows
    assert len(list(cells([*rows, *columns]))) == len(rows) * len(columns)


@on_any_machine
@given(st.tuples(ranges, ranges, ranges), st.integers(1, 30))
def test_a_split_keeps_the_elements_their_order_and_the_limit(box, limit):
    parts = split_box(box, limit)
    assert all(volume(part) <= limit for part in parts)
    in_order = [index for part in parts for index in sorted(elements(part))]
    assert sorted(in_order) == sorted(elements(box))
    assert [parts.index(p) for p in sorted(parts)] == list(range(len(parts)))
    assert sum(volume(part) for part in parts) == volume(box)
    assert len(box_shape(box)) == 3
