"""Numbers of a style that are attributes of the module above."""

from types import SimpleNamespace

import pytest

from tp_plans import ColwiseParallel, LatentProjection, PlanError, Replicated, RowwiseParallel
from tp_plans.attributes import lookup, needs_owner, number, resolved

OWNER = SimpleNamespace(
    head_dim=8, num_heads=4, flag=True, none=0, config=SimpleNamespace(num_key_value_heads=2, text=SimpleNamespace(n=3))
)


class Raising:
    """As a config whose layers differ."""

    @property
    def num_heads(self):
        raise ValueError("layers differ")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("head_dim", 8),
        ("config.num_key_value_heads", 2),
        ("config.text.n", 3),
        ("nothing", None),
        ("config.no.n", None),
    ],
)
def test_an_attribute_is_found_below_the_owner_or_is_none(path, value):
    assert lookup(OWNER, path) == value


def test_an_attribute_that_raises_is_none():
    assert lookup(Raising(), "num_heads") is None
    assert lookup(SimpleNamespace(config=Raising()), "config.num_heads") is None


def test_a_number_is_itself_and_a_name_the_owners_number():
    assert number(OWNER, 5) == 5
    assert number(OWNER, "config.num_key_value_heads") == 2


@pytest.mark.parametrize("name", ["nothing", "flag", "none", "config"])
def test_what_is_no_positive_integer_is_refused_by_owner_name_and_value(name):
    with pytest.raises(PlanError, match=rf"SimpleNamespace has no positive integer '{name}' \(found .*give the number"):
        number(OWNER, name)


@pytest.mark.parametrize(
    ("style", "needs"),
    [
        (ColwiseParallel(), False),
        (ColwiseParallel(unit="head_dim"), False),  # told to `check` only: the rows used are the rows stored
        (ColwiseParallel(unit="head_dim", shared=True), True),
        (ColwiseParallel(pieces=("num_heads", 2, 2)), True),
        (ColwiseParallel(unit="head_dim", pieces=(1, 1)), True),
        (RowwiseParallel(pieces=(1, "num_heads")), True),
        (RowwiseParallel(unit="head_dim"), False),
        (LatentProjection(), True),
        (Replicated(), False),
    ],
)
def test_a_style_needs_its_owner_where_a_name_is_a_number_that_it_computes_with(style, needs):
    assert needs_owner(style) is needs


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(pieces=(1, 1)),
        ColwiseParallel(unit=8, pieces=(4, 2, 2), shared=True),
        RowwiseParallel(pieces=(1, 1)),
        LatentProjection(rotary=16),
    ],
)
def test_a_style_that_has_all_its_numbers_needs_no_owner(style):
    assert not needs_owner(style)
    assert resolved(style, None) == style


def test_names_are_replaced_by_the_owners_numbers_and_all_else_stays():
    fused = ColwiseParallel(unit="head_dim", pieces=("num_heads", "config.num_key_value_heads", 2), shared=True)
    assert resolved(fused, OWNER) == ColwiseParallel(unit=8, pieces=(4, 2, 2), shared=True)
    row = RowwiseParallel(unit="head_dim", pieces=(1, "num_heads"))
    assert resolved(row, OWNER) == RowwiseParallel(unit=8, pieces=(1, 4))
    assert resolved(LatentProjection(rotary="head_dim"), OWNER) == LatentProjection(rotary=8)
    assert resolved(Replicated(), OWNER) == Replicated()


def test_a_name_that_the_owner_lacks_is_refused():
    with pytest.raises(PlanError, match="'qk_rope_head_dim'"):
        resolved(LatentProjection(), OWNER)
