"""Attention over packed rows, and over a sequence sharded over ``cp`` by one of three methods.

``"allgather"``: keys and values are gathered, and each rank computes the rows of its queries against the full
sequence (Llama 3, arXiv:2407.21783, section 3.3.2).  So any mask works, on any device, and grouped-query attention
keeps the messages small.  Without a mask, scores above the diagonal are not computed and no mask is built.

``"ulysses"`` exchanges heads for sequence (see ``ulysses``), and ``"ring"`` passes keys and values from rank to rank
(see ``ring``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from fsdp_runtime._torch_compat import causal_bias, has_flash_attention
from fsdp_runtime._transformers_compat.attention import attend_alone, mask_alone
from fsdp_runtime._transformers_compat.masks import (
    is_causal_mask_function,
    mask_of_rows,
    pattern_of,
    sdpa_mask_between,
)
from fsdp_runtime.errors import LayoutError, ModelError
from fsdp_runtime.steps.attention.decision import AttentionKernels
from fsdp_runtime.steps.attention.kernels import attend, kernel_of, prepared
from fsdp_runtime.steps.attention.segments import rows_as_documents
from fsdp_runtime.steps.context.exchange import gather_keys_and_values, gather_tokens
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.methods import Method, require_plain_attention
from fsdp_runtime.steps.context.ring import attend_around, attend_to_prefixes
from fsdp_runtime.steps.context.sharding import LoadBalancer, SequenceLayout
from fsdp_runtime.steps.context.ulysses import OwnHeads, attend_over_heads
from fsdp_runtime.steps.documents.documents import Documents
from fsdp_runtime.steps.documents.isolation import CurrentDocuments
from fsdp_runtime.values import require_one_of


@dataclass
class ContextAttention:
    """The attention of one model over a context-parallel axis, or over packed rows.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec
        >>> from fsdp_runtime.steps import ContextAttention
        >>> mesh = MeshSpec(cp=1).build(device_type="cpu")
        >>> attention = ContextAttention(mesh.get_group("cp"), load_balancer="headtail")
        >>> query = key = value = torch.ones(1, 2, 4, 8)  # [batch, heads, seq / cp, head_dim]
        >>> output, _ = attention.attend(nn.Identity(), query, key, value, attention_mask=None)
        >>> output.shape  # [batch, seq / cp, heads, head_dim]
        torch.Size([1, 4, 2, 8])
    """

    group: Any  # a ``ProcessGroup``, the ranks of the axis; ``None`` for full rows on every rank
    load_balancer: LoadBalancer  # the tokens that each rank holds, see ``SequenceLayout``
    # how queries meet the keys of other ranks: ``"allgather"``, ``"ulysses"`` or ``"ring"``
    context_parallel: Method = "allgather"
    masked: bool = False  # the current batch has an attention mask; set once per forward, without reading values
    padding: Tensor | None = None  # ``[batch, seq]``, that mask
    documents: CurrentDocuments = field(default_factory=CurrentDocuments)  # the documents of the current rows
    # ``[batch, seq]``, each token's position in its document or on its path where ``documents`` or ``subtree_end`` is
    # given, else ``None``
    positions: Tensor | None = None
    subtree_end: Tensor | None = None  # ``[batch, seq]`` of a row with shared prefixes (see ``TreeRow``), else ``None``
    # returns the model's attention function for a class of modules.  It computes the scores instead of torch's
    # function: with sinks, soft caps or biases
    eager: Callable[[type], Any] | None = None
    packed_sequences: bool = False  # rows may hold several documents, so a padding mask is refused beside position ids
    unmasked: str = ""  # a module that attends to later tokens and takes no mask of documents, else ``""``
    whole_rows: bool = False  # every rank computes full rows alone, with caches; see ``whole_rows`` of ``step``
    # the kernels that compute attention over documents and windows without a mask; none by default
    kernels: AttentionKernels = field(default_factory=AttentionKernels)
    _masks: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _made_masks: bool = False  # in this forward
    #: By the length of a rank's part, in a forward that :meth:`begin` has announced.
    _layouts: dict[int, SequenceLayout] | None = None

    def __post_init__(self) -> None:
        require_one_of("context_parallel", self.context_parallel, get_args(Method))

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextAttention:
        """Return itself: a copied model's attention is registered with the functions of this object."""
        return self

    def full_mask(self, rows: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the mask ``[batch, heads, seq, seq]``; each rank has the rows of its tokens.  One all-gather per mask.

        Raises:
            LayoutError: :meth:`mask` has made no mask in this forward, so that the rows may belong to the tokens of
                another rank.
        """
        if not self._made_masks:
            raise LayoutError(
                f"a mask {tuple(rows.shape)} that does not come from transformers' mask functions: its rows may "
                "belong to the first tokens on every rank; use cp=1"
            )
        if id(rows) not in self._masks:
            plain = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
            self._masks[id(rows)] = rows, gather_tokens(plain, layout, self.group, dim=2).to(rows.dtype)
        return self._masks[id(rows)][1]

    def begin(self, *, padding: Tensor | None, documents: Documents | None) -> None:
        """Set the state that all layers of a forward share."""
        self.masked, self.padding, self.documents.current = padding is not None, padding, documents
        self.positions = None if documents is None else documents.positions
        self._masks.clear()
        self._made_masks, self._layouts = False, {}

    def layout(self, local_length: int) -> SequenceLayout:
        """Return the layout of sequences with ``local_length`` tokens on each rank."""
        cache = None if torch.compiler.is_compiling() else self._layouts
        if cache is not None and local_length in cache:
            return cache[local_length]
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        rank = 0 if self.group is None else dist.get_rank(self.group)
        layout = SequenceLayout(local_length * ranks, ranks, rank, self.load_balancer)
        if cache is not None:
            cache[local_length] = layout
        return layout

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | SequenceMask | None,
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
            attention_mask: from :meth:`mask`, or ``None`` for a causal mask.
            dropout: the probability of dropping a weight.
            scaling: factor of the scores.
            is_causal: ``None`` for a mask means a causal mask; by default the module's ``is_causal``.
            options: further keywords, such as a sliding window, which the mask already contains.

        Returns:
            ``[batch, seq / cp, heads, value_dim]``, and ``None`` for the weights.

        Raises:
            ModelError: queries and keys differ in length, the module needs scores that torch's function cannot
                compute, or this method cannot compute the attention.
        """
        options |= {"dropout": dropout, "scaling": scaling}
        if self.group is None and isinstance(attention_mask, SequenceMask):
            known = attend(self.kernels, query, key, value, attention_mask, **options)
            if known is not None:
                return known.contiguous(), None
            attention_mask = attention_mask.full
            self.kernels.report_mask(attention_mask)
        if self.whole_rows or self.group is None:
            implementation = "sdpa" if self.eager is None else self.eager(type(module))
            options["is_causal"] = is_causal
            return attend_alone(implementation, module, query, key, value, attention_mask, **options)
        if key.shape[2] != query.shape[2]:
            raise ModelError(
                f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]}: only self-attention "
                "without a cache can be sharded over cp"
            )
        eager = None if self.eager is None else self.eager(type(module))
        if eager is None and any(options.get(name) is not None for name in ("position_bias", "s_aux", "softcap")):
            raise ModelError(
                f"{type(module).__name__} changes scores in a way that scaled_dot_product_attention cannot: use cp=1"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        layout = self.layout(query.shape[2])
        if self.context_parallel == "ulysses":
            mask = self._sequence_mask(attention_mask)
            return self._over_heads(module, query, key, value, mask, layout, eager, causal=causal, **options), None
        if self.context_parallel == "ring":
            mask = self._sequence_mask(attention_mask)
            require_plain_attention(type(module).__name__, eager=eager is not None, dropout=dropout)
            within = mask is not None and kernel_of(self.kernels, query, value, mask, "passed") == "varlen"
            if within and mask is not None and mask.pattern is not None:
                causal = mask.pattern.causal
            output = attend_around(
                query, key, value, mask, layout, self.group, causal=causal, scale=scaling, within=within
            )
            return output.transpose(1, 2).contiguous(), None
        key, value = gather_keys_and_values([key, value], layout, self.group)
        if isinstance(attention_mask, SequenceMask):
            known = attend(self.kernels, query, key, value, attention_mask, **options)
            if known is not None:
                return known.contiguous(), None
            attention_mask = attention_mask.rows
            self.kernels.report_mask(attention_mask)
        if eager is not None:
            output, _ = eager(module, query, key, value, attention_mask, **options)
            return output, None
        if attention_mask is not None or not causal:
            output = _attended(query, key, value, attention_mask, dropout, scaling)
        else:
            output = _causal(query, key, value, layout, dropout, scaling)
        return output.transpose(1, 2).contiguous(), None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between ranks
    def _over_heads(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence_mask: SequenceMask | None,
        layout: SequenceLayout,
        eager: Callable[..., Any] | None,
        *,
        causal: bool,
        **options: Any,
    ) -> Tensor:
        heads, share = query.shape[1], query.shape[1] // layout.ranks
        local_heads = slice(layout.rank * share, (layout.rank + 1) * share)

        def attend_with_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            seen, mask = OwnHeads(module, heads, local_heads, key.shape[1]), None
            if sequence_mask is not None:
                known = attend(self.kernels, query, key, value, sequence_mask, **seen.options(options))
                if known is not None:
                    return known.transpose(1, 2)
                mask = sequence_mask.full
                self.kernels.report_mask(mask)
            if eager is not None:
                output, _ = eager(seen, query, key, value, mask, **seen.options(options))
                transposed: Tensor = output.transpose(1, 2)
                return transposed
            plain = causal and mask is None
            return _attended(query, key, value, mask, options["dropout"], options["scaling"], causal=plain)

        output = attend_over_heads(attend_with_heads, query, key, value, layout, self.group)
        return output.transpose(1, 2).contiguous()

    @staticmethod
    def _sequence_mask(mask: Tensor | SequenceMask | None) -> SequenceMask | None:
        if isinstance(mask, Tensor):
            raise ModelError(
                f"a mask {tuple(mask.shape)} that the model has made itself has the rows of one rank only: give "
                "context_parallel='allgather'"
            )
        return mask

    def mask(
        self, *, q_length: int, mask_function: Any, attention_mask: Tensor | None, **options: Any
    ) -> Tensor | SequenceMask | None:
        """Build a mask with the signature of ``transformers.AttentionMaskInterface``.

        Args:
            q_length: number of local tokens.
            mask_function: of batch, head, query and key index, the last two in the full sequence.
            attention_mask: ``None`` if the layers of this kind see padding, else the model's padding mask.
            options: the remaining keywords of the interface.

        Returns:
            ``[batch, 1, seq / cp, seq]`` bool, or ``None`` for a plain causal mask; for the other methods
            a mask that builds any of its blocks.
        """
        if self.whole_rows or (self.group is None and q_length != options["kv_length"]):
            call = {"q_length": q_length, "mask_function": mask_function, "attention_mask": attention_mask, **options}
            return mask_alone("sdpa" if self.eager is None else "eager", call)
        self._made_masks = True
        skip = options.pop("allow_is_causal_skip", True) and self.eager is None
        documents = self.documents.current
        whole_rows = not self.masked and documents is None and self.subtree_end is None
        if skip and is_causal_mask_function(mask_function) and whole_rows:
            return None
        device, dtype = torch.device(options.pop("device")), options["dtype"]
        padding = None if self.padding is None or attention_mask is None else self.padding.bool()
        of_indices = mask_of_rows(
            mask_function=mask_function,
            documents=None if documents is None else documents.numbers,
            positions=self.positions,
            subtree_end=self.subtree_end,
            padding=padding,
        )
        rows, use_vmap = options["batch_size"], options.get("use_vmap", False)
        between = partial(sdpa_mask_between, mask_function=of_indices, batch_size=rows, use_vmap=use_vmap)
        layout, additive = self.layout(q_length), None if self.eager is None else dtype
        if self.context_parallel == "ulysses":
            layout = SequenceLayout(layout.length, 1, 0)  # a rank attends from all tokens
        mask = SequenceMask(between, layout, device, additive, of_indices=of_indices)
        if not self.kernels.accelerated:
            return mask.rows if self.context_parallel == "allgather" else mask
        if padding is None and self.subtree_end is None and (pattern := pattern_of(mask_function)) is not None:
            isolated = documents or rows_as_documents(rows, layout.length, device)
            mask.isolated = isolated if pattern.chunk is None else isolated.in_parts(pattern.chunk)
            mask.pattern = pattern
        return mask if self.context_parallel == "ring" else prepared(self.kernels, mask)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, scaling: float | None, *, causal: bool = False
) -> Tensor:
    """Attend by torch's function, as ``[batch, heads, queries, value_dim]``."""
    grouped = key.shape[1] != query.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _causal(
    query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, dropout: float, scaling: float | None
) -> Tensor:
    """Attend from each contiguous chunk of queries to the keys up to its end."""
    # On CPU the bias below becomes a mask of all queries and keys.
    plain = dropout == 0.0 and not torch.compiler.is_compiling()
    if plain and query.device.type == "cpu" and has_flash_attention(query, value):
        return attend_to_prefixes(query, key, value, layout, scale=scaling)
    run = query.shape[2] // layout.chunks_per_rank
    outputs = []
    for index, chunk in enumerate(layout.chunks):
        queries, end = query.narrow(2, index * run, run), (chunk + 1) * run
        bias = causal_bias(run, end, query.device)
        outputs.append(_attended(queries, key[:, :, :end], value[:, :, :end], bias, dropout, scaling))
    return torch.cat(outputs, dim=2)
