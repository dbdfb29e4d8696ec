"""Attribution of planted differences between two sets of log-probabilities."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.ranks import RankPool
from rl_logprobs import explain_drift, token_logprobs
from rl_logprobs.errors import DtypeError, OptionError, ShapeError

VOCAB, TOKENS = 50, 24
LOGITS = torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
NOISE = torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = LOGITS.argmax(-1)

CANDIDATES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "sampling": {"keep": 8},
    "weights": {"stale": 0.5},
    "dtype": {"dtype": torch.bfloat16},
    "vocabulary": {"padding": 14},
}


def _score(
    temperature: float = 1.0,
    keep: int | None = None,
    stale: float = 0.0,
    dtype: torch.dtype = torch.float64,
    padding: int = 0,
) -> Tensor:
    logits = LOGITS + stale * NOISE
    if keep is not None:
        logits = logits.masked_fill(logits < logits.topk(keep).values[:, -1:], float("-inf"))
    logits = torch.cat([logits, logits.new_zeros(TOKENS, padding)], -1)
    return token_logprobs(logits.to(dtype), TARGETS, temperature=temperature).double()


def _generator(*names: str) -> Tensor:
    return _score(**{key: value for name in names for key, value in CANDIDATES[name].items()})


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_single_planted_cause_is_found_with_its_size(name: str) -> None:
    report = explain_drift(_generator(name), _score, CANDIDATES)
    size = (_generator(name) - _score()).abs().mean().item()
    assert report.found == (name,)
    assert report[name].moves == pytest.approx(size, abs=1e-15)
    assert report.before.mean_absolute == pytest.approx(size, abs=1e-15)
    assert report.after.mean_absolute == report[name].alone.mean_absolute == 0.0
    assert report.after.ratio == 1.0
    assert report.evaluations == 2 * len(CANDIDATES)  # the cause beside no other is known from its own step


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(CANDIDATES, 2)])
def test_two_planted_causes_are_both_found(one: str, other: str) -> None:
    report = explain_drift(_generator(one, other), _score, CANDIDATES)
    assert set(report.found) == {one, other}
    assert report.after.mean_absolute == 0.0
    for name, beside in ((one, other), (other, one)):
        moved = (_generator(one, other) - _generator(beside)).abs().mean().item()
        assert report[name].moves == pytest.approx(moved, abs=1e-15)


def test_equal_log_probabilities_have_no_cause() -> None:
    report = explain_drift(_score(), _score, CANDIDATES)
    assert report.found == ()
    assert report.before == report.after
    assert (report.before.mean_absolute, report.before.kl, report.before.ratio) == (0.0, 0.0, 1.0)


def test_a_cause_that_is_no_candidate_remains() -> None:
    report = explain_drift(_generator("weights") - 0.25, _score, {"weights": CANDIDATES["weights"]})
    assert report.found == ("weights",)
    assert report.after.mean == pytest.approx(-0.25)
    assert report.after.mean_absolute == pytest.approx(0.25)


def test_two_causes_that_help_only_together_are_found_as_a_pair() -> None:
    shifted = torch.ones(4)

    def score(up: float = 0.0, down: float = 0.0) -> Tensor:
        return shifted * (3.0 if up and down else -5.0 * (up + down))

    report = explain_drift(3 * shifted, score, {"up": {"up": 1.0}, "down": {"down": 1.0}})
    assert report.found == ("up", "down")
    assert report.after.mean_absolute == 0.0


def test_masked_tokens_do_not_count() -> None:
    generator = _generator("temperature")
    mask = torch.arange(TOKENS) % 2 == 0
    report = explain_drift(torch.where(mask, generator, 99.0), _score, CANDIDATES, mask=mask)
    assert report.found == ("temperature",)
    assert report.tokens == TOKENS // 2
    assert report.after.largest == 0.0


def test_a_candidate_that_excludes_a_sampled_token_is_no_cause() -> None:
    def score(keep: int | None = None) -> Tensor:
        return torch.full((4,), float("-inf")) if keep else torch.zeros(4)

    report = explain_drift(torch.full((4,), -0.5), score, {"sampling": {"keep": 1}})
    assert report.found == ()
    assert report["sampling"].alone.mean_absolute == float("inf")
    assert json.loads(report.to_json())["causes"][0]["alone"]["mean_absolute"] is None


def test_statistics_are_those_of_their_definitions() -> None:
    generator, trainer = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.0]).double()
    before = explain_drift(generator, lambda: trainer, {}).before
    assert before.mean_absolute == pytest.approx(0.75)
    assert before.mean == pytest.approx(-0.25)
    assert before.largest == 1.0
    ratio = (trainer - generator).exp()
    assert before.ratio == pytest.approx(ratio.mean().item())
    assert before.kl == pytest.approx((ratio - 1 - ratio.log()).mean().item())


def test_the_table_and_the_json_have_every_candidate() -> None:
    lines: list[str] = []
    report = explain_drift(_generator("sampling"), _score, CANDIDATES, progress=lines.append)
    table = str(report).splitlines()
    assert [line.split()[0] for line in table[3:-1]] == [cause.name for cause in report.causes]
    assert table[3].startswith("sampling ")
    assert all(line.endswith("not a cause") for line in table[4:-1])
    loaded = json.loads(report.to_json())
    assert loaded["causes"][0]["name"] == "sampling"
    assert loaded["before"]["mean_absolute"] == report.before.mean_absolute
    assert lines[0] == "log-probabilities 1: trainer"
    assert len(lines) == report.evaluations
    with pytest.raises(KeyError):
        report["routes"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: explain_drift(_score(), _score, {"a": {"keep": 1}, "b": {"keep": 2}}),
            OptionError,
            "both give 'keep'",
        ),
        (lambda: explain_drift(_score()[1:], _score, {}), ShapeError, r"returned \(24,\)"),
        (lambda: explain_drift(_score(), _score, {"a": {"kep": 1}}), OptionError, r"score\(kep\).*'kep'"),
        (lambda: explain_drift(_score(), lambda: [0.0], {}), DtypeError, "returned list, not log-probabilities"),
        (lambda: explain_drift(_score().long(), _score, {}), DtypeError, "floating point, got torch.int64"),
        (lambda: explain_drift(_score(), _score, {}, tolerance=-1.0), OptionError, "tolerance .* got -1.0"),
        (lambda: explain_drift(_score(), _score, {}, mask=torch.ones(3)), ShapeError, r"mask \(3,\)"),
        (lambda: explain_drift(_score(), _score, {}, mask=torch.zeros(TOKENS)), ShapeError, "no token"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def _on_ranks(shares: tuple[int, int]) -> Any:
    """The report of ranks that hold the first and the last tokens; a rank may hold none that count."""
    start = [0, shares[0]][dist.get_rank()]
    own = slice(start, start + shares[dist.get_rank()]) if shares[dist.get_rank()] else slice(0, 1)

    def score(**keywords: Any) -> Tensor:
        return _score(**keywords)[own]

    generator = _generator("sampling", "weights")[own]
    mask = torch.full(generator.shape, bool(shares[dist.get_rank()]))
    return explain_drift(generator, score, CANDIDATES, mask=mask, group=dist.group.WORLD)


@pytest.mark.parametrize("shares", [(10, TOKENS - 10), (TOKENS, 0)])
def test_ranks_with_different_tokens_decide_as_one_process_does(two_ranks: RankPool, shares: tuple[int, int]) -> None:
    expected = explain_drift(_generator("sampling", "weights"), _score, CANDIDATES)
    for report in two_ranks.run(_on_ranks, shares):
        assert (report.found, report.tokens) == (expected.found, TOKENS)
        for one, other in [(report.before, expected.before), (report["weights"].alone, expected["weights"].alone)]:
            assert asdict(one) == pytest.approx(asdict(other), abs=1e-12)
        assert report["sampling"].moves == pytest.approx(expected["sampling"].moves, abs=1e-12)
