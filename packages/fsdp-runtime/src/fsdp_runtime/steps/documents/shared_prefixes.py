"""Attention along the paths of prefix trees, for rows in which several samples share the tokens of their prefixes.

A row has the tokens of its trees in pre-order, and ``subtree_end[k]`` is the index after the last descendant of token
``k``.  Token ``q`` attends to token ``k`` where ``k <= q < subtree_end[k]`` and the layer's own mask (causal, sliding
window, chunks) allows their *positions*, which count along the path.  Every other operator has to be token-wise.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fsdp_runtime._torch_compat import forward_pre_hooks
from fsdp_runtime._transformers_compat.masks import PathMask, build_masks_along_paths
from fsdp_runtime._transformers_compat.models import is_stateful
from fsdp_runtime.errors import LayoutError, ModelError, OptionError
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.attention.rows import attention_of_rows
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.mixers import gathered_mixers
from fsdp_runtime.steps.documents.isolation import CurrentDocuments
from fsdp_runtime.wrap import hook_model

logger = logging.getLogger(__name__)

#: Implementations of attention that take any mask.
_ANY_MASK = ("sdpa", "eager", "flex_attention")
#: Kinds of layers in which tokens interact through a mask over positions only, or not at all.
_MASKED_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "mlp", "moe")
#: Modules with results that depend on a token's index in the row, against the rule of their kind.
_INDEX_DEPENDENT = {"DogeCDMoE": "its router mixes the scores of all tokens of a batch"}

_current: ContextVar[PathMask | None] = ContextVar("path_mask", default=None)


@dataclass(frozen=True)
class SharedPrefixes(Step[None]):
    """Let a model take rows of samples with shared prefixes, from :func:`fsdp_runtime.batching.pack_tree`.

    Its forward then accepts ``subtree_end`` beside ``input_ids`` and ``position_ids``; without it nothing changes.
    """

    def resolve(self, setup: Setup) -> Setup:
        """Tell the other steps that rows may share prefixes."""
        return replace(setup, shared_prefixes=True)

    def check(self, setup: Setup) -> None:
        """Check that tokens of the model interact through masked attention only."""
        facts = setup.facts
        name, structure = facts.name, facts.structure
        if setup.packed_sequences:
            raise OptionError(
                "SharedPrefixes takes rows of several trees as they are: leave packed_sequences out, and pack single "
                "samples with pack_tree as groups of one"
            )
        facts.require_transformers(
            "build its mask with TreeRow.mask() or TreeRow.mask_mod(), and leave SharedPrefixes out"
        )
        config = facts.text_config
        if facts.attention not in _ANY_MASK:
            raise ModelError(
                f"{name} computes attention by {facts.attention!r}, which takes no mask of ancestors: call "
                "model.set_attn_implementation('sdpa'), or 'flex_attention'"
            )
        blocks = [each for path in structure.decoder for each in structure.blocks[path].named_modules(prefix=path)]
        kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(_MASKED_LAYERS))
        mixing = [path for path, module in blocks if isinstance(module, nn.Conv1d)]
        if kinds or mixing or is_stateful(facts.row_model):
            states = ", ".join([*kinds, *mixing[:1]]) or "a recurrent state"
            raise ModelError(
                f"{name} passes a state from token to token ({states}), which one row cannot hand to several branches: "
                "use separate rows (pack)"
            )
        for path, module in blocks:
            if (reason := _INDEX_DEPENDENT.get(type(module).__name__)) is not None:
                raise ModelError(f"{path} of {name} cannot share prefixes: {reason}; use separate rows (pack)")
        if setup.meshes.cp is not None and (mixers := gathered_mixers(facts.token_mixers, facts.attention)):
            raise ModelError(
                f"{name} has attention that runs on the full sequence of all cp ranks "
                f"({type(mixers[0].module).__name__}), without the mask of ancestors: share prefixes with cp=1"
            )
        both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
        if both_ways or getattr(config, "is_causal", True) is False:
            raise ModelError(f"{name} has bidirectional attention: a prefix depends on what follows it")

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Pass the trees of rows to the model's masks; attention over ``cp`` reads ``subtree_end`` itself."""
        if setup.meshes.cp is None:
            build_masks_along_paths(_current, _ANY_MASK)
            hooks = _Hooks(attention_of_rows(model, setup, CurrentDocuments()))
            hook_model(model, "takes subtree_end", hooks, hooks.after)
            logger.info("shared prefixes: %s takes subtree_end", type(model).__name__)


def takes_shared_prefixes(model: nn.Module) -> bool:
    """Return True if the forward of a model accepts ``subtree_end``."""
    return any(isinstance(hook, _Hooks) or getattr(hook, "shared_prefixes", False) for hook in forward_pre_hooks(model))


class _Hooks:
    def __init__(self, attention: ContextAttention | None) -> None:
        self.attention = attention
        self._tokens: list[Token[PathMask | None]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take ``subtree_end`` out of the inputs, for the functions that build masks."""
        kwargs = dict(kwargs)
        subtree_end = kwargs.pop("subtree_end", None)
        if self.attention is not None:
            self.attention.whole_rows, self.attention.subtree_end = subtree_end is None, subtree_end
        if subtree_end is None:
            self._tokens.append(_current.set(None))
            return args, kwargs
        positions = kwargs.get("position_ids")
        others = kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in ("attention_mask", "labels"))
        if args or positions is None or positions.shape[-2:] != subtree_end.shape or others:
            raise LayoutError(
                "subtree_end needs position_ids of its shape, all inputs by name, and no attention_mask, use_cache or "
                "labels: padding is part of the row, and a token has several next tokens (TreeRow.predictors)"
            )
        positions = positions[0] if positions.dim() == 3 else positions
        self._tokens.append(_current.set(PathMask(positions, subtree_end)))
        if self.attention is not None:
            self.attention.begin(padding=None, documents=None)
            self.attention.positions = positions
        # Given a mask, transformers does not read restarting positions as the beginnings of packed documents.
        return args, {**kwargs, "attention_mask": subtree_end.new_ones(subtree_end.shape), "use_cache": False}

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._tokens:
            _current.reset(self._tokens.pop())
