"""Helpers for a runtime that applies plans, beside ``tp_plans`` and its other front doors.

Styles of a model:   ``resolve_style``, ``dispatch_styles``, ``fused_rows``
Adapters:            ``adapter_styles``, ``AdapterStyles``
Exchanges of tokens: ``TokenExchange``, ``AllToAllExchange``, ``DispatchedTokens``, ``exchange_class``
Runs on few ranks:   ``tiny_model``, ``on_ranks_of``, ``computes``
Tensors:             ``full_view``, ``attach_zero_grads``, ``plain_full_tensor``, ``scale_expert_gradients``
Host time:           ``direct``, ``call_on_plain_tensors``, ``mesh_of``, ``plain_forward``, ``plain_parameters``
Bytecode:            ``reads_below``, ``referenced_names``, ``takes_argument``
Text:                ``colorize``

Bytecode only proposes: sizes check each proposal, or a run verifies it.  The names of exchanges, runs and tensors, and
``dispatch_styles``, import torch at their first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tp_plans.errors import TpPlansError
from tp_plans.hugging_face.translate import from_hugging_face
from tp_plans.infer.bytecode import reads_below, referenced_names, takes_argument
from tp_plans.infer.suggest import suggest
from tp_plans.model_tree import ModelTree
from tp_plans.module_attrs import resolve_style
from tp_plans.plan import Plan
from tp_plans.planned_tree import PlannedTree
from tp_plans.registry import architecture_plan
from tp_plans.styles.adapters import AdapterStyles, adapter_styles
from tp_plans.text import colorize

if TYPE_CHECKING:
    from tp_plans.torch_styles import AllToAllExchange, DispatchedTokens, TokenExchange, dispatch_styles, exchange_class
    from tp_plans.torch_styles._host_time_compat import direct
    from tp_plans.torch_styles.blocks import call_on_plain_tensors, mesh_of, plain_forward, plain_parameters
    from tp_plans.torch_styles.dispatch.style import scale_expert_gradients
    from tp_plans.torch_styles.gradients import attach_zero_grads, full_view
    from tp_plans.torch_styles.placement import plain_full_tensor
    from tp_plans.verification.ranks import computes, on_ranks_of
    from tp_plans.verification.tiny import tiny_model
else:
    #: The names that need torch, by the module that has them.
    _WITH_TORCH = {
        "torch_styles": ("AllToAllExchange", "DispatchedTokens", "TokenExchange", "dispatch_styles", "exchange_class"),
        "torch_styles._host_time_compat": ("direct",),
        "torch_styles.blocks": ("call_on_plain_tensors", "mesh_of", "plain_forward", "plain_parameters"),
        "torch_styles.dispatch.style": ("scale_expert_gradients",),
        "torch_styles.gradients": ("attach_zero_grads", "full_view"),
        "torch_styles.placement": ("plain_full_tensor",),
        "verification.ranks": ("computes", "on_ranks_of"),
        "verification.tiny": ("tiny_model",),
    }

    def __getattr__(name: str) -> Any:
        home = next((module for module, names in _WITH_TORCH.items() if name in names), None)
        if home is None:
            moved = (
                "names in models are in tp_plans.naming, paths in tp_plans.model_tree, shard_ranges in tp_plans.layouts"
            )
            raise AttributeError(f"module 'tp_plans.runtime' has no attribute {name!r}: {moved}")
        value = globals()[name] = getattr(import_module(f"tp_plans.{home}"), name)
        return value


def fused_rows(model: Any, plan: Plan | None = None) -> dict[str, tuple[int, ...]]:
    """Return the rows of each matrix in every fused weight of a model, by the path of the module."""
    # Without ``plan`` all sources of plans are read: a plan leaves out the weights that its mesh cannot divide.
    tree = ModelTree.of(model)
    rows: dict[str, tuple[int, ...]] = {}
    for read in _known_plans(tree) if plan is None else (plan,):
        planned = PlannedTree(tree, read)
        rows |= {path: parts for path, _ in planned.styled_modules() if (parts := planned.fused_rows(path))}
    return rows


def _known_plans(tree: ModelTree) -> Iterator[Plan]:
    """Yield the plan of every source that knows the model, the one to prefer last; nothing is run."""
    for source in (lambda tree: suggest(tree).plan, from_hugging_face, architecture_plan):
        with suppress(TpPlansError):
            yield source(tree)


__all__ = ["AdapterStyles", "AllToAllExchange", "DispatchedTokens", "TokenExchange", "adapter_styles"]
__all__ += ["call_on_plain_tensors", "mesh_of", "plain_forward", "plain_parameters"]
__all__ += ["attach_zero_grads", "colorize", "computes", "direct", "dispatch_styles", "exchange_class"]
__all__ += ["full_view", "fused_rows", "on_ranks_of", "plain_full_tensor", "reads_below", "referenced_names"]
__all__ += ["resolve_style", "scale_expert_gradients", "takes_argument", "tiny_model"]
