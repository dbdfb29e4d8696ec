"""Tensor-parallel plans as pure data: the style of each layer of an architecture.

Find a plan:   ``plan_for``, ``architectures``, ``register``
Change one:    ``with_expert_parallelism``
A plan:        ``Plan``
Styles:        ``Style``, ``ColwiseParallel``, ``RowwiseParallel``, ``VocabParallelEmbedding``, ``SequenceParallel``,
               ``NoParallel``, ``ParameterStyle``, ``ExpertsParallel``, ``DispatchExperts``, ``PrepareModuleInput``,
               ``GatherSequence``; all of them: ``tp_plans.styles``
Layouts:       ``Replicate``, ``Shard``, ``Partial``; their type: ``tp_plans.layouts``
Check sizes:   ``check``; its report: ``tp_plans.checks``
Verify a run:  ``verify_plan``; its report: ``tp_plans.verification``
Explain:       ``explain``; its result: ``tp_plans.explanation``
Errors:        ``TpPlansError``, ``PlanError``, ``CheckFailedError``, ``CapabilityError``,
               ``UnknownArchitectureError``; all of them: ``tp_plans.errors``

Further front doors: ``tp_plans.infer`` (a proposal with its doubts), ``tp_plans.model_tree`` (read a model once),
``tp_plans.models`` (for a new architecture), ``tp_plans.naming`` (the names that models give to their layers),
``tp_plans.boxes`` (parts of tensors), ``tp_plans.transfer`` (weights from one layout to another), ``tp_plans.nemo``
(NeMo RL's names), ``tp_plans.runtime`` (helpers for a runtime built on plans).  Other modules may move.

Importing this package costs next to nothing: a name is imported at its first use.  Neither torch nor transformers is
needed for that; ``Plan.to_torch`` imports torch when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tp_plans import boxes as boxes
    from tp_plans import checks as checks
    from tp_plans import errors as errors
    from tp_plans import explanation as explanation
    from tp_plans import infer as infer
    from tp_plans import layouts as layouts
    from tp_plans import model_tree as model_tree
    from tp_plans import models as models
    from tp_plans import naming as naming
    from tp_plans import nemo as nemo
    from tp_plans import runtime as runtime
    from tp_plans import styles as styles
    from tp_plans import transfer as transfer
    from tp_plans import verification as verification
    from tp_plans._api import *  # noqa: F403
    from tp_plans._api import __all__ as __all__
else:
    _FRONT_DOORS = (
        *("boxes", "checks", "errors", "explanation", "infer", "layouts", "model_tree", "models", "naming", "nemo"),
        *("runtime", "styles", "transfer", "verification"),
    )
    #: Names that this package had, with the call or the module that replaces each.
    _MOVED = {
        "resolve_plan": "tp_plans.plan_for(model, plan)",
        "from_hugging_face": "tp_plans.plan_for(model, 'transformers')",
        "rowwise_free": "tp_plans.plan_for(model, plan, rowwise=False)",
        "split_towers": "tp_plans.plan_for(model, plan, towers_tp=SIZE)",
        "styles_by_path": "plan.to_torch(model)",
        "suggest": "tp_plans.plan_for(model, 'inferred'), or tp_plans.infer.suggest, which returns the doubts too",
        **dict.fromkeys(("Doubt", "Suggestion"), "tp_plans.infer"),
        **dict.fromkeys(("CheckReport", "Finding"), "tp_plans.checks"),
        "Layout": "tp_plans.layouts",
        "ModelTree": "tp_plans.model_tree",
    }

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _FRONT_DOORS:
            return import_module(f"tp_plans.{name}")
        names = import_module("tp_plans._api")
        if name == "__all__" or name in names.__all__:
            value = globals()[name] = getattr(names, name)
            return value
        fix = f": use {_MOVED[name]}" if name in _MOVED else ""
        raise AttributeError(f"module 'tp_plans' has no attribute {name!r}{fix}")

    def __dir__() -> list[str]:
        import tp_plans._api as names

        return sorted({*globals(), *names.__all__, *_FRONT_DOORS})
