"""Multi-token heads as further blocks of a decoder, trained beside it.

A head is a block of the decoder with a projection of an embedding and a hidden state in front, and a norm behind
(DeepSeek-V3, arXiv:2412.19437, section 2.2).  The trunk's forward of transformers stops at ``num_hidden_layers``, so
further blocks in its list do not change it.  Plans, FSDP2, checkpointing and loads see them as blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat.conversions import rename_in_checkpoints
from fsdp_runtime._transformers_compat.initialization import initial_head, longer_config
from fsdp_runtime._transformers_compat.models import calls_loss_function
from fsdp_runtime.errors import LayoutError, ModelError, OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps.context.outputs import GlobalRows
from fsdp_runtime.steps.context.step import inputs_of, under_context_parallelism
from fsdp_runtime.steps.documents.documents import Documents
from fsdp_runtime.wrap import Wrapper, hook_forward, hook_model, wrap

#: Prefixes in checkpoints of Qwen, by prefixes in a head.
_QWEN = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
#: Prefixes by ``model_type``; none for blocks beyond the last one with a head's names.
_PREFIXES: dict[Any, dict[str, str]] = {
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}


class MultiTokenHeads:
    """Train the heads of a decoder that predict further tokens: head ``k`` predicts the token ``k + 1`` places ahead.

    Build it before ``parallelize``, and load weights afterwards: the heads become blocks of the model, with the values
    of the checkpoint's heads, and are saved and streamed under its names.  They run in forwards with gradients or with
    ``labels``, on the trunk's normed states, with the model's embedding and LM head.  Add their loss to the model's.
    Packed documents do not see one another, and a target in another document does not count.

    Args:
        model: a causal language model of transformers: DeepSeek-V3, GLM-4.5 and later, Qwen3-Next, Qwen3.5.
        count: the number of heads; the config's by default, 1 where it states none.
        detach: train the heads alone: trunk, embedding and LM head get no gradient from their loss.

    Raises:
        ModelError: the names of the class's heads are unknown, or the model has heads or is parallelized already.
        OptionError: ``count`` is below 1.

    Example:
        >>> import torch, transformers
        >>> from fsdp_runtime.steps import MultiTokenHeads
        >>> config = transformers.Glm4MoeConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        ... )
        >>> model = transformers.Glm4MoeForCausalLM(config)
        >>> heads = MultiTokenHeads(model)
        >>> rows = torch.randint(32, (2, 5))
        >>> loss = model(rows, labels=rows, use_cache=False).loss + 0.3 * heads.loss
        >>> [tuple(hidden.shape) for hidden in heads.hidden_states]
        [(2, 5, 16)]
    """

    def __init__(self, model: nn.Module, count: int | None = None, *, detach: bool = False) -> None:
        base = base_model(model)
        config: Any = getattr(base, "config", None)
        kind = getattr(config, "model_type", None)
        if kind not in _PREFIXES or not calls_loss_function(base):
            raise ModelError(f"{type(base).__name__} has no known multi-token heads: known are {', '.join(_PREFIXES)}")
        if runtime_state(base).multi_token:
            raise ModelError(f"{type(base).__name__} has multi-token heads already: use them, or a fresh model")
        if any(isinstance(parameter, DTensor) for parameter in base.parameters()):
            raise ModelError(f"{type(base).__name__} is parallelized: add multi-token heads before parallelize")
        count = getattr(config, "num_mtp_layers", None) or 1 if count is None else count
        if count < 1 or (count > 1 and _PREFIXES[kind]):
            raise OptionError(f"count={count}: {kind} has 1 head{'' if _PREFIXES[kind] else ' or more'}")
        self.detach, self._base = detach, base
        #: The states of each head, ``[batch, seq, features]``, of the last forward; the LM head gives its logits.
        self.hidden_states: list[Tensor] = []
        #: The mean of the heads' losses in the last forward, ``None`` without ``labels``.
        self.loss: Tensor | None = None
        self._inputs: dict[str, Any] = {}
        self._arguments: dict[str, Any] = {}
        trunk = base.get_decoder()
        lender, head = _append(base, trunk.layers, count), f"{base.base_model_prefix}.layers.{len(trunk.layers) - 1}."
        rename_in_checkpoints(base, {prefix: head + inside for prefix, inside in _PREFIXES[kind].items()})
        runtime_state(base).multi_token = count
        if hasattr(config, "num_mtp_layers"):
            config.num_mtp_layers = count
        hook_forward(lender, "lends its arguments to multi-token heads", before=self._lend)
        hook_forward(trunk, "runs multi-token heads", before=self._take, after=self._run)
        hook_model(model, "gives labels to multi-token heads", self._begin)

    def _begin(self, _module: nn.Module, _args: Any, kwargs: Any) -> None:
        self.hidden_states, self.loss, self._arguments = [], None, {}
        self._inputs = {name: kwargs.get(name) for name in ("labels", "num_items_in_batch")}

    def _lend(self, _block: nn.Module, _args: Any, kwargs: Any) -> None:
        self._arguments = {**kwargs, "cache": None, "use_cache": False}

    def _take(self, _trunk: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs["input_ids"] = args[0] if args else kwargs.get("input_ids")

    def _run(self, trunk: Any, _args: Any, output: Any) -> None:
        """Run the heads inside the model's forward, while FSDP2 has its embedding and LM head gathered."""
        arguments, self._arguments = self._arguments, {}
        inputs, self._inputs = self._inputs, {}
        ids, labels = inputs.get("input_ids"), inputs.get("labels")
        if labels is None and not torch.is_grad_enabled():
            return
        if "labels" not in inputs:
            raise ModelError("the forward of the model with multi-token heads was passed by: call it, or its PeftModel")
        if ids is None:
            raise LayoutError("multi-token heads embed the next tokens: give input_ids, not inputs_embeds")
        rows = inputs_of(self._base).rows if under_context_parallelism(self._base) else None
        hidden, losses = output.last_hidden_state, []
        hidden = hidden.detach() if self.detach else hidden
        for depth, head in enumerate(trunk.layers[self._base.config.num_hidden_layers :], start=1):
            embedded = self._base.get_input_embeddings()(_shifted(ids, depth, rows, 0))
            hidden = head(hidden, embedded.detach() if self.detach else embedded, **arguments)
            self.hidden_states.append(hidden)
            if labels is not None:
                losses.append(self._loss(hidden, labels, depth, rows, inputs["num_items_in_batch"]))
        self.loss = torch.stack(losses).mean() if losses else None

    def _loss(self, hidden: Tensor, labels: Tensor, depth: int, rows: GlobalRows | None, items: Any) -> Tensor:
        targets = _shifted(labels, depth + 1, rows, -100)
        documents = _documents(self._base)
        if documents is not None:
            numbers = documents.numbers
            ends = numbers != pad(numbers[:, depth + 1 :], (0, depth + 1))
            targets = targets.masked_fill(ends if rows is None else rows.layout.shard(ends), -100)
        with _frozen(self._base.get_output_embeddings(), self.detach):
            logits = self._base.get_output_embeddings()(hidden)
        options = {"vocab_size": self._base.config.vocab_size, "shift_labels": targets, "num_items_in_batch": items}
        loss: Tensor = self._base.loss_function(logits, labels, **options)
        return loss


