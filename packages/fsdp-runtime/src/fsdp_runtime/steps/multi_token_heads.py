"""Multi-token heads as further blocks of a decoder, trained beside it.

A head is a block of the decoder with a projection of an embedding and a hidden state in front, and a norm behind
(DeepSeek-V3, arXiv:2412.19437, section 2.2).  The trunk's forward of transformers stops at ``num_hidden_layers``, so
further blocks in its list do not change it.  Plans, FSDP2, checkpointing and loads see them as blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from fsdp_runtime.steps.documents.isolation import map_full
from fsdp_runtime.wrap import Wrapper, hook_forward, hook_model, wrap


@dataclass(frozen=True)
class HeadLayout:
    """The checkpoint's names of a head, and the kind of its block."""

    #: Renamings from a checkpoint, applied in turn; ``{head}`` is the prefix in the model, ``{depth}`` counts from 0.
    prefixes: Mapping[str, str] = field(default_factory=dict)
    attention: str | None = "full_attention"  # the block's entry in ``layer_types``; ``None``: the config states it
    mlp: str = "sparse"  # and in ``mlp_layer_types``
    several: bool = True

    def renamings(self, heads: Mapping[int, str]) -> dict[str, str]:
        """Return the renamings of heads by their depth and their prefix in the model."""
        return {
            source.format(depth=depth, head=head): target.format(depth=depth, head=head)
            for depth, head in heads.items()
            for source, target in self.prefixes.items()
        }

    def types(self, config: Any, count: int) -> dict[str, list[str]]:
        """Return the types of ``count`` heads in the lists of a config; its own fields for heads take precedence."""
        attention = getattr(config, "mtp_layer_types", None) or ([self.attention] * count if self.attention else [])
        mlp = getattr(config, "mtp_mlp_layer_types", None) or [self.mlp] * count
        if len(attention) < count or len({*attention[:count]}) > 1:
            raise ModelError(
                f"{count} multi-token heads of {config.model_type} with mtp_layer_types={attention}: give the config "
                "mtp_layer_types with the same type for each head, such as ['full_attention']"
            )
        return {"layer_types": attention[:count], "mlp_layer_types": mlp[:count], "indexer_types": ["full"] * count}


_NORM_BEHIND = {"{head}final_layernorm.": "{head}shared_head.norm."}
_BLOCKS = HeadLayout()
_BLOCKS_WITH_NORM = HeadLayout(_NORM_BEHIND)
_QWEN_NAMES = {
    "mtp.layers.0.": "{head}",
    "mtp.fc.": "{head}eh_proj.",
    "mtp.pre_fc_norm_embedding.": "{head}enorm.",
    "mtp.pre_fc_norm_hidden.": "{head}hnorm.",
    "mtp.norm.": "{head}shared_head.norm.",
}
_QWEN = HeadLayout(_QWEN_NAMES, several=False)
_INDEXED = HeadLayout(attention="indexed_attention")
_MIMO_NAMES = {
    "model.mtp.layers.{depth}.": "{head}",
    "{head}pre_mlp_layernorm.": "{head}post_attention_layernorm.",
    **_NORM_BEHIND,
}

#: By ``model_type``.
LAYOUTS: Mapping[str, HeadLayout] = {
    "bailing_hybrid": _BLOCKS_WITH_NORM,
    "deepseek_v3": _BLOCKS,
    "deepseek_v32": _INDEXED,
    "exaone_moe": HeadLayout(_QWEN_NAMES, attention=None, mlp="dense", several=False),
    "glm4_moe": _BLOCKS,
    "glm4_moe_lite": _BLOCKS,
    "glm_moe_dsa": _INDEXED,
    "hy_v3": _BLOCKS_WITH_NORM,
    "mellum": HeadLayout(_QWEN_NAMES, "sliding_attention", several=False),
    "mimo_v2_flash": HeadLayout(_MIMO_NAMES, "sliding_attention", "dense"),
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": _QWEN,
}
#: Reasons against training the heads of other families.
REFUSED: Mapping[str, str] = {
    "deepseek_v4": "its heads mix the streams of hyper-connections",
    "ernie4_5_moe": "its heads share the trunk's last norm in training, and engines apply no norm",
    "inkling_text": "its trunk runs every block of its list",
    "longcat_flash": "its heads are dense blocks, which its decoder's class does not build",
    "nemotron_h": "its trunk runs every block of its list, and a head is two blocks",
    "sarvam_mla": "its checkpoints have none",
    "sarvam_moe": "its checkpoints have none",
}


