"""Attention over a sequence that is split over ranks: keys and values are gathered, queries stay.

Each rank computes its own queries' rows against the whole sequence (all-gather context parallelism, Llama 3,
arXiv:2407.21783, section 3.3.2), so any mask works, on any device, and with grouped-query attention what travels is
small.  Without a mask no work above the diagonal is done and no mask is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from fsdp_runtime._torch_compat import all_gather_flat, causal_bias, reduce_scatter_flat
from fsdp_runtime.errors import ModelError
from fsdp_runtime.parallel.context.sharding import LoadBalancer, SequenceLayout


@dataclass
class ContextAttention:
    """One model's attention over a context-parallel axis.

    Args:
        group: the ranks of the axis.
        load_balancer: the tokens that each rank holds, see ``SequenceLayout``.
        masked: whether the batch at hand has padding; decided once a forward, without looking at values.
        documents: ``[batch, seq]``, the number of each token's document in a packed batch, else ``None``.
        ring: whether torch's ring is in force, which takes local tokens.
    """

    group: ProcessGroup
    load_balancer: LoadBalancer
    masked: bool = False
    documents: Tensor | None = None
    ring: bool = False

    def layout(self, local_length: int) -> SequenceLayout:
        """The layout of sequences of which this rank holds ``local_length`` tokens."""
        ranks = dist.get_world_size(self.group)
        return SequenceLayout(local_length * ranks, ranks, dist.get_rank(self.group), self.load_balancer)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention as ``transformers.AttentionInterface`` wants it.

        Args:
            module: the attention module.
            query: ``[batch, heads, seq / cp, dim]``, this rank's tokens.
            key: ``[batch, kv_heads, seq / cp, dim]``.
            value: ``[batch, kv_heads, seq / cp, value_dim]``.
            attention_mask: ``[batch, 1, seq / cp, seq]`` from :meth:`mask`, or ``None`` for a causal one.
            dropout: the probability of dropping a weight.
            scaling: what scores are multiplied by.
            is_causal: whether ``None`` for a mask means a causal one; by default what the module says.
            options: anything else, as a sliding window, which the mask has already.

        Returns:
            ``[batch, seq / cp, heads, value_dim]``, and no weights.
        """
        if key.shape[2] != query.shape[2]:
            raise ModelError(
                f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]}: only self-attention "
                "without a cache can be split over cp"
            )
        if any(options.get(name) is not None for name in ("position_bias", "s_aux", "softcap")):
            raise ModelError(f"{type(module).__name__} adds to its scores what torch's attention cannot: use cp=1")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        shared: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
        if self.ring and attention_mask is None and causal:
            return _ring(query, key, value, shared), None
        layout = self.layout(query.shape[2])
        key, value = gather_sequence([key, value], layout, self.group)
        shared["enable_gqa"] = key.shape[1] != query.shape[1]
        if attention_mask is not None or not causal:
            output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **shared)
        else:
            output = _causal(query, key, value, layout, shared)
        return output.transpose(1, 2).contiguous(), None

    def mask(
        self, *, q_length: int, mask_function: Any, attention_mask: Tensor | None, **options: Any
    ) -> Tensor | None:
        """A mask as ``transformers.AttentionMaskInterface`` wants it; ``None`` where it is causal and nothing else.

        Args:
            q_length: this rank's tokens.
            mask_function: of batch, head, query and key index, these two in the whole sequence.
            attention_mask: ``[batch, seq]``, false where a token is padding.
            options: the rest of the interface.
        """
        from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask

        skip = options.pop("allow_is_causal_skip", True)
        if skip and mask_function is causal_mask_function and not self.masked and self.documents is None:
            return None
        if (documents := self.documents) is not None:
            mask_function = and_masks(mask_function, lambda b, h, q, k: documents[b, q] == documents[b, k])
        # The offset turns the numbers of this rank's tokens into their positions.
        positions = self.layout(q_length).positions.to(options["device"])
        options["q_offset"] = positions - torch.arange(q_length, device=positions.device)
        return sdpa_mask(
            q_length=q_length,
            mask_function=mask_function,
            attention_mask=attention_mask if self.masked else None,
            allow_is_causal_skip=False,
            **options,
        )


def gather_sequence(parts: list[Tensor], layout: SequenceLayout, group: ProcessGroup) -> list[Tensor]:
    """The tokens of all ranks in sequence order, of several tensors by one all-gather.

    Backward sums the gradients of all ranks and gives each its own tokens', by one reduce-scatter.

    Args:
        parts: tensors ``[batch, heads, seq / cp, *]`` alike but for the last dim.
        layout: where each token belongs.
        group: the ranks.

    Returns:
        The same tensors with all ``seq`` tokens.
    """
    gathered: Tensor = _Gather.apply(torch.cat(parts, dim=-1), layout, group)  # type: ignore[no-untyped-call]
    return list(torch.split(gathered, [part.shape[-1] for part in parts], dim=-1))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
        first = local.movedim(2, 0).contiguous()
        everyone = first.new_empty(layout.length, *first.shape[1:])
        all_gather_flat(everyone.view(-1), first.view(-1), group).wait()
        ctx.group = group
        ctx.permutation = layout.permutation.to(local.device)
        return everyone.index_select(0, ctx.permutation.argsort()).movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        by_rank = gradients[0].movedim(2, 0).index_select(0, ctx.permutation)
        own = by_rank.new_empty(len(by_rank) // dist.get_world_size(ctx.group), *by_rank.shape[1:])
        reduce_scatter_flat(own.view(-1), by_rank.view(-1), ctx.group).wait()
        return own.movedim(0, 2), None, None


def _causal(query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, shared: dict[str, Any]) -> Tensor:
    """Each run of queries against the keys up to its end."""
    run = query.shape[2] // layout.chunks_per_rank
    outputs = []
    for index, chunk in enumerate(layout.chunks):
        queries, end = query.narrow(2, index * run, run), (chunk + 1) * run
        bias = causal_bias(run, end, query.device)
        outputs.append(
            scaled_dot_product_attention(queries, key[:, :, :end], value[:, :, :end], attn_mask=bias, **shared)
        )
    return torch.cat(outputs, dim=2)


def _ring(query: Tensor, key: Tensor, value: Tensor, shared: dict[str, Any]) -> Tensor:
    """Through torch's name for attention, which its ring replaces; it knows no grouped heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, **shared)
    return output.transpose(1, 2).contiguous()
