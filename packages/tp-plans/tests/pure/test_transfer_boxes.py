"""Boxes of tensors: intersections, differences and splits lose no element and repeat none."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tp_plans.transfer.boxes import box_shape, difference, disjoint, intersection, split_box, uncovered, volume

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
@given(boxes, boxes)
def test_a_difference_has_every_other_element_once(one, other):
    assert all_once(difference(one, other), elements(one) - elements(other))


@on_any_machine
@given(st.lists(boxes, max_size=4), boxes)
def test_a_cover_has_every_element_once_and_its_complement_the_others(several, one):
    assert all_once(disjoint(several), set().union(*map(elements, several)))
    assert all_once(uncovered(one, several), elements(one) - set().union(*map(elements, several)))


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
