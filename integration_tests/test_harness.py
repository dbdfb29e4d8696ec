"""The harness itself: it detects deliberate errors, and a failing rank does not hang a test."""

from __future__ import annotations

import os
import sys
import time
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from coverage.measure import gradient_errors as measured_errors
from harness import mutants
from harness.models import tiny_model
from harness.pairwise import alternating_first, pairwise, pairwise_first
from harness.parity import Case, assert_parity, compare, gradient_errors
from harness.ranks import RankPool, RanksFailed
from harness.rewriting import rewrite_tests

TP = {"tp": 2}


def test_unreduced_norm_gradient_is_caught(two_ranks: RankPool) -> None:
    reports = two_ranks.run(compare, Case("Qwen3ForCausalLM", TP, mutants.unreduced_query_norm))
    with pytest.raises(AssertionError) as caught:
        assert_parity(reports)
    named = {line.split("gradient of ")[1].split(" ")[0] for line in str(caught.value).splitlines()}
    assert named == {f"model.layers.{i}.self_attn.q_norm.weight" for i in range(2)}


def test_bias_added_twice_is_caught(two_ranks: RankPool) -> None:
    reports = two_ranks.run(compare, Case("LlamaForCausalLM", TP, mutants.bias_added_twice))
    with pytest.raises(AssertionError, match="rank 0: output off by"):
        assert_parity(reports)


def test_broken_tie_is_caught(two_ranks: RankPool) -> None:
    reports = two_ranks.run(compare, Case("LlamaForCausalLM", TP, mutants.broken_tie, model={"tied": True}))
    with pytest.raises(AssertionError, match=r"ties: the reference shares .*lm_head\.weight"):
        assert_parity(reports)


def test_gradient_wrong_on_one_rank_only_is_caught_there(two_ranks: RankPool) -> None:
    reports = two_ranks.run(compare, Case("LlamaForCausalLM", TP, mutants.wrong_on_rank_one))
    with pytest.raises(AssertionError, match=r"rank 1: gradient of model\.norm\.weight") as caught:
        assert_parity(reports)
    assert "rank 0" not in str(caught.value)


def test_a_gradient_of_nan_is_an_infinite_error_that_no_maximum_drops() -> None:
    model = tiny_model("LlamaForCausalLM")
    expected = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients: dict[str, torch.Tensor | None] = {**expected}
    assert max(gradient_errors(expected, model).values()) == 0
    assert max(error for _, error in measured_errors(model, model, gradients)) == 0
    model.get_parameter("model.norm.weight").grad[3] = float("nan")
    for errors in (gradient_errors(expected, model), dict(measured_errors(model, model, gradients))):
        assert {name for name, error in errors.items() if error} == {"model.norm.weight"}
        assert max([0.0, *errors.values()]) == float("inf")


def test_a_pairwise_cover_has_every_pair_in_a_third_of_the_combinations() -> None:
    factors = ("abcde", "xyz", (False, True), (0, 1))
    found = pairwise(*factors)
    for (i, first), (j, second) in combinations(enumerate(factors), 2):
        assert {(each[i], each[j]) for each in found} == set(product(first, second))
    marked = [bool(each.marks) for each in pairwise_first(*factors)]
    assert (len(marked), marked.count(False)) == (60, len(found))
    assert len(found) <= 20


def test_an_alternating_cover_has_half_of_the_combinations_and_every_value() -> None:
    marked = [(each.values, bool(each.marks)) for each in alternating_first("abc", range(4))]
    assert [values for values, _ in marked] == list(product("abc", range(4)))
    fast = [values for values, slow in marked if not slow]
    assert len(fast) == 6
    assert [sorted(set(column)) for column in zip(*fast, strict=True)] == [list("abc"), list(range(4))]


def _raise_on_rank_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("planted on rank 1")
    dist.barrier()
    return 0


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def _rank() -> int:
    return dist.get_rank()


@pytest.fixture
def own_ranks() -> RankPool:
    """A world of this test's own, which it may break."""
    pool = RankPool(2)
    yield pool
    pool.close(force=True)


def test_one_raising_rank_is_reported_with_its_message_and_the_pool_stays_usable(
    own_ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.ranks.GRACE_SECONDS", 2.0)
    own_ranks.run(_rank)
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1: ValueError: planted on rank 1"):
        own_ranks.run(_raise_on_rank_one)
    assert time.monotonic() - start < 20
    assert own_ranks.run(_rank) == [0, 1]


def _is_preloaded() -> bool:
    return "harness.preload" in sys.modules


def test_ranks_start_with_their_imports_done(own_ranks: RankPool) -> None:
    assert own_ranks.run(_is_preloaded) == [True, True]


def _prints_a_traceback() -> None:
    sys.stdout.write("said by a rank\n")
    os.write(2, b"Traceback of an expected failure\n")


def test_output_of_ranks_is_that_of_the_test_and_not_of_the_terminal(
    own_ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    own_ranks.run(_prints_a_traceback)
    told = capsys.readouterr().err
    assert told.count("Traceback of an expected failure") == told.count("said by a rank") == 2
    own_ranks.run(os.getpid)
    assert capsys.readouterr().err == ""


def test_a_dead_rank_is_reported(own_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        own_ranks.run(_die_on_rank_one)
    assert caught.value.errors[1].type_name == "Died"


def test_models_of_one_build_are_alike_and_share_nothing() -> None:
    first, numbers = tiny_model("Qwen3ForCausalLM"), torch.rand(3)
    second = tiny_model("Qwen3ForCausalLM")
    assert torch.equal(torch.rand(3), numbers)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    with torch.no_grad():
        first.lm_head.weight.zero_()
    assert second.lm_head.weight.all()
    assert second.config is not first.config
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in tiny_model("Qwen3ForCausalLM").parameters())


def test_a_rewritten_test_is_found_by_the_next_process(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_one.py").write_text("def test():\n    assert 1 == 2\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(request.config, "args", [str(tmp_path)])
    rewrite_tests(request.config)
    assert len(list(tmp_path.glob("__pycache__/test_one.*pytest*.pyc"))) == 1
    assert len(list(tmp_path.glob("__pycache__/test_one.*"))) == 2
