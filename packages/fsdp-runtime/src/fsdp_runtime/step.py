"""What a step of ``parallelize`` is: one value that owns its options, its checks and its application."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_runtime.setup import Setup


class Step:
    """One thing that ``parallelize`` does to a model; its fields are its options.

    For each call every step is resolved, then every step is checked, then each one is applied.  So a step that refuses
    a model does so before any module changes.  A step of your own comes after those that shard a model over ``tp``,
    ``ep`` and ``cp``, and before activation checkpointing, compilation and FSDP2.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, parallelize
        >>> from fsdp_runtime.step import Step
        >>> class Freeze(Step):
        ...     def apply(self, model, setup, found):
        ...         model.requires_grad_(False)
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
        >>> model = parallelize(model, MeshSpec().build(device_type="cpu"), steps=(Freeze(),))
        >>> any(parameter.requires_grad for parameter in model.parameters())
        False
    """

    @classmethod
    def examples(cls) -> tuple[Step, ...]:
        """Return steps with options other than those of a call without keywords, for tests that combine options."""
        return ()

    def resolve(self, setup: Setup) -> Setup:
        """Return the setup with what this step decides for all, such as the plan; the model is not changed."""
        return setup

    def check(self, setup: Setup) -> Any:
        """Check the step against the model and the mesh, and return what ``apply`` needs; the model is not changed.

        Raises:
            FsdpRuntimeError: the step cannot be applied; the message names the fix.
        """
        return None

    def prepare(self, model: nn.Module, setup: Setup, found: Any) -> None:
        """Change what has to stand inside of tensor parallelism, whose rules then see its inputs and outputs."""

    def apply(self, model: nn.Module, setup: Setup, found: Any) -> None:
        """Apply the step to a model, in place.

        Args:
            model: the model.
            setup: what the step was checked with.
            found: what ``check`` returned.
        """

    def describe(self) -> str:
        """Return the step and its options in a line."""
        return repr(self)
