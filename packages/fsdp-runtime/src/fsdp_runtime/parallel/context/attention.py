"""Attention over a sequence sharded over ``cp``: keys and values are gathered, queries stay local.

Each rank computes the rows of its own queries against the full sequence (all-gather context parallelism, Llama 3,
arXiv:2407.21783, section 3.3.2).  So any mask works, on any device, and grouped-query attention keeps the messages
small.  Without a mask, scores above the diagonal are not computed and no mask is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from fsdp_runtime._torch_compat import all_gather_flat, causal_bias, reduce_scatter_flat
from fsdp_runtime._transformers_compat import is_causal_mask_function, sdpa_mask_of_documents
from fsdp_runtime.errors import ModelError
from fsdp_runtime.parallel.context.sharding import LoadBalancer, SequenceLayout
from fsdp_runtime.parallel.packing.documents import Documents
from fsdp_runtime.parallel.packing.run import CurrentDocuments


@dataclass
class ContextAttention:
    """The attention of one model over a context-parallel axis.

    Args:
        group: the ranks of the axis.
        load_balancer: the tokens that each rank holds, see ``SequenceLayout``.
        masked: the current batch has an attention mask; set once a forward, without reading values.
        padding: ``[batch, seq]``, that mask.
        documents: ``[batch, seq]``, the number of each token's document in a packed batch, else ``None``.
        positions: ``[batch, seq]``, each token's position in its document or on its path where ``documents`` or
            ``subtree_end`` is given, else ``None``.
        subtree_end: ``[batch, seq]`` of a row with shared prefixes (see ``TreeRow``), else ``None``.
        ring: torch's ring attention is active, which takes local tokens.
        eager: returns the model's own attention function for a class of modules, where that is to compute the scores
            instead of torch's function: with sinks, soft caps or biases.
        packed_sequences: rows may hold several documents, so that a mask of padding is refused beside position ids.
        packing: the documents of the current rows, for modules that run on full sequences.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import ContextAttention, MeshSpec
        >>> mesh = MeshSpec(cp=1).build(device_type="cpu")
        >>> attention = ContextAttention(mesh.get_group("cp"), load_balancer="headtail")
        >>> query = key = value = torch.ones(1, 2, 4, 8)  # [batch, heads, seq / cp, head_dim]
        >>> output, _ = attention.attend(nn.Identity(), query, key, value, attention_mask=None)
        >>> output.shape  # [batch, seq / cp, heads, head_dim]
        torch.Size([1, 4, 2, 8])
    """

    group: ProcessGroup
    load_balancer: LoadBalancer
    masked: bool = False
    padding: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None
    subtree_end: Tensor | None = None
    ring: bool = False
    eager: Callable[[type], Any] | None = None
    packed_sequences: bool = False
    packing: CurrentDocuments = field(default_factory=CurrentDocuments)
    _masks: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextAttention:
        """Return itself: a copied model's attention is registered by this one's functions."""
        return self

    def full_mask(self, rows: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the mask ``[batch, heads, seq, seq]`` of which each rank has the rows of its tokens; once a mask."""
        if id(rows) not in self._masks:
            plain = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
            self._masks[id(rows)] = rows, gather_tokens(plain, layout, self.group, dim=2).to(rows.dtype)
        return self._masks[id(rows)][1]

    def begin(self, *, padding: Tensor | None, documents: Documents | None) -> None:
        """Set what all layers of a forward share."""
        self.masked, self.padding, self.packing.documents = padding is not None, padding, documents
        self.documents = None if documents is None else documents.numbers
        self.positions = None if documents is None else documents.positions
        self._masks.clear()

    def layout(self, local_length: int) -> SequenceLayout:
        """Return the layout of sequences of which each rank holds ``local_length`` tokens."""
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
        """Compute attention with the signature of ``transformers.AttentionInterface``.

        Args:
            module: the attention module.
            query: ``[batch, heads, seq / cp, dim]``, this rank's tokens.
            key: ``[batch, kv_heads, seq / cp, dim]``.
            value: ``[batch, kv_heads, seq / cp, value_dim]``.
            attention_mask: ``[batch, 1, seq / cp, seq]`` from :meth:`mask`, or ``None`` for a causal one.
            dropout: the probability of dropping a weight.
            scaling: factor of the scores.
            is_causal: ``None`` for a mask means a causal one; by default the module's ``is_causal``.
            options: further keywords, such as a sliding window, which the mask already contains.

        Returns:
            ``[batch, seq / cp, heads, value_dim]``, and ``None`` for the weights.

        Raises:
            ModelError: queries and keys differ in length, or the module needs scores that torch's function cannot
                compute.
        """
        if key.shape[2] != query.shape[2]:
            raise ModelError(
                f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]}: only self-attention "
                "without a cache can be sharded over cp"
            )
        eager = None if self.eager is None else self.eager(type(module))
        if eager is not None:
            key, value = gather_keys_and_values([key, value], self.layout(query.shape[2]), self.group)
            options |= {"dropout": dropout, "scaling": scaling}
            output, _ = eager(module, query, key, value, attention_mask, **options)
            return output, None
        if any(options.get(name) is not None for name in ("position_bias", "s_aux", "softcap")):
            raise ModelError(
                f"{type(module).__name__} changes scores in a way that scaled_dot_product_attention cannot: use cp=1"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        shared: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
        if self.ring and attention_mask is None and causal:
            return _ring(query, key, value, shared), None
        layout = self.layout(query.shape[2])
        key, value = gather_keys_and_values([key, value], layout, self.group)
        shared["enable_gqa"] = key.shape[1] != query.shape[1]
        if attention_mask is not None or not causal:
            output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **shared)
        else:
            output = _causal(query, key, value, layout, shared)
        return output.transpose(1, 2).contiguous(), None

    def mask(
        self, *, q_length: int, mask_function: Any, attention_mask: Tensor | None, **options: Any
    ) -> Tensor | None:
        """Build a mask with the signature of ``transformers.AttentionMaskInterface``.

        Args:
            q_length: number of local tokens.
            mask_function: of batch, head, query and key index, the last two in the full sequence.
            attention_mask: ``[batch, seq]``, false where a token is padding.
            options: the remaining keywords of the interface.

        Returns:
            ``[batch, 1, seq / cp, seq]`` bool, or ``None`` for a plain causal mask.
        """
        skip = options.pop("allow_is_causal_skip", True) and self.eager is None
        whole_rows = not self.masked and self.documents is None and self.subtree_end is None
        if skip and is_causal_mask_function(mask_function) and whole_rows:
            return None
        options.pop("q_offset", None)  # of contiguous queries
        positions = self.layout(q_length).positions.to(options["device"])
        options["q_offset"] = positions - torch.arange(q_length, device=positions.device)  # from indices to positions
        mask = sdpa_mask_of_documents(
            q_length=q_length,
            mask_function=mask_function,
            documents=self.documents,
            positions=self.positions,
            subtree_end=self.subtree_end,
            attention_mask=attention_mask if self.masked else None,
            **options,
        )
        if mask is None or self.eager is None:
            return mask
        dtype = options["dtype"]
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def gather_keys_and_values(parts: list[Tensor], layout: SequenceLayout, group: ProcessGroup) -> list[Tensor]:
    """All-gather several tensors over ``cp`` in sequence order, by one collective.

    Backward sums the gradients of all ranks and returns each rank's own tokens, by one reduce-scatter.

    Args:
        parts: tensors ``[batch, heads, seq / cp, *]`` that differ in the last dim only.
        layout: the position of each token.
        group: the ranks of ``cp``.

    Returns:
        The same tensors as ``[batch, heads, seq, *]``.
    """
    gathered: Tensor = _Gather.apply(torch.cat(parts, dim=-1), layout, group)  # type: ignore[no-untyped-call]
    return list(torch.split(gathered, [part.shape[-1] for part in parts], dim=-1))


def gather_tokens(local: Tensor, layout: SequenceLayout, group: ProcessGroup, *, dim: int) -> Tensor:
    """All-gather the tokens on ``dim`` of a tensor in sequence order, without gradient."""
    first = local.movedim(dim, 0).contiguous()
    by_rank = first.new_empty(layout.length, *first.shape[1:])
    all_gather_flat(by_rank.view(-1), first.view(-1), group).wait()
    return by_rank.index_select(0, layout.permutation.to(local.device).argsort()).movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.permutation = group, layout.permutation.to(local.device)
        return gather_tokens(local, layout, group, dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        by_rank = gradients[0].movedim(2, 0).index_select(0, ctx.permutation)
        local = by_rank.new_empty(len(by_rank) // dist.get_world_size(ctx.group), *by_rank.shape[1:])
        reduce_scatter_flat(local.view(-1), by_rank.view(-1), ctx.group).wait()
        return local.movedim(0, 2), None, None


def _causal(query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, shared: dict[str, Any]) -> Tensor:
    """Attend from each contiguous chunk of queries to the keys up to its end."""
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
    """Call torch's function by its public name, which its ring replaces; the ring has no grouped-query attention."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, **shared)
    return output.transpose(1, 2).contiguous()
