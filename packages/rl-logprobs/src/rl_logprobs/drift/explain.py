"""Attribution of the gap between a generator's log-probabilities and a trainer's, by ablation.

This package knows log-probabilities, not models: the trainer is a function, and a candidate is a set of keywords with
which that function computes as the generator did.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_logprobs.divergence import kl_estimate
from rl_logprobs.drift.report import Drift, DriftCause, DriftReport
from rl_logprobs.errors import DtypeError, OptionError, ShapeError
from rl_logprobs.tensors import require_same_device

#: A candidate is a cause where it removes at least this share of the drift that is left.
LEAST_SHARE = 0.05


def explain_drift(
    generator_logprobs: Tensor,
    score: Callable[..., Tensor],
    candidates: Mapping[str, Mapping[str, Any]],
    *,
    mask: Tensor | None = None,
    tolerance: float = 1e-6,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[str], None] | None = None,
) -> DriftReport:
    """Say which candidates explain the drift between a generator's log-probabilities and a trainer's.

    ``score()`` returns the trainer's log-probabilities.  A candidate names a cause (truncated sampling, routes, a
    temperature, padding, packing, a padded vocabulary, a dtype, other weights) and gives the keywords with which
    ``score`` computes as the generator did.  Each step adds the candidate that leaves the least drift.  Where no
    candidate explains nearly all of it, the step adds the best pair.  A candidate that later candidates make worthless
    is dropped.  A cause removes at least 5 % of the remaining drift.  Every step compares mean absolute differences
    over the unmasked tokens.

    Args:
        generator_logprobs: ``[...]``, the log-probabilities that the generator returned for its tokens, in nats.
        score: returns the trainer's log-probabilities of the same tokens, of the same shape, for any keywords of the
            candidates together.  It is called without gradients, ``2 * n`` times where one of ``n`` candidates
            explains all, about ``n ** 2`` times otherwise; each combination once.
        candidates: for each name the keywords for ``score``.
        mask: ``[...]``, true where a token counts; by default all do.
        tolerance: a drift of at most so many nats needs no explanation.
        group: ranks that hold other tokens, over which the statistics are summed, so that all ranks decide the same.
        progress: called with a line of text before each call of ``score``.

    Returns:
        The report; ``str(report)`` is a table, ``report.to_json()`` its JSON.

    Raises:
        ShapeError: ``score`` or the mask has another shape, or no token counts.
        DtypeError: log-probabilities of ``score`` or of the generator are not floating point.
        OptionError: two candidates give the same keyword, ``score`` has no such keyword, the tolerance is negative, or
            a tensor is on another device or without values.

    Example:
        >>> import torch
        >>> from rl_logprobs import explain_drift, token_logprobs
        >>> logits, targets = torch.randn(4, 16), torch.arange(4)
        >>> def score(temperature=1.0, vocab=16):
        ...     return token_logprobs(logits[:, :vocab], targets, temperature=temperature)
        >>> report = explain_drift(
        ...     score(temperature=0.7), score, {"temperature": {"temperature": 0.7}, "vocabulary": {"vocab": 12}}
        ... )
        >>> report.found, report.after.mean_absolute
        (('temperature',), 0.0)
    """
    if not tolerance >= 0:
        raise OptionError(f"tolerance must be 0 nats or more, got {tolerance}")
    _require_disjoint(candidates)
    _require_keywords(score, candidates)
    gap = _Gap(generator_logprobs, score, candidates, mask, group, progress)
    names = tuple(candidates)
    before = gap.drift(())
    steps: list[str] = []
    while (left := gap.drift(steps).mean_absolute) > tolerance:
        added = _next(gap, steps, [name for name in names if name not in steps])
        if gap.drift((*steps, *added)).mean_absolute >= (1 - LEAST_SHARE) * left:
            break
        steps += sorted(added, key=lambda name: gap.drift((*steps, name)).mean_absolute)
        steps = _without_superseded(gap, steps)
    causes = [
        DriftCause(name, step, gap.moves(steps, name), gap.drift((name,)), gap.drift(steps[:step]))
        for step, name in enumerate(steps, 1)
    ]
    causes += [
        DriftCause(name, None, gap.moves(steps, name), gap.drift((name,)), None) for name in names if name not in steps
    ]
    return DriftReport(gap.tokens, before, gap.drift(steps), tuple(causes), len(gap.known))


class _Gap:
    """The trainer's log-probabilities with some candidates, each computed once, and their drift."""

    def __init__(
        self,
        generator: Tensor,
        score: Callable[..., Tensor],
        candidates: Mapping[str, Mapping[str, Any]],
        mask: Tensor | None,
        group: dist.ProcessGroup | None,
        progress: Callable[[str], None] | None,
    ) -> None:
        if not generator.is_floating_point() or generator.layout is not torch.strided:
            raise DtypeError(f"generator_logprobs must be dense and floating point, got {generator.dtype}")
        if generator.device.type == "meta":
            raise OptionError("generator_logprobs are on the meta device, without values")
        if mask is not None and mask.shape != generator.shape:
            raise ShapeError(f"mask {tuple(mask.shape)} and generator_logprobs {tuple(generator.shape)} differ")
        require_same_device(generator_logprobs=generator, mask=mask)
        self.mask = torch.ones_like(generator, dtype=torch.bool) if mask is None else mask.bool()
        self.shape = generator.shape
        self.generator = generator.detach().double()[self.mask]
        self.score, self.candidates, self.group, self.progress = score, candidates, group, progress
        self.known: dict[frozenset[str], tuple[Tensor, Drift]] = {}
        self.tokens = int(self._reduced(torch.tensor([float(self.generator.numel())], dtype=torch.float64))[0])
        if self.tokens == 0:
            raise ShapeError("the mask leaves no token to compare")

    def drift(self, names: Iterable[str]) -> Drift:
        """Return the remaining drift with some candidates."""
        return self._evaluated(frozenset(names))[1]

    def moves(self, names: Iterable[str], name: str) -> float:
        """Return how far one candidate moves the log-probabilities beside others."""
        beside = frozenset(names) - {name}
        with_it, without = self._evaluated(beside | {name})[0], self._evaluated(beside)[0]
        total = (with_it - without).abs().nan_to_num(nan=float("inf")).sum()
        return float(self._reduced(total[None].cpu())[0]) / self.tokens

    def _evaluated(self, names: frozenset[str]) -> tuple[Tensor, Drift]:
        if names not in self.known:
            if self.progress is not None:
                self.progress(f"log-probabilities {len(self.known) + 1}: " + (", ".join(sorted(names)) or "trainer"))
            keywords = {key: value for name in names for key, value in self.candidates[name].items()}
            with torch.no_grad():
                scores: Any = self.score(**keywords)
            call = f"score({', '.join(sorted(keywords))})"
            if not (isinstance(scores, Tensor) and scores.is_floating_point() and scores.device.type != "meta"):
                kind = f"{scores.dtype} on {scores.device}" if isinstance(scores, Tensor) else type(scores).__qualname__
                raise DtypeError(f"{call} returned {kind}, not log-probabilities")
            if scores.shape != self.shape:
                shapes = f"{tuple(scores.shape)}, and generator_logprobs are {tuple(self.shape)}"
                raise ShapeError(f"{call} returned {shapes}")
            trainer = scores.detach().double().to(self.generator.device)[self.mask]
            self.known[names] = trainer, self._drift(trainer)
        return self.known[names]

    def _drift(self, trainer: Tensor) -> Drift:
        # A token that one side excludes (-inf) and the other does not is infinitely far.
        difference = (self.generator - trainer).nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf"))
        kl = kl_estimate(self.generator, trainer)
        ratio = (-difference).exp()
        sums = torch.stack([difference.abs().sum(), difference.sum(), kl.sum(), ratio.sum()])
        absolute, mean, kl_mean, ratio_mean = (self._reduced(sums.cpu()) / self.tokens).tolist()
        largest = difference.abs().amax()[None].cpu() if len(difference) else torch.zeros(1, dtype=torch.float64)
        return Drift(absolute, mean, float(self._reduced(largest, dist.ReduceOp.MAX)[0]), kl_mean, ratio_mean)

    def _reduced(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.group is None:
            return values
        values = values.to(self.generator.device)
        dist.all_reduce(values, operation, group=self.group)
        return values.cpu()


def _next(gap: _Gap, steps: list[str], rest: list[str]) -> tuple[str, ...]:
    """Return the candidate that leaves the least drift, or the pair where no candidate explains nearly all."""
    # Two causes may act against each other, or look together like a third.

    def left(names: tuple[str, ...]) -> float:
        return gap.drift((*steps, *names)).mean_absolute

    single = min([(name,) for name in rest], key=left, default=())
    if not single or left(single) <= LEAST_SHARE * left(()):
        return single
    pair = min(itertools.combinations(rest, 2), key=left, default=single)
    return pair if left(pair) < (1 - LEAST_SHARE) * left(single) else single


def _without_superseded(gap: _Gap, steps: list[str]) -> list[str]:
    """Return the steps without steps that later steps made worthless or harmful."""
    for name in steps[:-1]:
        others = [step for step in steps if step != name]
        if gap.drift(others).mean_absolute <= gap.drift(steps).mean_absolute:
            return _without_superseded(gap, others)
    return steps


def _require_disjoint(candidates: Mapping[str, Mapping[str, Any]]) -> None:
    owners: dict[str, str] = {}
    for name, keywords in candidates.items():
        for key in keywords:
            if key in owners:
                raise OptionError(
                    f"candidates {owners[key]!r} and {name!r} both give {key!r}: give each another keyword"
                )
            owners[key] = name


def _require_keywords(score: Callable[..., Tensor], candidates: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that ``score`` takes the keywords, before it is called for the first time."""
    try:
        signature = inspect.signature(score)
    except (TypeError, ValueError):  # written in C
        return
    for keywords in ({}, *candidates.values()):
        try:
            signature.bind(**keywords)
        except TypeError as error:
            raise OptionError(f"score cannot be called as score({', '.join(keywords)}): {error}") from error