class _Head(Wrapper):
    """Mixed in before the class of a decoder's block."""

    effect = "is a multi-token head"

    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Module
    shared_head: Any

    def forward(self, hidden: Tensor, embedded: Tensor, **arguments: Any) -> Tensor:
        """Return the states ``[batch, seq, features]`` of a head from the states before it and the next embeddings."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output = super().forward(joined, **arguments)  # type: ignore[misc]  # of the block's class
        states: Tensor = self.shared_head.norm(output[0] if isinstance(output, tuple) else output)
        return states


def _append(base: Any, blocks: nn.ModuleList, count: int) -> nn.Module:
    """Append heads to a decoder's blocks, and return the last earlier block with attention."""
    last = next(block for block in reversed(blocks) if hasattr(block, "self_attn"))
    with longer_config(base.config, count):
        for index in range(len(blocks), len(blocks) + count):
            head = initial_head(base, last, base.config, index)
            wrap([head], _Head)
            blocks.append(head)
    return last


def _shifted(tokens: Tensor, places: int, rows: GlobalRows | None, filler: int) -> Tensor:
    """Return the tokens ``places`` further on in the full rows, for this rank's tokens."""
    share = None if rows is None else rows.layout.length // rows.layout.ranks
    full = tokens if rows is None or tokens.shape[1] != share else rows.full(tokens)
    shifted = pad(full[:, places:], (0, min(places, full.shape[1])), value=filler)
    return shifted if rows is None else rows.layout.shard(shifted)


def _documents(base: nn.Module) -> Documents | None:
    """Return the documents of the current rows."""
    if under_context_parallelism(base):
        return inputs_of(base).attention.documents.current
    documents = runtime_state(base).documents
    return None if documents is None else documents.current


@contextmanager
def _frozen(module: nn.Module, freeze: bool) -> Iterator[None]:
    """Let a module's parameters get no gradients from a call inside the ``with``."""
    trained = [parameter for parameter in module.parameters() if freeze and parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
