import copy
import json
import pickle
import unicodedata
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_plans import (
    ColwiseParallel,
    DispatchExperts,
    ExpertsParallel,
    GatherSequence,
    NoParallel,
    ParameterStyle,
    Partial,
    Plan,
    PlanError,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    Style,
    VocabParallelEmbedding,
)
from tp_plans.errors import UnknownStyleError
from tp_plans.styles import (
    AllReduceOutput,
    ColwiseEmbedding,
    GatheredParameters,
    MLAKVProjection,
    ParallelAttention,
    ScaleInput,
)

on_any_machine = settings(deadline=None)  # a busy one exceeds hypothesis's 200 ms at times
shards = st.builds(Shard, st.integers(-4, 4))
cuts = st.one_of(st.just(Replicate()), shards)
units = st.one_of(st.integers(1, 1 << 20), st.sampled_from(["head_dim", "_width"]))
pieces = st.one_of(st.just(()), st.lists(units, min_size=2, max_size=4).map(tuple))
names = st.lists(st.sampled_from(["num_heads", "config.num_heads"]), max_size=3).map(tuple)
arguments, positions = st.sampled_from(["hidden_states", "x"]), st.one_of(st.none(), st.integers(0, 5))
behind_doors = st.one_of(
    st.builds(
        ParallelAttention,
        layout=st.one_of(st.none(), cuts),
        argument=arguments,
        position=positions,
        head_count_attrs=names,
        kv_groups_attr=st.sampled_from(["kv_groups_attr", "config.groups"]),
    ),
    st.builds(GatheredParameters, names=names),
    st.builds(ExpertsParallel, output_layouts=cuts, skips_sentinel_index=st.booleans()),
    st.builds(AllReduceOutput, output_layouts=cuts),
)
styles = st.one_of(
    st.builds(ColwiseParallel, output_layouts=cuts, use_local_output=st.booleans(), multiple_of=units),
    st.builds(ColwiseParallel, multiple_of=units, fused_sizes=pieces, replicate_kv_heads=st.booleans()),
    st.builds(RowwiseParallel, output_layouts=cuts, multiple_of=units, fused_sizes=pieces),
    st.builds(MLAKVProjection, rope_dim=units),
    st.builds(ColwiseEmbedding, output_layouts=cuts, use_local_output=st.booleans()),
    st.builds(DispatchExperts, identity_indices=st.booleans()),
    st.builds(ScaleInput),
    st.builds(ParameterStyle, layout=shards, gathered=st.booleans()),
    st.builds(ParameterStyle, layout=st.just(Replicate()), gradient=st.sampled_from(["full", "partial"])),
    st.builds(GatherSequence, sequence_dim=st.integers(0, 3), inner=st.one_of(st.none(), behind_doors)),
    behind_doors,
    st.builds(
        RowwiseParallel,
        input_layouts=st.sampled_from([Shard(-1), Replicate()]),
        output_layouts=st.one_of(cuts, st.just(Partial())),
        use_local_output=st.booleans(),
        multiple_of=units,
    ),
    st.builds(VocabParallelEmbedding, output_layouts=cuts, use_local_output=st.booleans()),
    st.builds(SequenceParallel, sequence_dim=st.integers(-3, 3)),
    st.builds(NoParallel, gradient=st.sampled_from(["full", "partial"])),
    st.builds(
        PrepareModuleInput,
        layout=cuts,
        argument=arguments,
        position=positions,
    ),
)
#: Characters of every category: hypothesis takes seconds to list all that there are.
SOME = [*map(chr, range(0x3100)), "\ud7ff", "\ue000", "\ufffd", "\uffff", "\U00010000", "\U0001f642", "\U0010ffff"]
named = [each for each in SOME if each not in "./\\" and unicodedata.category(each)[0] not in "ZC"]
parts = st.text(st.sampled_from(named), min_size=1, max_size=8).filter(lambda part: "**" not in part)
paths = st.lists(parts, max_size=4).map(".".join)
plans = st.builds(
    Plan,
    st.dictionaries(paths, styles, max_size=6),
    name=st.text(st.sampled_from(SOME), max_size=8),
    sequence_parallel=st.booleans(),
)

UP, DOWN = ColwiseParallel(), RowwiseParallel()
MLP = Plan({"layers.*.mlp.up": UP, "layers.*.mlp.down": DOWN}, name="mlp", sequence_parallel=True)


def test_the_round_trips_are_tried_with_every_style():
    drawn = set()

    @settings(deadline=None, max_examples=300, database=None)
    @given(styles)
    def draw(style):
        drawn.add(type(style))

    draw()
    assert drawn == set(get_args(Style))


