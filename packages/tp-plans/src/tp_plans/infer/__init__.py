"""Rules inferred from a model's structure: complete a plan, suggest one, derive its sequence-parallel form.

``suggest`` proposes a plan as a ``Suggestion``, with each ``Doubt`` about it.
"""

from __future__ import annotations

from tp_plans.infer.rules import Doubt
from tp_plans.infer.suggest import Suggestion, suggest

__all__ = ["Doubt", "Suggestion", "suggest"]
