"""Tensor-parallel plans as pure data: which layer of which architecture is split how.

Find a plan:   ``plan_for``, ``resolve_plan``, ``from_hugging_face``, ``architectures``, ``register``
Infer one:     ``suggest``, ``Suggestion``, ``Doubt``
Derive one:    ``with_expert_parallelism``, ``split_towers``, ``rowwise_free``
A plan:        ``Plan``
Styles:        ``Style``, ``ColwiseParallel``, ``RowwiseParallel``, ``VocabParallelEmbedding``, ``SequenceParallel``,
               ``NoParallel``, ``ParameterStyle``, ``ExpertsParallel``, ``DispatchExperts``, ``PrepareModuleInput``,
               ``GatherSequence``; all of them: ``tp_plans.styles``
Layouts:       ``Layout``, ``Replicate``, ``Shard``, ``Partial``
Read a model:  ``ModelTree``
Check sizes:   ``check``, ``CheckReport``, ``Finding``
Verify a run:  ``verify_plan``; its report: ``tp_plans.verification``
Explain:       ``explain``; its result: ``tp_plans.explanation``
Apply:         ``styles_by_path``
Errors:        ``TpPlansError``, ``PlanError``, ``CheckFailedError``, ``CapabilityError``,
               ``UnknownArchitectureError``; all of them: ``tp_plans.errors``

Further front doors: ``tp_plans.models`` (for a new architecture), ``tp_plans.transfer`` (weights from one layout
to another), ``tp_plans.nemo`` (NeMo RL's names), ``tp_plans.runtime`` (helpers for a runtime built on plans).  Other
modules may move.

Importing this package costs next to nothing: a name is imported at its first use.  Neither torch nor transformers is
needed for that; ``Plan.to_torch`` imports torch when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tp_plans import errors as errors
    from tp_plans import explanation as explanation
    from tp_plans import models as models
    from tp_plans import nemo as nemo
    from tp_plans import runtime as runtime
    from tp_plans import styles as styles
    from tp_plans import transfer as transfer
    from tp_plans import verification as verification
    from tp_plans._api import *  # noqa: F403
    from tp_plans._api import __all__ as __all__
else:
    _FRONT_DOORS = ("errors", "explanation", "models", "nemo", "runtime", "styles", "transfer", "verification")

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _FRONT_DOORS:
            return import_module(f"tp_plans.{name}")
        names = import_module("tp_plans._api")
        if name == "__all__" or name in names.__all__:
            value = globals()[name] = getattr(names, name)
            return value
        raise AttributeError(f"module 'tp_plans' has no attribute {name!r}")

    def __dir__() -> list[str]:
        import tp_plans._api as names

        return sorted({*globals(), *names.__all__, *_FRONT_DOORS})
