"""Every use of private attributes of ``nn.Module``, with its reason; seen to work on torch 2.10 to 2.15.

By attribute alone: torch is not imported, and a stand-in with the same attributes will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def own_parameters(module: Any) -> dict[str, Any]:
    """A module's dict of direct parameters, absent ones (``None``) and views in their place included."""
    # ``named_parameters`` hides both, and assigning an attribute refuses a plain tensor where a parameter was; torch's
    # own parametrisation and FSDP2 work on the same dict.
    parameters: dict[str, Any] = getattr(module, "_parameters", {})
    return parameters


def own_children(module: Any) -> dict[str, Any]:
    """A module's dict of direct children; ``named_children`` takes ten times as long in every call of a module."""
    children: dict[str, Any] = module._modules
    return children


def own_buffers(module: Any) -> dict[str, Any]:
    """A module's dict of direct buffers, for modules that are no ``nn.Module`` too."""
    buffers: dict[str, Any] = getattr(module, "_buffers", {})
    return buffers


#: The method that runs a module's hooks and forward; the compiler looks it up by this name.
CALL = "_call_impl"


def call_of(module_class: Any) -> Any:
    """A module class's call of hooks and forward, in which the compiler can be told to leave both to Python."""
    # Hooks that are added later, as FSDP2's, then run outside of compiled code, which would skip them.
    return module_class._call_impl


@dataclass(frozen=True, slots=True)
class Workaround:
    """Code that only some supported versions of torch need."""

    place: str  # module and name under ``tp_plans.torch_styles``
    last: tuple[int, int]  # the last torch version that needs it; a test fails once no supported version does
    upstream: str  # the issue or pull request, or that none was found
    reason: str  # the failure without it


#: Every place in the torch styles that depends on a version of torch.
WORKAROUNDS = (
    Workaround(
        "gradients._UnevenView",
        (2, 10),
        "https://github.com/pytorch/pytorch/issues/107661",
        "to_local gives a gradient the strides of one rank's shard, and accumulation falls back to a replicated copy",
    ),
    Workaround(
        "gradients._DenseGradient",
        (2, 11),
        "https://github.com/pytorch/pytorch/issues/107661",
        "an expanded gradient (a sum's) of an uneven shard is accumulated as a replicated copy",
    ),
    Workaround(
        "gradients._detach",
        (2, 10),
        "no upstream issue found",
        "where no gradient is recorded, a DTensor that requires one cannot be redistributed",
    ),
    Workaround(
        "placement.placement",
        (2, 10),
        "https://github.com/pytorch/pytorch/issues/171274",
        "the compiler cannot trace the class patterns of a match statement",
    ),
    Workaround(
        "placement._OwnPart",
        (2, 14),
        "https://github.com/pytorch/pytorch/issues/152954",
        "the compiler recurses without end over the symbolic length of a replicated DTensor that is sharded",
    ),
    Workaround(
        "placement._OwnSum",
        (2, 14),
        "https://github.com/pytorch/pytorch/issues/152954",
        "the same, of the gradient of partial sums that are sharded",
    ),
    Workaround(
        "placement.plain_full_tensor",
        (2, 11),
        "no upstream issue found",
        "gathering shards of unequal length leaves a view of padded rows",
    ),
    Workaround(
        "linear.ColwiseParallelImpl",
        (2, 10),
        "https://github.com/pytorch/pytorch/pull/170147",
        "redistributing partial sums to replicated does not sum the gradient on the way back",
    ),
    Workaround(
        "row_all_to_all.all_to_all",
        (2, 11),
        "no upstream issue found; the same failure: https://github.com/deepspeedai/DeepSpeed/pull/8491",
        "the compiler gives no gradient to an autograd function if a collective wrote its output in place",
    ),
)
