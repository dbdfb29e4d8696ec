"""Attention over packed rows, and over a sequence sharded over ``cp`` by one of three methods.

``"allgather"``: keys and values are gathered, and each rank computes the rows of its queries against the full
sequence (Llama 3, arXiv:2407.21783, section 3.3.2).  So any mask works, on any device, and grouped-query attention
keeps the messages small.  Without a mask, scores above the diagonal are not computed and no mask is built.

``"ulysses"`` gives each rank some of the heads with all tokens, and returns the tokens after attention (DeepSpeed-
Ulysses, Jacobs et al., arXiv:2309.14509).  So a rank computes as without ``cp``, by any function and with any mask.

``"ring"`` passes keys and values from rank to rank (see ``ring``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any, NamedTuple, get_args

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
from fsdp_runtime.steps.attention.kernels import AttentionKernels, attend, kernel_of, prepared
from fsdp_runtime.steps.context.exchange import (
    gather_keys_and_values,
    gather_tokens,
    heads_to_tokens,
    tokens_to_heads,
)
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.methods import Method, require_heads, require_plain_attention
from fsdp_runtime.steps.context.ring import Prefixes, attend_around, attend_in_parts
from fsdp_runtime.steps.context.sharding import LoadBalancer, SequenceLayout
from fsdp_runtime.steps.documents.documents import Documents
from fsdp_runtime.steps.documents.isolation import CurrentDocuments
from fsdp_runtime.values import require_one_of
from tp_plans.naming import KV_GROUPS


class _Call(NamedTuple):
    """An attention call, without its queries, keys and values."""

    module: Any
    eager: Callable[..., Any] | None  # the function that computes the module's scores instead of torch's
    mask: Tensor | SequenceMask | None
    causal: bool
    options: dict[str, Any]


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
            LayoutError: :meth:`mask` has made no mask in this forward: the rows may be of another rank's tokens.
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
        eager = None if self.eager is None else self.eager(type(module))
        if self.whole_rows or self.group is None:
            attended, mask = self._by_kernel(attention_mask, options, query, key, value)
            if attended is not None:
                return attended, None
            options["is_causal"] = is_causal
            return attend_alone(eager or "sdpa", module, query, key, value, mask, **options)
        if key.shape[2] != query.shape[2]:
            raise ModelError(
                f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]}: only self-attention "
                "without a cache can be sharded over cp"
            )
        if eager is None and any(options.get(name) is not None for name in ("position_bias", "s_aux", "softcap")):
            raise ModelError(
                f"{type(module).__name__} changes scores in a way that scaled_dot_product_attention cannot: use cp=1"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        layout, call = self.layout(query.shape[2]), _Call(module, eager, attention_mask, causal, options)
        if self.context_parallel == "allgather":
            key, value = gather_keys_and_values([key, value], layout, self.group)
            return self._attend(call, query, key, value, layout), None
        if isinstance(attention_mask, Tensor):
            raise ModelError(
                f"a mask {tuple(attention_mask.shape)} that the model has made itself has the rows of one rank only: "
                "give context_parallel='allgather'"
            )
        if self.context_parallel == "ulysses":
            return self._over_heads(call, query, key, value, layout), None
        require_plain_attention(type(module).__name__, eager=eager is not None, dropout=dropout)
        within = False
        if attention_mask is not None and attention_mask.pattern is not None:
            within = kernel_of(self.kernels, query, value, attention_mask, "passed") == "varlen"
            causal = attention_mask.pattern.causal if within else causal
        output = attend_around(
            query, key, value, attention_mask, layout, self.group, causal=causal, scale=scaling, within=within
        )
        return output.transpose(1, 2).contiguous(), None

    def _by_kernel(
        self, mask: Tensor | SequenceMask | None, options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return attention by a kernel that needs no mask of all pairs, or ``None`` and this mask."""
        if not isinstance(mask, SequenceMask):
            return None, mask
        if (attended := attend(self.kernels, query, key, value, mask, **options)) is not None:
            return attended.contiguous(), None
        self.kernels.report_mask(mask.rows)
        return None, mask.rows

    def _attend(self, call: _Call, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        """Attend from the tokens of a layout to the full sequence, as ``[batch, queries, heads, value_dim]``."""
        attended, mask = self._by_kernel(call.mask, call.options, query, key, value)
        if attended is not None:
            return attended
        if call.eager is not None:
            output: Tensor = call.eager(call.module, query, key, value, mask, **call.options)[0]
            return output
        plain, options = call.causal and mask is None, (call.options["dropout"], call.options["scaling"])
        if plain and layout.ranks > 1:
            output = _causal(query, key, value, layout, *options)
        else:
            output = _attended(query, key, value, mask, *options, causal=plain)
        return output.transpose(1, 2).contiguous()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between ranks
    def _over_heads(self, call: _Call, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        """Attend with this rank's heads over the full sequence, between two all-to-alls."""
        heads, ranks = query.shape[1], layout.ranks
        require_heads("the attention", heads, ranks)
        if (copies := kv_copies(key.shape[1], ranks)) > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        query, key, value = tokens_to_heads([query, key, value], layout, self.group, heads_dim=1, tokens_dim=2)
        module = _LocalHeads(call.module, heads, layout.rank * heads // ranks, heads // ranks, key.shape[1])
        call = call._replace(module=module, options={name: module.of(value) for name, value in call.options.items()})
        output = self._attend(call, query, key, value, SequenceLayout(layout.length, 1, 0))
        return heads_to_tokens(output, layout, self.group, heads_dim=2, tokens_dim=1)

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
            isolated = documents or Documents.of_rows(rows, layout.length, device)
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
        rows: Tensor = attend_in_parts(query, key, value, Prefixes(layout), None, scaling)
        return rows
    run = query.shape[2] // layout.chunks_per_rank
    outputs = []
    for index, chunk in enumerate(layout.chunks):
        queries, end = query.narrow(2, index * run, run), (chunk + 1) * run
        bias = causal_bias(run, end, query.device)
        outputs.append(_attended(queries, key[:, :, :end], value[:, :, :end], bias, dropout, scaling))
    return torch.cat(outputs, dim=2)


def kv_copies(heads: int, ranks: int) -> int:
    """Return the copies per key and value head that let the ranks divide them: 1 if ``ranks`` divides ``heads``."""
    return lcm(heads, ranks) // heads


class _LocalHeads:
    """An attention module with one rank's heads, for its attention function."""

    def __init__(self, module: nn.Module, heads: int, first: int, share: int, kv_heads: int) -> None:
        self._module, self._heads, self._first, self._share = module, heads, first, share
        self._groups = share // kv_heads

    def __getattr__(self, name: str) -> Any:
        return self._groups if name == KV_GROUPS else self.of(getattr(self._module, name))

    def of(self, value: Any) -> Any:
        """Return a value; this rank's entries of a tensor with one entry per head and no other dim (sinks)."""
        if not isinstance(value, Tensor) or value.numel() != self._heads or self._heads not in value.shape:
            return value
        return value.narrow(list(value.shape).index(self._heads), self._first, self._share)
