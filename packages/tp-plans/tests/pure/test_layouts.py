import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_plans import Partial, PlanError, Replicate, Shard
from tp_plans.layouts import layout_from_str

#: Characters of every category: hypothesis takes seconds to list all that there are.
SOME = [*map(chr, range(0x3100)), "\ud7ff", "\ue000", "\ufffd", "\uffff", "\U00010000", "\U0001f642", "\U0010ffff"]
on_any_machine = settings(deadline=None)  # a busy one exceeds hypothesis's 200 ms at times
layouts = st.one_of(st.just(Replicate()), st.just(Partial()), st.builds(Shard, st.integers(-8, 8)))


@on_any_machine
@given(layouts)
def test_text_of_a_layout_reads_back_as_the_same_layout(layout):
    assert layout_from_str(str(layout)) == layout


@on_any_machine
@given(layouts)
def test_a_layout_survives_pickle_and_deepcopy(layout):
    assert pickle.loads(pickle.dumps(layout)) == layout == copy.deepcopy(layout)


@on_any_machine
@given(st.text(st.sampled_from(SOME)).filter(lambda text: not text.startswith(("shard", "replicate", "partial"))))
def test_any_other_text_is_refused_with_the_words_that_would_do(text):
    with pytest.raises(PlanError) as caught:
        layout_from_str(text)
    assert repr(text) in str(caught.value)
    assert "'replicate', 'partial' or 'shard(DIM)'" in str(caught.value)


@pytest.mark.parametrize("text", ["Shard(0)", "shard()", "shard(x)", "shard(0) ", "shard(1.5)", "", "Replicate"])
def test_near_misses_are_refused(text):
    with pytest.raises(PlanError):
        layout_from_str(text)


@pytest.mark.parametrize("dim", ["1", 1.0, None, True])
def test_a_shard_needs_an_integer_dim(dim):
    with pytest.raises(PlanError, match="is not a dim"):
        Shard(dim)


def test_layouts_are_values():
    assert Shard(0) == Shard(0) != Shard(1)
    assert {Replicate(), Replicate(), Partial(), Shard(0), Shard(0)} == {Replicate(), Partial(), Shard(0)}
    with pytest.raises(AttributeError):
        Shard(0).dim = 1
