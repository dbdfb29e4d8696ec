"""What a runtime that applies plans needs, beside ``tp_plans``, ``tp_plans.styles`` and ``tp_plans.transfer``.

Styles of a model:   ``resolve_style``, ``expert_styles_by_path``
Adapters:            ``adapter_styles``, ``AdapterStyles``
Exchanges of tokens: ``TokenExchange``, ``AllToAllExchange``, ``DispatchedTokens``, ``exchange_class``
Runs on few ranks:   ``tiny_model``, ``on_ranks_of``, ``computes``
Tensors:             ``full_view``, ``attach_zero_grads``, ``plain_full_tensor``, ``shard_ranges``,
                     ``scale_expert_gradients``
Host time:           ``direct``
Module paths:        ``parent``, ``join``, ``ancestors``, ``is_at_or_below``
Linear layers:       ``class_of_forward``
Names in models:     ``QUERY``, ``KEY``, ``FUSED_QKV``, ``HEAD_DIM``, ``HEAD_COUNTS``, ``KV_GROUPS``, ``MLA_HEADS``,
                     ``MLA_QUERIES``, ``MLA_ROPE_DIM``, ``MLP_MODULES``, ``EXPERT_COUNTS``
Bytecode:            ``referenced_names``, ``takes_argument``
Text:                ``colorize``

Names and bytecode only propose: sizes check each proposal, or a run verifies it.  The names of exchanges,
runs and tensors import torch at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tp_plans.by_path import expert_styles_by_path
from tp_plans.infer.bytecode import referenced_names, takes_argument
from tp_plans.lora import AdapterStyles, adapter_styles
from tp_plans.model_tree import ancestors, class_of_forward, is_at_or_below, join, parent
from tp_plans.module_attrs import resolve_style
from tp_plans.naming import (
    EXPERT_COUNTS,
    FUSED_QKV,
    HEAD_COUNTS,
    HEAD_DIM,
    KEY,
    KV_GROUPS,
    MLA_HEADS,
    MLA_QUERIES,
    MLA_ROPE_DIM,
    MLP_MODULES,
    QUERY,
)
from tp_plans.row_ranges import shard_ranges
from tp_plans.text import colorize

if TYPE_CHECKING:
    from tp_plans.torch_styles import AllToAllExchange, DispatchedTokens, TokenExchange, exchange_class
    from tp_plans.torch_styles._host_time_compat import direct
    from tp_plans.torch_styles.dispatch.style import scale_expert_gradients
    from tp_plans.torch_styles.gradients import attach_zero_grads, full_view
    from tp_plans.torch_styles.placement import plain_full_tensor
    from tp_plans.verification.ranks import computes, on_ranks_of
    from tp_plans.verification.tiny import tiny_model
else:
    #: The names that need torch, with the modules that have them.
    _WITH_TORCH = {
        **dict.fromkeys(
            ("AllToAllExchange", "DispatchedTokens", "TokenExchange", "exchange_class"), "tp_plans.torch_styles"
        ),
        **dict.fromkeys(("attach_zero_grads", "full_view"), "tp_plans.torch_styles.gradients"),
        "direct": "tp_plans.torch_styles._host_time_compat",
        "plain_full_tensor": "tp_plans.torch_styles.placement",
        "scale_expert_gradients": "tp_plans.torch_styles.dispatch.style",
        **dict.fromkeys(("computes", "on_ranks_of"), "tp_plans.verification.ranks"),
        "tiny_model": "tp_plans.verification.tiny",
    }

    def __getattr__(name: str) -> Any:
        if name not in _WITH_TORCH:
            raise AttributeError(f"module 'tp_plans.runtime' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_WITH_TORCH[name]), name)
        return value


__all__ = [
    "EXPERT_COUNTS",
    "FUSED_QKV",
    "HEAD_COUNTS",
    "HEAD_DIM",
    "KEY",
    "KV_GROUPS",
    "MLA_HEADS",
    "MLA_QUERIES",
    "MLA_ROPE_DIM",
    "MLP_MODULES",
    "QUERY",
    "AdapterStyles",
    "AllToAllExchange",
    "DispatchedTokens",
    "TokenExchange",
    "adapter_styles",
    "ancestors",
    "attach_zero_grads",
    "class_of_forward",
    "colorize",
    "computes",
    "direct",
    "exchange_class",
    "expert_styles_by_path",
    "full_view",
    "is_at_or_below",
    "join",
    "on_ranks_of",
    "parent",
    "plain_full_tensor",
    "referenced_names",
    "resolve_style",
    "scale_expert_gradients",
    "shard_ranges",
    "takes_argument",
    "tiny_model",
]
