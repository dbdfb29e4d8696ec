"""Context parallelism: a sequence split over ranks, with attention over all of it.

A model computes everything but attention token by token.  So it runs on this rank's tokens, told their true
positions, and only its attention function is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import all_gather_flat, forward_pre_hooks
from fsdp_runtime._transformers_compat import (
    attention_in_force,
    is_transformers_model,
    keeps_state,
    rope_types,
    supports_sdpa,
    use_attention,
)
from fsdp_runtime.errors import LayoutError, ModelError
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.parallel.context.attention import ContextAttention
from fsdp_runtime.parallel.context.sharding import LoadBalancer, SequenceLayout, require_load_balancer

logger = logging.getLogger(__name__)

#: Inputs that are cut like the tokens, or are no tensors of tokens at all.
_TAKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
#: Kinds of layers whose tokens meet in attention only.
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
#: Rotary embeddings whose frequencies depend on the longest position that a rank sees.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def require_context_parallel(model: Any, structure: ModelStructure) -> None:
    """Raise :class:`ModelError` unless the model's tokens meet in attention alone, and in one that can be replaced."""
    name = type(model).__name__
    if not is_transformers_model(model):
        raise ModelError(
            f"{name} is no transformers model: cp replaces attention through transformers.AttentionInterface; in a "
            "model of your own call ContextAttention(group, load_balancer).attend, then apply_tp and "
            "apply_fsdp(model, fsdp_mesh(mesh), inspect_model(model))"
        )
    config = model.config.get_text_config()
    if not supports_sdpa(model) or attention_in_force(config) != "sdpa":
        raise ModelError(
            f"{name} computes attention by {attention_in_force(config)!r}: cp needs 'sdpa', as by "
            "model.set_attn_implementation('sdpa') where the model supports it"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION_LAYERS)
    mixing = [
        f"{path}.{inner}"
        for path in structure.decoder
        for inner, module in structure.blocks[path].named_modules()
        if isinstance(module, nn.Conv1d)
    ]
    if kinds or mixing or keeps_state(model):
        found = ", ".join([*sorted(kinds), *mixing[:1]]) or "a recurrent state"
        raise ModelError(f"{name} mixes tokens outside attention ({found}), which cp would cut apart: use cp=1")
    rope = rope_types(config) & set(_LENGTH_DEPENDENT)
    if rope:
        raise ModelError(
            f"{name} has rotary embeddings of type {', '.join(rope)}, whose frequencies depend on the longest position "
            "that a rank sees: use cp=1, or set rope_type to another one"
        )


def apply_cp(
    model: Any, cp_mesh: DeviceMesh, structure: ModelStructure, *, load_balancer: LoadBalancer = "headtail"
) -> None:
    """Make a model take its tokens split over a one-axis mesh, in place.

    Its forward then takes this rank's part of every input (see ``SequenceLayout.shard_batch``) and returns this rank's
    tokens' outputs.  Position ids are filled in where they are missing.  ``attention_mask`` may also be the one of
    the whole sequence, which saves gathering it.

    Args:
        model: a transformers model whose attention is ``"sdpa"``.
        cp_mesh: the axis.
        structure: the model's parts.
        load_balancer: the tokens that each rank holds.

    Raises:
        ModelError: its tokens do not meet in attention alone.
        OptionError: an unknown load balancer.
    """
    require_load_balancer(load_balancer)
    require_context_parallel(model, structure)
    attention = ContextAttention(cp_mesh.get_group(), load_balancer)
    use_attention(model, f"context_parallel_{id(attention):x}", attention.attend, attention.mask)
    model.register_forward_pre_hook(_Inputs(attention), with_kwargs=True)
    logger.info("context parallelism: attention over %d ranks, load balancer %s", cp_mesh.size(), load_balancer)


def attention_of(model: nn.Module) -> ContextAttention:
    """The attention that :func:`apply_cp` gave a model.

    Raises:
        ModelError: it gave it none.
    """
    hook = next(_hooks(model), None)
    if hook is None:
        name = type(model).__name__
        raise ModelError(f"{name} is not under context parallelism: parallelize it on a mesh with cp > 1")
    return hook.attention


def under_context_parallelism(model: nn.Module) -> bool:
    """Whether :func:`apply_cp` was called on a model."""
    return any(_hooks(model))


def _hooks(model: nn.Module) -> Iterator[_Inputs]:
    return (hook for hook in forward_pre_hooks(model) if isinstance(hook, _Inputs))


class _Inputs:
    """The forward pre-hook that completes a rank's inputs and refuses what cannot be cut."""

    def __init__(self, attention: ContextAttention) -> None:
        self.attention = attention

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            raise LayoutError("a model under context parallelism takes its inputs by name, as input_ids=...")
        _refuse_uncut(kwargs)
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if tokens is None:
            raise LayoutError("neither input_ids nor inputs_embeds: context parallelism needs to know the length")
        attention = self.attention
        layout = attention.layout(tokens.shape[1])
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        attention.masked, attention.documents = mask is not None, None
        if mask is None:
            if positions is not None:
                attention.documents = _documents(self._gathered(positions, layout))
            # Of the whole length: transformers takes the number of keys from the mask.
            mask = tokens.new_ones((tokens.shape[0], layout.length), dtype=torch.bool)
        elif mask.dim() != 2 or mask.shape[1] not in (tokens.shape[1], layout.length):
            raise LayoutError(
                f"attention_mask {tuple(mask.shape)}: give [batch, {tokens.shape[1]}], this rank's tokens, or "
                f"[batch, {layout.length}], the whole sequence"
            )
        elif mask.shape[1] != layout.length:
            mask = self._gathered(mask, layout)
        if positions is None:
            positions = layout.positions.to(tokens.device).expand(tokens.shape[0], -1)
        return args, {**kwargs, "attention_mask": mask, "position_ids": positions, "use_cache": False}

    def _gathered(self, local: Tensor, layout: SequenceLayout) -> Tensor:
        """``[..., seq]`` in sequence order, of a small tensor without gradient."""
        first = local.movedim(-1, 0).contiguous()
        everyone = first.new_empty(layout.length, *first.shape[1:])
        all_gather_flat(everyone.view(-1), first.view(-1), self.attention.group).wait()
        return everyone.index_select(0, layout.permutation.argsort().to(local.device)).movedim(0, -1)


def _documents(positions: Tensor) -> Tensor | None:
    """The documents of a packed batch, which begin where positions do not go on; ``None`` where there is but one.

    transformers reads position ids the same way, and like it this looks at values once a forward.
    """
    if positions.dim() == 3:  # one for time, height and width (multimodal rotary embeddings)
        positions = positions[0]
    begins = positions.diff(dim=-1, prepend=positions[..., :1] - 1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


def _refuse_uncut(kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        raise LayoutError(
            "labels are shifted inside the model, across the cut: shift them in the whole sequence, cut them with "
            "SequenceLayout.shard, and compute the loss from the logits (as rl_logprobs does)"
        )
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise LayoutError("a key/value cache would hold this rank's keys only: pass use_cache=False")
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.dim() > 0 and name not in _TAKEN and bool(value.numel()):
            raise LayoutError(
                f"{name} {tuple(value.shape)} cannot be cut along the tokens: compute the embeddings of the whole "
                "sequence first, and pass this rank's part as inputs_embeds"
            )
