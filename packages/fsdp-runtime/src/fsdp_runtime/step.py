"""The base class of the steps of ``parallelize``: a step owns its options, its checks and its application."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import nn

from fsdp_runtime.setup import Setup

#: The result of a step's ``check``.
Checked = TypeVar("Checked")


class Step(Generic[Checked]):
    """One change of a model by ``parallelize``; the fields of the class are its options.

    A call resolves all steps, then checks all steps, then applies them.  A step that refuses a model therefore does so
    before any module changes.  Your own step is applied after the sharding over ``tp``, ``ep`` and ``cp``, and before
    activation checkpointing, compilation and FSDP2.  ``Step[Checked]`` names the type that its ``check`` returns.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, parallelize
        >>> from fsdp_runtime.step import Step
        >>> class Freeze(Step[None]):
        ...     def apply(self, model, setup, checked):
        ...         model.requires_grad_(False)
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
        >>> model = parallelize(model, MeshSpec().build(device_type="cpu"), steps=(Freeze(),))
        >>> any(parameter.requires_grad for parameter in model.parameters())
        False
    """

    def resolve(self, setup: Setup) -> Setup:
        """Return the setup with this step's decisions for all steps, such as the plan; the model is not changed."""
        return setup

    def check(self, setup: Setup) -> Checked:
        """Check the step against the model and the mesh, and return the input of ``apply``; the model is not changed.

        Raises:
            FsdpRuntimeError: the step cannot be applied; the message names the fix.
        """
        return None  # type: ignore[return-value]  # a step without a result is a ``Step[None]``

    @property
    def joins_gradients(self) -> bool:
        """Whether one node of autograd computes gradients of inputs and of weights, so that no schedule splits them."""
        return False

    def prepare(self, model: nn.Module, setup: Setup, checked: Checked) -> None:
        """Change modules before tensor parallelism, which then shards the inputs and outputs of the changed modules."""

    def apply(self, model: nn.Module, setup: Setup, checked: Checked) -> None:
        """Apply the step to a model, in place; ``checked`` is the result of ``check``."""

    def describe(self) -> str:
        """Return the step and its options in a line."""
        return repr(self)