@on_any_machine
@given(plans)
def test_json_round_trip_gives_the_same_plan(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert list(again.items()) == list(plan.items())
    assert again.name == plan.name
    assert hash(again) == hash(plan)


@on_any_machine
@given(plans)
def test_a_plan_survives_pickle_and_deepcopy(plan):
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)


@on_any_machine
@given(plans, parts)
def test_a_prefix_moves_every_match_below_it(plan, prefix):
    moved = plan.with_prefix(prefix)
    assert len(moved) == len(plan)
    for pattern in plan:
        assert moved[f"{prefix}.{pattern}" if pattern else prefix] == plan[pattern]


@on_any_machine
@given(plans)
def test_an_empty_prefix_changes_nothing(plan):
    assert plan.with_prefix("") == plan


def test_a_plan_cannot_be_changed():
    with pytest.raises(TypeError):
        MLP["layers.*.mlp.up"] = DOWN
    for attribute in ("name", "sequence_parallel"):
        with pytest.raises(AttributeError):
            setattr(MLP, attribute, "other")


def test_a_plan_does_not_follow_the_dict_it_was_made_of():
    rules = {"a": UP}
    plan = Plan(rules)
    rules["b"] = DOWN
    assert list(plan) == ["a"]


def test_plans_that_say_the_same_are_equal_whatever_their_name_and_order():
    assert Plan({"a": UP, "b": DOWN}, name="one") == Plan({"b": DOWN, "a": UP}, name="two")
    assert len({Plan({"a": UP}, name="one"), Plan({"a": UP}, name="two")}) == 1
    assert Plan({"a": UP}) != Plan({"a": DOWN})
    assert Plan({"a": UP}) != Plan({"a": UP}, sequence_parallel=True)
    assert Plan({"a": UP}) != {"a": UP}


def test_override_replaces_adds_and_removes_in_a_new_plan():
    changed = MLP.override({"layers.*.mlp.up": NoParallel(), "layers.*.mlp.down": None, "head": UP})
    assert dict(changed) == {"layers.*.mlp.up": NoParallel(), "head": UP}
    assert (changed.name, changed.sequence_parallel) == ("mlp", True)
    assert dict(MLP) == {"layers.*.mlp.up": UP, "layers.*.mlp.down": DOWN}


def test_removing_a_rule_that_is_not_there_says_which_are():
    with pytest.raises(PlanError, match=r"cannot remove 'up': the plan mlp has no such rule; .*layers\.\*\.mlp\.up"):
        MLP.override({"up": None})


def test_override_refuses_what_is_no_style():
    with pytest.raises(PlanError, match="'head' is of type str, which is not a style"):
        MLP.override({"head": "colwise"})


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layers.*.mlp", "layers.0.mlp", True),
        ("layers.*.mlp", "layers.0.mlp.up", False),
        ("layers.*.mlp", "model.layers.0.mlp", False),
        ("layers.*", "layers.0.mlp", False),
        ("*", "layers", True),
        ("*", "", False),
        ("", "", True),
        ("", "layers", False),
        ("layers.[0-3].up", "layers.2.up", True),
        ("layers.[0-3].up", "layers.4.up", False),
        ("layers.?.*_proj", "layers.1.q_proj", True),
        ("Layers.0", "layers.0", False),
    ],
)
def test_a_star_stands_for_exactly_one_part(pattern, path, matches):
    assert Plan({pattern: UP}).match(path) == ([pattern] if matches else [])


def test_every_matching_pattern_is_told():
    plan = Plan({"layers.*.up": UP, "layers.0.up": DOWN, "other": UP})
    assert plan.match("layers.0.up") == ["layers.*.up", "layers.0.up"]


@pytest.mark.parametrize(
    "pattern", ["a..b", ".a", "a.", "a b", "a/b", "a\tb", " ", "\n", 3, None, ("a",), b"a", "a\\b"]
)
def test_a_key_that_is_no_module_path_is_refused(pattern):
    with pytest.raises(PlanError) as caught:
        Plan({pattern: UP})
    assert f"{pattern!r} is not a module path" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "fix"),
    [
        ("layers.**.up", "a star stands for exactly one part: write one * for each"),
        ("**", "a star stands for exactly one part: write one * for each"),
        (r"layers\.\d+\.up", r"\d, no regular expression: write a * for each part that varies"),
    ],
)
def test_a_key_in_the_manner_of_other_tools_is_refused_with_ours(pattern, fix):
    with pytest.raises(PlanError) as caught:
        Plan({pattern: UP})
    assert fix in str(caught.value)


@pytest.mark.parametrize("prefix", ["a.", "a b", None])
def test_a_prefix_that_is_no_module_path_is_refused(prefix):
    with pytest.raises(PlanError, match="is not a module path"):
        MLP.with_prefix(prefix)


