import pytest
from stub_modules import Linear, Module

from tp_plans import ColwiseParallel, RowwiseParallel, check

MODEL = Module(up=Linear(8, 4), down=Linear(4, 8))


def test_a_dict_of_words_is_checked_as_a_plan():
    assert check({"up": "colwise", "down": "rowwise"}, MODEL, tp=2).errors == ()
    assert check({"up": ColwiseParallel(), "down": RowwiseParallel()}, MODEL, tp=2).errors == ()


@pytest.mark.parametrize(
    ("rule", "message", "fix"),
    [
        ({"up": "colwize", "down": "rowwise"}, "unknown style word 'colwize'", "did you mean 'colwise'?"),
        ({"up": "xyz", "down": "rowwise"}, "unknown style word 'xyz'", "known words are "),
        ({"up": 3, "down": "rowwise"}, "the rule for 'up' is of type int", "correct the rule"),
        ({"up/": "colwise", "up": "colwise", "down": "rowwise"}, "'up/' is not a module path", "correct the rule"),
        ({7: "colwise", "up": "colwise", "down": "rowwise"}, "7 is not a module path", "correct the rule"),
    ],
)
def test_check_lists_unreadable_rules_beside_other_findings(rule, message, fix):
    report = check({**rule, "nowhere": "colwise"}, MODEL, tp=2)
    told = [found for found in report.errors if message in found.message]
    assert len(told) == 1
    assert fix in told[0].fix
    assert any(found.where == "nowhere" for found in report.errors)