class MultiTokenHeads:
    """Train the heads of a decoder that predict further tokens: head ``k`` predicts the token ``k + 1`` places ahead.

    Build it before ``parallelize``, and load weights afterwards: the heads become blocks of the model, with the values
    of the checkpoint's heads, and are saved and streamed under its names.  They run in forwards with gradients or with
    ``labels``, on the trunk's normed states, with the model's embedding and LM head.  Add their loss to the model's.
    Packed documents do not see one another, and a target in another document does not count.

    Args:
        model: a causal language model of transformers: of DeepSeek-V3 and V3.2, GLM-4.5 to 5, Qwen3-Next, Qwen3.5,
            MiMo-V2-Flash, K-EXAONE, Hy3, Ling 2.5 or Mellum.
        count: the number of heads; the config's by default, 1 where it states none.
        detach: train the heads alone: trunk, embedding and LM head get no gradient from their loss.
        loss_scaling_factor: the weight of the heads' loss in a trainer of ``fsdp_runtime.trainers``.

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

    def __init__(
        self,
        model: nn.Module,
        count: int | None = None,
        *,
        detach: bool = False,
        loss_scaling_factor: float | None = None,
    ) -> None:
        base = base_model(model)
        config: Any = getattr(base, "config", None)
        kind = str(getattr(config, "model_type", None))
        layout = _head_layout(kind if calls_loss_function(base) else "", type(base).__name__)
        if runtime_state(base).multi_token:
            raise ModelError(f"{type(base).__name__} has multi-token heads already: use them, or a fresh model")
        if any(isinstance(parameter, DTensor) for parameter in base.parameters()):
            raise ModelError(f"{type(base).__name__} is parallelized: add multi-token heads before parallelize")
        stated = (getattr(config, name, None) for name in ("num_mtp_layers", "num_nextn_predict_layers"))
        count = next(filter(None, stated), 1) if count is None else count
        if count < 1 or (count > 1 and not layout.several):
            raise OptionError(f"count={count}: {kind} has 1 head{' or more' if layout.several else ''}")
        types = layout.types(config, count)
        self.detach, self.loss_scaling_factor, self._base = detach, loss_scaling_factor, base
        #: The states of each head, ``[batch, seq, features]``, of the last forward; the LM head gives its logits.
        self.hidden_states: list[Tensor] = []
        #: The mean of the heads' losses in the last forward, ``None`` without ``labels``.
        self.loss: Tensor | None = None
        #: The divisor of the heads' summed losses, for forwards without ``num_items_in_batch``.
        self.num_items_in_batch: Tensor | int | None = None
        self._inputs: dict[str, Any] = {}
        self._arguments: dict[str, Any] = {}
        trunk = base.get_decoder()
        lender = _lender(trunk.layers, config, types["layer_types"][0])
        first = len(trunk.layers)
        with longer_config(config, types, count):
            for index in range(first, first + count):
                head = initial_head(base, lender, trunk.layers, index)
                wrap([head], _Head)
                trunk.layers.append(head)
        prefixes = {depth: f"{base.base_model_prefix}.layers.{first + depth}." for depth in range(count)}
        rename_in_checkpoints(base, layout.renamings(prefixes))
        runtime_state(base).multi_token, runtime_state(base).multi_token_heads = count, self
        if hasattr(config, "num_mtp_layers"):
            config.num_mtp_layers = count
        hook_forward(lender, "lends its arguments to multi-token heads", before=self._lend)
        hook_forward(trunk, "runs multi-token heads", before=self._take, after=self._run)
        hook_model(model, "gives labels to multi-token heads", self._begin)

    def _begin(self, _module: nn.Module, _args: Any, kwargs: Any) -> None:
        self.hidden_states, self.loss, self._arguments = [], None, {}
        items = kwargs.get("num_items_in_batch", self.num_items_in_batch)
        self._inputs = {"labels": kwargs.get("labels"), "num_items_in_batch": items}

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
        documents = runtime_state(self._base).documents
        if documents is not None and documents.current is not None:
            numbers = documents.current.numbers
            ends = numbers != pad(numbers[:, depth + 1 :], (0, depth + 1))
            targets = targets.masked_fill(ends if rows is None else rows.layout.shard(ends), -100)
        with _frozen(self._base.get_output_embeddings(), self.detach):
            logits = self._base.get_output_embeddings()(hidden)
        options = {"vocab_size": self._base.config.vocab_size, "shift_labels": targets, "num_items_in_batch": items}
        loss: Tensor = self._base.loss_function(logits, labels, **options)
        return loss


class _Head(Wrapper):
    effect = "is a multi-token head"

    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Module
    shared_head: Any

    def forward(self, hidden: Tensor, embedded: Tensor, **arguments: Any) -> Tensor:
        """Return the states ``[batch, seq, features]`` of a head from the states before it and the next embeddings."""
        output = super().forward(map_full(self._join, hidden, embedded), **arguments)  # type: ignore[misc]
        return map_full(self.shared_head.norm, output[0] if isinstance(output, tuple) else output)

    def _join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        joined: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return joined


def _head_layout(kind: str, name: str) -> HeadLayout:
    if kind in LAYOUTS:
        return LAYOUTS[kind]
    reason = f": {REFUSED[kind]}" if kind in REFUSED else ""
    raise ModelError(f"{name} has no known multi-token heads{reason}; known are {', '.join(LAYOUTS)}")


def _lender(blocks: nn.ModuleList, config: Any, attention: str) -> Any:
    """Return the last block with the heads' type of attention, which shares its masks and rotary embeddings."""
    types = getattr(config, "layer_types", None) or [attention] * len(blocks)
    for block, kind in reversed([*zip(blocks, types, strict=True)]):
        if kind == attention and hasattr(block, "self_attn"):
            return block
    raise ModelError(f"multi-token heads need a block of {attention}: layer_types={types} has none")


def _shifted(tokens: Tensor, places: int, rows: GlobalRows | None, filler: int) -> Tensor:
    """Return the tokens ``places`` further on in the full rows, for this rank's tokens."""
    share = None if rows is None else rows.layout.length // rows.layout.ranks
    full = tokens if rows is None or tokens.shape[1] != share else rows.full(tokens)
    shifted = pad(full[:, places:], (0, min(places, full.shape[1])), value=filler)
    return shifted if rows is None else rows.layout.shard(shifted)


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
