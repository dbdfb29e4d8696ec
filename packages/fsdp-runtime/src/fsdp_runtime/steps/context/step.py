"""Context parallelism: each rank runs the model on its own tokens, and token mixers span the full sequence.

All other modules are token-wise.  So the model runs on local tokens with their positions in the full sequence.  Its
attention function is replaced, and any other mixer runs on the tokens of all ranks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import nn

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._torch_compat import forward_pre_hooks
from fsdp_runtime._transformers_compat.attention import use_attention
from fsdp_runtime._transformers_compat.models import (
    is_encoder_decoder,
    is_transformers_model,
    length_dependent_ropes,
    picks_one_token,
    pooler,
    recorded_outputs,
    rope_types,
    scores_rows,
)
from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.positions import DerivedPositions
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.model.token_mixers import attend_between_layers
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import ModelFacts, Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.attention.kernels import Keys, decide
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.inputs import Inputs, embedded_inputs
from fsdp_runtime.steps.context.media import media_of
from fsdp_runtime.steps.context.methods import (
    Method,
    attention_dropout,
    is_sharded,
    query_heads,
    require_heads,
    require_plain_attention,
)
from fsdp_runtime.steps.context.mixers import eager_function, gather_for, gathered_mixers, replaced_attention
from fsdp_runtime.steps.context.sharding import LOAD_BALANCERS, LoadBalancer
from fsdp_runtime.steps.context.sharding import SequenceLayout as SequenceLayout
from fsdp_runtime.steps.context.sharding import padded as padded
from fsdp_runtime.steps.context.verify import verify_context_parallelism
from fsdp_runtime.steps.documents.isolation import BOUNDARIES as BOUNDARIES
from fsdp_runtime.steps.outputs.full_tensors import refuse_attention_maps
from fsdp_runtime.steps.outputs.lm_head import KEEPS_OVER_CP
from fsdp_runtime.values import require_bool, require_one_of
from fsdp_runtime.wrap import hook_forward, hook_model

logger = logging.getLogger(__name__)

#: Rotary embeddings with frequencies that depend on the longest position that a rank sees.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
#: The keys of an attention call by each method.
_KEYS: dict[Method, Keys] = {"allgather": "gathered", "ulysses": "rows", "ring": "passed"}


def check_context_parallel(facts: ModelFacts, method: Method = "allgather") -> None:
    """Check that the modules that mix tokens are known, and that attention can be replaced."""
    model, name = facts.row_model, facts.name
    facts.require_transformers(
        "call ContextAttention(group, load_balancer).attend in your model and pass "
        "context_parallel=ContextParallel(attention=False)"
    )
    if picks_one_token(model) and not scores_rows(model):
        raise ModelError(
            f"{name} picks one token of each row for its scores, and a rank of cp holds a part of the row: use cp=1, "
            "or parallelize its trunk (AutoModel), gather the hidden states, and apply the head to the token"
        )
    if (path := pooler(model)) is not None and facts.attends_both_ways:
        raise ModelError(
            f"{path} of {name} makes one vector of each row, and a rank of cp holds a part of the row: use cp=1, or "
            "build the model with add_pooling_layer=False and pool gathered hidden states"
        )
    reason = "decoder attends to an encoder" if is_encoder_decoder(facts.model) else facts.needs_full_row
    if reason is None and (path := facts.masks_embeddings) is not None:
        reason = f"{path} multiplies this rank's embeddings with the padding mask of the full row"
    if reason is not None:
        raise ModelError(f"{name} cannot run on a part of a row: its {reason}; use cp=1")
    if facts.attention not in ("sdpa", "eager"):
        raise ModelError(
            f"{name} computes attention by {facts.attention!r}: cp needs 'sdpa' or 'eager', as set by "
            "model.set_attn_implementation"
        )
    facts.require_known_positions("use cp=1")
    rope = rope_types(facts.text_config) & set(_LENGTH_DEPENDENT)
    if rope and not length_dependent_ropes(model):
        raise ModelError(
            f"{name} has rotary embeddings of type {', '.join(rope)}, and their frequencies depend on the longest "
            "position that a rank sees: use cp=1, or set rope_type to another one"
        )
    for mixer in replaced_attention(facts.token_mixers, facts.attention) if method == "ring" else ():
        dropout = attention_dropout(mixer.module)
        require_plain_attention(mixer.path, eager=facts.attention == "eager", dropout=dropout)


def check_heads_over_cp(facts: ModelFacts, plan: object, *, cp: int, tp: int) -> None:
    """Check that the ranks of ``cp`` divide the query heads that each rank of ``tp`` has."""
    for mixer in replaced_attention(facts.token_mixers, facts.attention):
        heads = query_heads(facts.structure, mixer)
        local = heads // tp if heads is not None and tp > 1 and is_sharded(mixer, plan) else heads
        if local is not None:
            require_heads(mixer.path, local, cp, over_tp="" if local == heads else f", {heads} over tp={tp}")


@dataclass(frozen=True)
class ContextParallel(Step[None]):
    """Make a model take its tokens sharded over ``cp``.

    Its forward then takes this rank's part of every input (see ``SequenceLayout.shard_batch``) and returns the outputs
    of this rank's tokens.  Router logits are returned for full rows, for an auxiliary loss.  Missing position ids are
    filled in.  ``attention_mask`` may also be the mask of the full sequence, which saves an all-gather.

    Args:
        method: how attention spans the ranks: ``"allgather"`` (keys and values are gathered), ``"ulysses"`` (heads are
            exchanged for sequence by all-to-all) or ``"ring"`` (keys and values circulate).
        load_balancer: the tokens that each rank holds: ``"headtail"`` (one chunk from either end) or ``None`` (one
            contiguous chunk); shard inputs with ``sequence_layout(mesh, length, load_balancer=...)``.
        attention: replace the model's attention; ``False`` for a model that calls ``ContextAttention`` itself.

    Raises:
        OptionError: a value is not allowed.
    """

    method: Method = "allgather"
    load_balancer: LoadBalancer = "headtail"
    attention: bool = True

    def __post_init__(self) -> None:
        require_one_of("context_parallel", self.method, get_args(Method))
        require_one_of("load_balancer", self.load_balancer, LOAD_BALANCERS)
        require_bool("attention", self.attention)

    def resolve(self, setup: Setup) -> Setup:
        """Remove the axis for a model that calls ``ContextAttention`` itself."""
        return setup if self.attention else replace(setup, meshes=replace(setup.meshes, cp=None))

    def check(self, setup: Setup) -> None:
        """Check that the modules that mix tokens are known, and that they can span the axis; collective over ``cp``."""
        if setup.meshes.cp is None:
            return
        check_context_parallel(setup.facts, self.method)
        if self.method == "ulysses":
            check_heads_over_cp(setup.facts, setup.plan, cp=setup.meshes.cp.size(), tp=setup.tp)
        verify_context_parallelism(self.load_balancer, setup, self._apply_to_copy)

    def prepare(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Run all token mixers but plain attention on full sequences; before layers are sharded."""
        facts, mesh = setup.facts, setup.meshes.cp
        if mesh is None:
            return
        # If no attention is replaced, another method would only build masks that model code cannot change.
        replaced = replaced_attention(facts.token_mixers, facts.attention)
        method = self.method if replaced else "allgather"
        attention = ContextAttention(mesh.get_group(), self.load_balancer, method)
        attention.eager = eager_function if facts.attention == "eager" else None
        attention.packed_sequences = setup.packed_sequences
        unmasked = facts.bidirectional_without_mask
        attention.unmasked = "" if unmasked is None else f"{unmasked.path} ({unmasked.kind})"
        mixers, state = gathered_mixers(facts.token_mixers, facts.attention), runtime_state(model)
        attention.kernels = state.attention = decide(setup, replaced, mixers, _KEYS[method])
        between = attend_between_layers(model, facts.token_mixers)
        state.gathered = attention, (*gather_for(mixers, attention), *between)
        runtime_state(facts.base_model).documents = attention.documents
        kinds = dict(Counter(mixer.kind for mixer in mixers)) or "none"
        logger.info("context parallelism: %d ranks by %s; other token mixers: %s", mesh.size(), self.method, kinds)

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Replace the attention, and complete the inputs of every forward."""
        if setup.meshes.cp is None:
            return
        attention, keep = runtime_state(model).gathered
        replace_attention(
            model,
            attention,
            keep=keep,
            shared_prefixes=setup.shared_prefixes,
            derived=setup.facts.derived_positions,
            cuts_padding=setup.facts.cuts_padding_mask,
        )

    def _apply_to_copy(self, model: nn.Module, setup: Setup) -> None:
        """Apply this step alone to a small copy with rows of single documents."""
        setup = replace(setup, facts=ModelFacts.of(model), steps=(), packed_sequences=False, shared_prefixes=False)
        self.prepare(model, setup, None)
        self.apply(model, setup, None)


def replace_attention(
    model: nn.Module,
    attention: ContextAttention,
    *,
    keep: Iterable[nn.Module] = (),
    shared_prefixes: bool = False,
    derived: DerivedPositions | None = None,
    cuts_padding: bool = False,
) -> None:
    """Replace a model's attention except in some modules, and complete its inputs in a hook."""
    name = f"context_parallel_{id(attention):x}"
    use_attention(model, name, attention.attend, attention.mask, keep=keep)
    base: Any = base_model(model)
    structure = inspect_model(model)
    head, media = structure.lm_head, media_of(model, structure)
    embedded = embedded_inputs(model)
    inputs = Inputs(attention, shared_prefixes, derived, cuts_padding, head, name, media, embedded)
    hook_model(model, "completes a rank's part of rows", inputs, inputs.end)
    if media is not None:
        hook_forward(model.get_submodule(structure.tree.root), "takes a rank's tokens", before=media.cut, first=True)
    if head is not None:
        hook_forward(model.get_submodule(head), KEEPS_OVER_CP, after=inputs.gather_kept)
    if scores_rows(base):
        hook_forward(base.score, "gathers scores", after=inputs.gather_scores)
        hook_forward(getattr(base, base.base_model_prefix), "takes a rank's tokens", before=inputs.own_tokens)
    for rope in length_dependent_ropes(model):
        hook_forward(rope, "sees the longest position", before=inputs.add_longest, after=inputs.drop_longest)
    refuse_attention_maps(model, "cp")
    for module in filter(is_transformers_model, model.modules()):
        if "router_logits" in recorded_outputs(module):
            hook_forward(module, "gathers router logits", after=inputs.gather_router_logits)


def attention_of(model: nn.Module) -> ContextAttention:
    """Return the attention that :class:`ContextParallel` gave a model."""
    return inputs_of(model).attention


def inputs_of(model: nn.Module) -> Inputs:
    """Return the hook by which :class:`ContextParallel` completes a model's inputs."""
    hook = next(_hooks(model), None)
    if hook is None:
        name = type(model).__name__
        raise ModelError(f"{name} is not under context parallelism: parallelize it on a mesh with cp > 1")
    return hook


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Let every rank of ``cp`` run a model on full rows, with caches, inside the ``with``.

    For ``generate``: ranks of ``cp`` compute the same.  A backward inside would count its gradients on every rank.
    """
    attentions = [hook.attention for hook in _hooks(model)]
    for attention in attentions:
        attention.whole_rows = True
    try:
        yield
    finally:
        for attention in attentions:
            attention.whole_rows = False


def under_context_parallelism(model: nn.Module) -> bool:
    """Return True if :class:`ContextParallel` was applied to the model."""
    return any(_hooks(model))


def _hooks(model: nn.Module) -> Iterator[Inputs]:
    return (hook for hook in forward_pre_hooks(model) if isinstance(hook, Inputs))