@pytest.mark.parametrize("value", ["colwise", None, ColwiseParallel, {"style": "ColwiseParallel"}])
def test_a_value_that_is_no_style_is_refused_with_the_fix(value):
    with pytest.raises(PlanError, match=r"the rule for 'a' is .*which is not a style of tp_plans.*ColwiseParallel\(\)"):
        Plan({"a": value})


@pytest.mark.parametrize("rules", [None, ["a"], "a"])
def test_rules_that_are_no_mapping_are_refused(rules):
    with pytest.raises(PlanError, match="a mapping of pattern to style"):
        Plan(rules)


@pytest.mark.parametrize("rules", [None, ["up"], "up", 3])
def test_override_refuses_what_is_no_mapping(rules):
    with pytest.raises(PlanError, match="override takes a mapping of pattern to style or None, not of type"):
        MLP.override(rules)


@pytest.mark.parametrize(("field", "value"), [("name", 3), ("name", None), ("sequence_parallel", "yes")])
def test_a_name_that_is_no_text_and_a_flag_that_is_none_are_refused(field, value):
    with pytest.raises(PlanError, match=f"{field} is {value!r}: write"):
        Plan({}, **{field: value})


def test_a_rule_that_holds_itself_is_refused():
    rules = {}
    rules["a"] = rules
    with pytest.raises(PlanError, match="the rule for 'a' is of type dict"):
        Plan(rules)


def document(**changes):
    data = {"format": 1, "name": "x", "sequence_parallel": False, "rules": {"a": {"style": "NoParallel"}}}
    return json.dumps({**data, **changes})


def test_the_smallest_document_is_format_and_rules():
    plan = Plan.from_json('{"format": 1, "rules": {"a": {"style": "NoParallel"}}}')
    assert plan == Plan({"a": NoParallel()})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (None, "not JSON: a plan is read from text, not from an object of type NoneType"),
        ({"format": 1}, "not JSON: .* of type dict"),
        (b"\xff", "not JSON: 'utf-8' codec"),
        (document(format=1)[:-1] + ', "name": ' + "9" * 5000 + "}", "not JSON: .*4300"),
        (
            document(rules={"a": {"style": "ColwiseParallel", "output_layouts": f"shard({'9' * 5000})"}}),
            "is not a layout",
        ),
        (document(format=True), "plan format True"),
        ("[" * 100_000, "not JSON"),
        ("[]", "an object with an object 'rules'"),
        ("null", "an object with an object 'rules'"),
        ("{}", "an object with an object 'rules'"),
        (document(rules=[]), "an object with an object 'rules'"),
        (document(format=2), "plan format 2: this release reads format 1"),
        (document(format="1"), "plan format '1'"),
        ('{"rules": {}}', "plan format None"),
        (document(name=3), "name is 3: write a string"),
        (document(sequence_parallel="false"), "sequence_parallel is 'false': write true or false"),
        (document(sequence_parallel=None), "sequence_parallel is None: write true or false"),
        (document(sequence_paralel=True), "no field sequence_paralel: its fields are"),
        (document(rules={"a": "colwise"}), "the rule for 'a' is 'colwise': write an object"),
        (document(rules={"a": None}), "the rule for 'a' is None: write an object"),
        (document(rules={"a b": {"style": "NoParallel"}}), "'a b' is not a module path"),
        (document(rules={"a": {"style": "NoParallel", "x": 1}}), "'a': NoParallel has no field x"),
        (
            document(rules={"a": {"style": "ColwiseParallel", "output_layouts": "shard"}}),
            "'a': 'shard' is not a layout",
        ),
        (
            document(rules={"a": {"style": "ColwiseParallel", "multiple_of": 0}}),
            r"'a': ColwiseParallel\.multiple_of is 0",
        ),
        ('{"format": 1, "rules": {"a": {"style": "X"}, "a": {"style": "X"}}}', "duplicate key 'a'"),
        ('{"format": 1, "format": 1, "rules": {}}', "duplicate key 'format'"),
        ('{"format": 1, "rules": {"a": {"style": "X", "style": "Y"}}}', "duplicate key 'style'"),
    ],
)
def test_bad_json_is_refused_with_what_is_wrong(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_an_unknown_style_in_json_names_its_pattern():
    with pytest.raises(UnknownStyleError, match="'a': 'Colwise' is not a style"):
        Plan.from_json(document(rules={"a": {"style": "Colwise"}}))


def test_the_repr_says_what_kind_of_plan_it_is():
    assert repr(MLP) == "<Plan mlp: TP + SP, 2 rules>"
    assert repr(Plan({})) == "<Plan custom: TP, 0 rules>"
