"""The result of :func:`rl_logprobs.explain_drift`: frozen, printable, and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Drift:
    """The distance of two sets of log-probabilities of the same tokens, in nats."""

    mean_absolute: float  # mean of ``|generator - trainer|``
    mean: float  # mean of ``generator - trainer``; positive where the generator gave its tokens more probability
    largest: float  # the largest ``|generator - trainer|``
    kl: float  # the k3 estimate of ``KL(generator || trainer)`` from the generator's tokens
    ratio: float  # mean of ``exp(trainer - generator)``, the importance ratio; 1 in expectation for equal policies


@dataclass(frozen=True)
class DriftCause:
    """One candidate."""

    name: str
    step: int | None  # the step at which it was found to be a cause, from 1; ``None`` for a candidate that is no cause
    # mean absolute change of the trainer's log-probabilities by this candidate, beside all causes, in nats
    moves: float
    alone: Drift  # the drift that is left where the trainer takes over this candidate alone
    cumulative: Drift | None  # the drift that is left after this step; ``None`` for a candidate that is no cause

    @property
    def is_cause(self) -> bool:
        """Whether the candidate explains a part of the drift."""
        return self.step is not None


@dataclass(frozen=True)
class DriftReport:
    """The candidates that explain the drift between a generator and a trainer.

    Example:
        >>> import torch
        >>> from rl_logprobs import explain_drift
        >>> trainer = torch.tensor([-1.0, -2.0])
        >>> def score(shift=0.0):
        ...     return trainer + shift
        >>> print(explain_drift(trainer + 0.5, score, {"shift": {"shift": 0.5}}))
        drift of 2 tokens, mean |generator - trainer| in nats
                         moves       alone        left     ratio
        trainer                                    0.5    0.6065
        shift              0.5           0           0    1.0000
        all causes                                   0    1.0000
    """

    tokens: int  # the number of tokens compared
    before: Drift  # the drift of the trainer as it is
    after: Drift  # the drift that is left when the trainer takes over all causes
    causes: tuple[DriftCause, ...]  # every candidate: causes in the order in which they were found, then the others
    evaluations: int  # how often the trainer's log-probabilities were computed

    def __getitem__(self, name: str) -> DriftCause:
        """Return one candidate by name."""
        for cause in self.causes:
            if cause.name == name:
                return cause
        raise KeyError(name)

    @property
    def found(self) -> tuple[str, ...]:
        """The names of the causes, in the order of their discovery."""
        return tuple(cause.name for cause in self.causes if cause.is_cause)

    def to_json(self) -> str:
        """Return the report as JSON; numbers that are not finite are ``null``."""
        return json.dumps(_finite(asdict(self)), indent=2)

    def __str__(self) -> str:
        """Return the report as a table."""
        width = max(len("all causes"), *(len(cause.name) for cause in self.causes), 0)
        head = f"{'':{width}}  {'moves':>10}  {'alone':>10}  {'left':>10}  {'ratio':>8}"
        lines = [f"drift of {self.tokens} tokens, mean |generator - trainer| in nats", head]
        lines.append(_line("trainer", width, None, None, self.before))
        for cause in self.causes:
            lines.append(_line(cause.name, width, cause.moves, cause.alone, cause.cumulative))
        lines.append(_line("all causes", width, None, None, self.after))
        return "\n".join(lines)


def _line(name: str, width: int, moves: float | None, alone: Drift | None, left: Drift | None) -> str:
    numbers = (moves, alone and alone.mean_absolute, left and left.mean_absolute)
    cells = "  ".join(f"{'' if number is None else f'{number:.3g}':>10}" for number in numbers)
    ratio = "not a cause" if left is None else f"{left.ratio:8.4f}"
    return f"{name:{width}}  {cells}  {ratio}".rstrip()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
