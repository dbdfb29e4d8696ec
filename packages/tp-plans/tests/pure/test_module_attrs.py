"""Numbers of a style that are attributes of the module above."""

from types import SimpleNamespace

import pytest

from tp_plans import ColwiseParallel, NoParallel, PlanError, RowwiseParallel
from tp_plans.module_attrs import getattr_path, key_value_heads, needs_parent, resolve_int, resolve_style
from tp_plans.styles import MLAKVProjection, ParallelAttention

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
    assert getattr_path(OWNER, path) == value


def test_an_attribute_that_raises_is_none():
    assert getattr_path(Raising(), "num_heads") is None
    assert getattr_path(SimpleNamespace(config=Raising()), "config.num_heads") is None


@pytest.mark.parametrize(
    ("config", "groups", "heads"),
    [
        ({"num_key_value_heads": 4, "num_attention_heads": 16}, 2, 4),  # what the attribute says
        ({"num_attention_heads": 16}, 2, 8),  # Gemma 4's layers differ: its config has no such number
        ({}, 2, None),
        ({"num_attention_heads": 16}, None, None),
    ],
)
def test_key_value_heads_are_those_of_the_config_or_of_the_groups(config, groups, heads):
    layer = SimpleNamespace(config=SimpleNamespace(**config), num_key_value_groups=groups)
    assert key_value_heads(layer, ParallelAttention()) == heads


def test_key_value_heads_reads_the_key_projection_before_the_config():
    layer = SimpleNamespace(
        config=SimpleNamespace(num_key_value_heads=4, num_attention_heads=8),
        num_key_value_groups=1,
        head_dim=16,
        k_proj=SimpleNamespace(out_features=8 * 16),
    )
    assert key_value_heads(layer, ParallelAttention()) == 8


def test_a_number_is_itself_and_a_name_the_owners_number():
    assert resolve_int(OWNER, 5) == 5
    assert resolve_int(OWNER, "config.num_key_value_heads") == 2


@pytest.mark.parametrize("name", ["nothing", "flag", "none", "config"])
def test_resolve_int_refuses_other_values_with_owner_name_and_value(name):
    with pytest.raises(PlanError, match=rf"SimpleNamespace has no positive integer '{name}' \(found .*give the number"):
        resolve_int(OWNER, name)


@pytest.mark.parametrize(
    ("style", "needs"),
    [
        (ColwiseParallel(), False),
        (ColwiseParallel(multiple_of="head_dim"), False),  # told to `check` only: the rows used are the rows stored
        (ColwiseParallel(multiple_of="head_dim", replicate_kv_heads=True), True),
        (ColwiseParallel(fused_sizes=("num_heads", 2, 2)), True),
        (ColwiseParallel(multiple_of="head_dim", fused_sizes=(1, 1)), True),
        (RowwiseParallel(fused_sizes=(1, "num_heads")), True),
        (RowwiseParallel(multiple_of="head_dim"), False),
        (MLAKVProjection(), True),
        (NoParallel(), False),
    ],
)
def test_a_style_needs_its_owner_where_a_name_is_a_number_that_it_computes_with(style, needs):
    assert needs_parent(style) is needs


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(fused_sizes=(1, 1)),
        ColwiseParallel(multiple_of=8, fused_sizes=(4, 2, 2), replicate_kv_heads=True),
        RowwiseParallel(fused_sizes=(1, 1)),
        MLAKVProjection(rope_dim=16),
    ],
)
def test_a_style_that_has_all_its_numbers_needs_no_owner(style):
    assert not needs_parent(style)
    assert resolve_style(style, None) == style


def test_names_are_replaced_by_the_owners_numbers_and_all_else_stays():
    fused = ColwiseParallel(
        multiple_of="head_dim", fused_sizes=("num_heads", "config.num_key_value_heads", 2), replicate_kv_heads=True
    )
    assert resolve_style(fused, OWNER) == ColwiseParallel(multiple_of=8, fused_sizes=(4, 2, 2), replicate_kv_heads=True)
    row = RowwiseParallel(multiple_of="head_dim", fused_sizes=(1, "num_heads"))
    assert resolve_style(row, OWNER) == RowwiseParallel(multiple_of=8, fused_sizes=(1, 4))
    assert resolve_style(MLAKVProjection(rope_dim="head_dim"), OWNER) == MLAKVProjection(rope_dim=8)
    assert resolve_style(NoParallel(), OWNER) == NoParallel()


def test_a_name_that_the_owner_lacks_is_refused():
    with pytest.raises(PlanError, match="'qk_rope_head_dim'"):
        resolve_style(MLAKVProjection(), OWNER)
