"""Inputs of a forward under context parallelism: complete a rank's part, or refuse unshardable inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat.attention import attention_in_force
from fsdp_runtime._transformers_compat.models import (
    CACHES,
    asks_for,
    calls_loss_function,
    is_cache,
    original_class,
    scores_rows,
    takes_places_of_logits,
    with_loss_function,
)
from fsdp_runtime.errors import LayoutError, ModelError
from fsdp_runtime.model.positions import DerivedPositions
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.exchange import gather_tokens
from fsdp_runtime.steps.context.media import Media
from fsdp_runtime.steps.context.outputs import GlobalRows, KeptLogits, LossOfRows
from fsdp_runtime.steps.context.sharding import LoadBalancer, SequenceLayout, load_balancer_of
from fsdp_runtime.steps.documents.documents import Documents, find_documents

#: Inputs with the tokens of one rank.
_OF_TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
#: Inputs with one rank's tokens in models with this embedding table; other models make masks of full rows from them.
_EMBEDDED = {"token_type_ids": "token_type_embeddings", "task_type_ids": "task_type_embeddings"}

_CACHES = (*CACHES, "use_cache", "state", "mems", "use_mems")
#: Targets of the model's loss, one per token.
_LABELS = ("labels", "shift_labels")
_KEPT = "logits_to_keep"


@dataclass(eq=False)
class Inputs:
    """A forward pre-hook that completes the inputs of a rank and refuses inputs that cannot be sharded."""

    attention: ContextAttention
    shared_prefixes: bool
    derived: DerivedPositions | None
    cuts_padding: bool
    head: str | None  # the path of the language-model head
    name: str  # of the attention's implementation
    media: Media | None
    embedded: Set[str]  # inputs of ``_EMBEDDED`` with the tokens of one rank
    rows: GlobalRows | None = None
    kept: KeptLogits | None = None
    longest: Tensor | int = 0
    own_ids: Tensor | None = None
    full_ids: Tensor | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a rank's inputs with the mask of the full rows and with position ids."""
        if self.attention.whole_rows:
            self.rows = None
            return args, kwargs
        if args:
            raise LayoutError("a model under context parallelism takes its inputs by name, such as input_ids=...")
        model = base_model(module)
        if attention_in_force(model.config.get_text_config()) != self.name:
            raise ModelError(
                "the attention implementation was set after parallelize, which had replaced it to span the ranks of "
                "cp: call set_attn_implementation before parallelize"
            )
        kwargs = dict(kwargs)
        subtree_end = kwargs.pop("subtree_end", None) if self.shared_prefixes else None
        asked = {name: kwargs.pop(name) for name in (*_LABELS, _KEPT) if _asks(kwargs.get(name))}
        if self.media is not None and self.media.axes:
            kwargs.pop("mm_token_type_ids", None)  # read for positions alone: media require them, text has a count
        media = self._media(kwargs)
        known = {*_OF_TOKENS, *self.embedded, *media}
        _refuse_unshardable({name: each for name, each in kwargs.items() if name not in known})
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if tokens is None:
            raise LayoutError("neither input_ids nor inputs_embeds: context parallelism needs one for the length")
        self._require_asked(model, asked, tokens)
        padding, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if self.cuts_padding and padding is not None and asks_for(module, kwargs, "router_logits"):
            raise LayoutError("output_router_logits beside an attention_mask: leave the mask out, or use cp=1")
        self._require_parts(tokens, padding, positions, subtree_end)
        layout = self.attention.layout(tokens.shape[1])
        self.rows = GlobalRows(tokens.shape[0], layout, self.attention.group)
        full = None if positions is None else gather_tokens(positions, layout, self.attention.group, dim=-1)
        in_text = None if media else full
        if full is not None and full.dim() == 3 and len(full) == 4:  # the first of four axes counts a row's tokens
            in_text = full[0]
        if in_text is not None:
            _require_order(in_text, layout)
        self.longest = layout.length - 1 if full is None else full.max()
        mask = self._full_mask(padding, tokens, layout)
        packable = in_text if padding is None and subtree_end is None else None
        documents = find_documents(packable, None, None, (self.rows.batch, layout.length))
        documents = documents if documents is not None and documents.packed else None
        self._begin(mask if padding is not None else None, documents, full, subtree_end)
        places = layout.positions.to(tokens.device)
        if self.derived is not None and subtree_end is None and self.derived.differ(positions, places, mask):
            raise LayoutError(
                f"{self.derived.path} of {original_class(module).__name__} derives positions from the token ids or the "
                "padding of the full row: compute position_ids of the full row, and give them to "
                "SequenceLayout.shard_batch"
            )
        if positions is None:
            positions = places.expand(tokens.shape[0], -1)
        if self.cuts_padding and padding is not None:  # the model reads its last tokens, here this rank's
            own_last = layout.permutation.roll(-(layout.rank + 1) * tokens.shape[1])
            mask = mask.index_select(1, own_last.to(mask.device))
        more = self._begin_outputs(model, asked, tokens, self.rows)
        if self.media is not None and media:
            self.media.rows = self.rows
            more["input_ids"] = gather_tokens(tokens, layout, self.attention.group, dim=1)
        return args, {**kwargs, "attention_mask": mask, "position_ids": positions, "use_cache": False, **more}

    def _media(self, kwargs: Mapping[str, Any]) -> set[str]:
        """Return the names of the media; every rank of ``cp`` or none has media.  Collective for multimodal models."""
        if self.media is None:
            return set()
        known = self.media.names - {*_OF_TOKENS, *_CACHES}
        by_name = {name: _leaves(value) for name, value in kwargs.items() if name in known}
        names = {name for name, leaves in by_name.items() if any(isinstance(leaf, Tensor) for leaf in leaves)}
        tokens = next((value for value in kwargs.values() if isinstance(value, Tensor)), torch.empty(0))
        flags = torch.tensor([bool(names), not names], dtype=torch.int32, device=tokens.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.attention.group)
        is_dry_run = dist.get_backend(self.attention.group) == "fake"  # its tensors have no values
        if not is_dry_run and bool(flags.all()):
            raise LayoutError(
                "some ranks of cp are given media, others none: give all ranks the media of the full rows"
            )
        if names:
            self.media.require_positions(kwargs)
        return names

    def _full_mask(self, mask: Tensor | None, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the mask of the full length; transformers takes the number of keys from it."""
        if mask is None:
            return tokens.new_ones((tokens.shape[0], layout.length), dtype=torch.bool)
        return mask if mask.shape[1] == layout.length else gather_tokens(mask, layout, self.attention.group, dim=-1)

    def _begin(
        self, padding: Tensor | None, documents: Documents | None, positions: Tensor | None, subtree_end: Tensor | None
    ) -> None:
        attention = self.attention
        if documents is not None and attention.unmasked:
            raise LayoutError(
                f"position_ids restart within a row, and {attention.unmasked}, which attends to later tokens, is not "
                "kept to a document by its attention mask: give one document a row"
            )
        attention.begin(padding=padding, documents=documents)
        attention.subtree_end = None
        if subtree_end is not None and positions is not None and self.rows is not None:
            attention.subtree_end = gather_tokens(subtree_end, self.rows.layout, attention.group, dim=-1)
            attention.positions = positions[0] if positions.dim() == 3 else positions

    def gather_router_logits(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Put the router logits of full rows into a model's output; a rank gets the gradients of its tokens."""
        # An auxiliary loss is a product of two means over all tokens, not a sum over ranks. Every rank has the loss of
        # the full rows, and the sum of gradients over ``cp`` counts it once.
        logits = output.get("router_logits") if isinstance(output, MutableMapping) else None
        if type(logits) is tuple and self.rows is not None:
            output["router_logits"] = tuple(self.rows.router_logits(each) for each in logits)
        return output

    def _begin_outputs(self, model: Any, asked: dict[str, Any], tokens: Tensor, rows: GlobalRows) -> dict[str, Any]:
        self.end()
        share, scores = tokens.shape[1], scores_rows(model)
        inputs = dict(asked)
        for name in _LABELS if not scores else ():
            if name in asked:
                inputs[name] = asked[name] if asked[name].shape[1] == share else rows.layout.shard(asked[name])
        if scores and tokens.dim() == 2:
            self.own_ids, self.full_ids = tokens, rows.full(tokens)
            inputs["input_ids"] = self.full_ids
        if "labels" in asked and not scores:
            self._stack.enter_context(with_loss_function(model, LossOfRows(model.loss_function, rows)))
        if _KEPT in asked:
            self.kept = KeptLogits(asked[_KEPT], rows)
            inputs[_KEPT] = self.kept.local.to(tokens.device)
        return inputs

    def end(self, *_: Any) -> None:
        """Undo the changes of a forward, also after an error."""
        self._stack.close()
        if self.media is not None:
            self.media.rows = None
        self.kept = self.own_ids = self.full_ids = None

    def gather_kept(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Return the logits of all kept tokens, gathered from the ranks."""
        return output if self.kept is None else self.kept(output)

    def gather_scores(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Return the scores of full rows."""
        return output if self.rows is None else self.rows.full(output)

    def own_tokens(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return this rank's token ids for the trunk, below a head that gets full rows."""
        full, own = self.full_ids, self.own_ids
        if full is None:
            return None
        named = {name: own if value is full else value for name, value in kwargs.items()}
        return tuple(own if value is full else value for value in args), named

    def add_longest(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Append the longest position of the full rows to a rotary embedding's input: its frequencies depend on it."""
        positions = kwargs.get("position_ids") if len(args) < 2 else args[1]
        if positions is None or self.rows is None:
            return None
        last = torch.as_tensor(self.longest, device=positions.device, dtype=positions.dtype)
        longer = torch.cat([positions, last.expand(*positions.shape[:-1], 1)], dim=-1)
        return ((args[0], longer, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "position_ids": longer})

    def drop_longest(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Remove the longest position from a rotary embedding's output."""
        if self.rows is None:
            return output
        return tuple(each[..., :-1, :] for each in output) if isinstance(output, tuple) else output[..., :-1, :]

    def _require_asked(self, model: Any, asked: Mapping[str, Any], tokens: Tensor) -> None:
        """Check that the requested outputs of full rows can be computed; no communication."""
        batch, share = tokens.shape[:2]
        name = original_class(model).__name__
        full = share * dist.get_world_size(self.attention.group)
        labels = {} if scores_rows(model) else {key: asked[key] for key in _LABELS if key in asked}
        if labels and not calls_loss_function(model):
            raise LayoutError(
                f"labels: {name} computes its loss by custom code, of one rank's tokens: leave them out, and "
                "compute the loss from the logits"
            )
        for key, value in labels.items():
            _require_tokens(key, value, share, full, fits=isinstance(value, Tensor) and value.shape[:-1] == (batch,))
        kept = asked.get(_KEPT, 0)
        places = type(kept) is int or (isinstance(kept, Tensor) and kept.dim() == 1 and kept.dtype == torch.long)
        if _KEPT in asked and (not places or labels or self.head is None or not takes_places_of_logits(model)):
            raise LayoutError(
                f"logits_to_keep of {name}: under cp it is a number or places [kept] of the full row, without labels, "
                "of a model with a language-model head that takes places: leave it out or pass 0"
            )

    def _require_parts(self, tokens: Tensor, mask: Any, positions: Any, subtree_end: Any) -> None:
        """Check the shapes of a rank's inputs and their load balancer; no communication."""
        attention, length = self.attention, tokens.shape[1]
        full = length * attention.layout(length).ranks
        if subtree_end is not None and (positions is None or mask is not None):
            raise LayoutError("rows with shared prefixes need position_ids, and take no attention_mask")
        if mask is not None and attention.packed_sequences and positions is not None:
            raise LayoutError(
                "attention_mask beside position_ids under packed_sequences=True and cp: leave the mask out, and let "
                "padding be a separate document"
            )
        if mask is not None:
            _require_tokens("attention_mask", mask, length, full)
        if positions is not None:
            _require_tokens("position_ids", positions, length, length, fits=positions.dim() in (2, 3))
        for tensor in (tokens, positions):
            if isinstance(tensor, Tensor) and load_balancer_of(tensor) not in (None, str(attention.load_balancer)):
                raise LayoutError(_other_order(attention.layout(length)))


def embedded_inputs(model: nn.Module) -> set[str]:
    """Return the inputs of ``_EMBEDDED`` that a model embeds token by token."""
    tables = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    return {name for name, table in _EMBEDDED.items() if table in tables}


def _refuse_unshardable(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if (name in _CACHES and _asks(value)) or any(map(is_cache, _leaves(value))):
            raise LayoutError(f"{name}: a key/value cache would hold the keys of this rank only: pass use_cache=False")
        for leaf in _leaves(value):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and bool(leaf.numel()):
                raise LayoutError(
                    f"{name} {tuple(leaf.shape)} cannot be sharded along the tokens: compute the embeddings of the "
                    "full sequence first, and pass this rank's part as inputs_embeds"
                )


def _asks(value: Any) -> bool:
    return value is not None if isinstance(value, Tensor) or is_cache(value) else bool(value)


def _leaves(value: Any) -> Iterator[Any]:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else None
    if inside is None:
        yield value
        return
    for each in inside:
        yield from _leaves(each)


def _require_tokens(name: str, value: Any, share: int, full: int, *, fits: bool | None = None) -> None:
    """Check that the last dim of a tensor has this rank's tokens or, where allowed, the tokens of the full rows."""
    # ``fits``: the other dims are right. By default the tensor has one other dim.
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if not shape or shape[-1] not in (share, full) or not (len(shape) == 2 if fits is None else fits):
        actual = shape if isinstance(value, Tensor) else type(value).__name__
        lengths = f"{share}, this rank's tokens" + f", or {full}, the full rows" * (full != share)
        raise LayoutError(f"{name} {actual}: give [batch, length], where the length is {lengths}")


def _require_order(positions: Tensor, layout: SequenceLayout) -> None:
    """Check that positions ``[..., seq]`` continue from chunk to chunk in the order of the layout."""
    # Waits for the device.
    chunks = 2 * layout.ranks
    others: LoadBalancer = None if layout.load_balancer else "headtail"
    if layout.ranks == 1 or layout.length % chunks:
        return
    own = replace(layout, length=chunks)
    other = replace(own, load_balancer=others)
    chunked = torch.unflatten(positions, -1, (chunks, -1))
    ends = torch.stack([chunked[..., 0], chunked[..., -1] + 1])
    in_other = ends.index_select(-1, own.permutation[other.permutation.argsort()].to(ends.device))
    continued = [(first[..., 1:] == after[..., :-1]).sum() for first, after in (ends, in_other)]
    if bool(continued[1] > continued[0]):
        raise LayoutError(_other_order(layout))


def _other_order(layout: SequenceLayout) -> str:
    return (
        f"the batch was cut by another load balancer than the model's {layout.load_balancer!r}: cut it with "
        f"sequence_layout(mesh, {layout.length}, load_balancer={layout.load_balancer!r}), or give parallelize the "
        "other one"
    )
