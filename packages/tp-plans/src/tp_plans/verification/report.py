"""The result of a plan's run: the differences between the split and the full model, with their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tp_plans.errors import CheckFailedError
from tp_plans.text import table

#: Parts of models compute in float32 whatever the parameters are in (norms, rotary embeddings), so that float64 results
#: agree to rounding in float32 only.  A gradient's error is relative to its largest element.
OUTPUT_BOUND, GRADIENT_BOUND = 1e-5, 1e-4

#: How many parameters of a part a message names.
_LISTED = 3


@dataclass(frozen=True)
class WrongPart:
    """One part of a model (an embedding, a sub-layer, a head) that a plan splits wrongly."""

    where: str  # the module, as a pattern
    rules: tuple[str, ...]  # the patterns of the plan that are its rules
    what: str  # the difference from the full model

    def __str__(self) -> str:
        return f"{self.where or '(top)'}: {self.what}; its rules: {', '.join(self.rules) or 'none'}"


@dataclass(frozen=True)
class VerificationReport:
    """The result of one run of a plan."""

    plan: str  # the name of the plan
    tp: int  # ranks that the model was split over
    ran: str  # the model that was run, in words
    output_error: float = 0.0  # the largest error of the outputs, relative to their largest element
    # every parameter's largest error on any rank, relative to its gradient's largest element
    gradient_errors: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[WrongPart, ...] = ()  # the parts that are split wrongly; empty if the plan is right
    error: str = ""  # the split model's exception, if it raised one

    @property
    def right(self) -> bool:
        """Whether the outputs and all gradients equal the full model's."""
        return not self.wrong and not self.error

    def raise_on_error(self) -> None:
        """Raise where the plan is wrong.

        Raises:
            CheckFailedError: it is; the message names every part that is split wrongly.
        """
        if not self.right:
            raise CheckFailedError(str(self))

    def __str__(self) -> str:
        head = f"{self.plan} on {self.tp} ranks, {self.ran}: "
        if self.right:
            worst = max(self.gradient_errors.values(), default=0.0)
            gradients = f"{len(self.gradient_errors)} gradients within {worst:.1e}"
            return f"{head}right; output within {self.output_error:.1e}, {gradients}"
        raised = [f"raised {self.error}"] if self.error else []
        rows = [(part.where or "(top)", part.what, ", ".join(part.rules) or "none") for part in self.wrong]
        listed = table([("module", "difference", "rules"), *rows]) if rows else ()
        return "\n".join([f"{head}wrong", *raised, *listed])


def differences(output_error: float, gradient_errors: Mapping[str, float]) -> str:
    """Return errors beyond the bounds in words; empty where there are none."""
    words = [f"output off by {output_error:.1e}"] if not output_error <= OUTPUT_BOUND else []
    beyond = {path: error for path, error in gradient_errors.items() if not error <= GRADIENT_BOUND}
    worst = sorted(beyond, key=lambda path: -beyond[path])[:_LISTED]
    words += [f"gradient of {path} off by {beyond[path]:.1e}" for path in worst]
    more = len(beyond) - len(worst)
    return ", ".join(words) + (f" and of {more} more" if more else "")
