"""Token mixers on packed rows: attention under a restricted mask, other mixers on a batch of a document per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter, signature
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_runtime._transformers_compat.attention import attention_in_force
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.model.token_mixers import MASK, Isolation, is_bidirectional
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.documents.documents import DocumentBatch, Documents
from fsdp_runtime.wrap import Wrapper
from tp_plans.runtime import referenced_names

#: Inputs with boundaries of documents, for kernels; rows of one document have no boundaries.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: The beginning of the name of an attention function that takes a ``SequenceMask``; the replaced function follows.
REPLACED = "packed_"


@dataclass(eq=False)
class CurrentDocuments:
    """The documents of the current forward, shared by a model's token mixers; ``None`` for rows of one document."""

    current: Documents | None = None

    def bind(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that runs with the current documents, also in a later recomputation."""
        documents = self.current

        def run(*args: Any, **kwargs: Any) -> Any:
            later, self.current = self.current, documents
            try:
                return forward(*args, **kwargs)
            finally:
                self.current = later

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> CurrentDocuments:
        """Return itself: a copied model's token mixers have the same classes, and the classes refer to it."""
        return self


class PackedMixer(Wrapper):
    """Isolates documents inside of tensor parallelism: its rules see rows and not documents."""

    effect = "packed rows"
    documents: ClassVar[CurrentDocuments]
    isolation: ClassVar[Isolation]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the token mixer so that documents stay isolated."""
        documents = self.documents.current
        forward = super().forward  # type: ignore[misc]
        if documents is None:
            return forward(*args, **kwargs)
        if self.isolation == "mask":
            args, kwargs = restricted(self, args, kwargs, documents)
            return forward(*args, **kwargs)
        args, kwargs = tuple(map(_dense, args)), {name: _dense(value) for name, value in kwargs.items()}
        if not documents.packed:
            return forward(*args, **{name: value for name, value in kwargs.items() if name not in BOUNDARIES})
        return run_per_document(forward, args, kwargs, documents, singly=self.isolation == "singles")


def _dense(value: Any) -> Any:
    return value.full if isinstance(value, SequenceMask) else value


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ from batch to batch
def run_per_document(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], documents: Documents, *, singly: bool
) -> Any:
    """Run a forward on documents as rows of a batch; return its output for the rows, ``None`` for attention weights."""
    # Documents of similar length share a batch and are padded at their ends: a causal module does not show the padding
    # to earlier tokens. So a module runs once per power of two between the shortest and the longest document. With
    # ``singly`` each document is a batch, for a module with results that depend on padding.
    batches = documents.singles if singly else documents.batches
    inputs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    outputs = []
    for batch in batches:
        take = partial(_taken, batch, documents)
        outputs.append(forward(*map_tensors(tuple(args), take), **map_tensors(inputs, take)))
    return _put_together(outputs, documents, batches)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a value with ``change`` applied to every tensor in its nested dicts, tuples and lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(each, change) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_tensors(each, change) for each in value)
    return value


def map_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's forward after ``change(name, value)`` of every argument."""
    names = _argument_names(type(module))
    changed = tuple(change(name, each) for name, each in zip_longest(names[: len(args)], args, fillvalue=""))
    return changed, {name: change(name, value) for name, value in kwargs.items()}


def map_full(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Compute a function of full tensors on every rank; the result has the placements of the first tensor."""
    first = tensors[0]
    if not isinstance(first, DTensor):
        return function(*tensors)
    full = [Replicate()] * first.device_mesh.ndim
    local = [each.redistribute(placements=full).to_local() if isinstance(each, DTensor) else each for each in tensors]
    result = DTensor.from_local(function(*local), first.device_mesh, full, run_check=False)
    return result.redistribute(placements=first.placements)


def is_padding_mask(name: str, value: Any) -> bool:
    """Return True for an argument that is the padding mask of rows, by its name and shape."""
    return "mask" in name and isinstance(value, Tensor) and value.dim() == 2


def _taken(batch: DocumentBatch, documents: Documents, value: Tensor) -> Tensor:
    """Return a batch's part of a tensor of tokens; any other tensor unchanged."""
    rows, tokens = documents.begins.shape
    shape = tuple(value.shape)
    if len(shape) == 4 and shape[2:] == (tokens, tokens) and shape[1] != tokens and shape[0] in (1, rows):
        return batch.take_mask(value.expand(rows, -1, -1, -1), true_allows=_true_allows(value))
    if len(shape) >= 2 and shape[1] == tokens and shape[0] in (1, rows):
        return batch.take(value.expand(rows, *shape[1:]))
    if len(shape) >= 3 and shape[2] == tokens and shape[1] in (1, rows):  # one for each axis of a rotary embedding
        return batch.take(value.expand(-1, rows, *shape[2:]).movedim(0, -1)).movedim(-1, 0)
    if shape == (tokens, tokens):
        return _of_pairs(batch, value)
    return value


def _of_pairs(batch: DocumentBatch, value: Tensor) -> Tensor:
    """Return the part of a value per pair of tokens that documents share: the value depends on their distance."""
    if not torch.equal(value[1:, 1:], value[:-1, :-1]):
        raise LayoutError(
            f"an input {list(value.shape)} has a value for each pair of tokens that does not follow from their "
            "distance: the documents of packed rows cannot share it; give rows of one document"
        )
    length = batch.tokens.shape[1]
    return value[:length, :length]


def _put_together(outputs: list[Any], documents: Documents, batches: list[DocumentBatch]) -> Any:
    first = outputs[0]
    if isinstance(first, DTensor):
        return map_full(lambda *full: documents.together(full, batches), *outputs)
    if isinstance(first, Tensor):
        same = all(o.dim() >= 2 and o.shape[:2] == b.tokens.shape for o, b in zip(outputs, batches, strict=True))
        return documents.together(outputs, batches) if same else None
    if type(first) in (tuple, list):
        return type(first)(_put_together(list(each), documents, batches) for each in zip(*outputs, strict=True))
    return first


def mask_argument(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the mask that an attention is called with, and the name of its implementation."""
    place = _argument_names(type(module)).index(MASK)
    mask = args[place] if place < len(args) else kwargs.get(MASK)
    return mask, str(attention_in_force(module.config)) if hasattr(module, "config") else "eager"


def restricted(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], documents: Documents
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an attention's arguments with a mask that isolates documents."""
    mask, implementation = mask_argument(module, args, kwargs)
    tokens = documents.begins.shape[1]
    if isinstance(mask, SequenceMask) and implementation.startswith(REPLACED):
        return args, kwargs
    mask, implementation = _dense(mask), implementation.removeprefix(REPLACED)
    if implementation.startswith(("flash", "flex")):  # transformers finds the documents in the position ids
        return args, kwargs
    if mask is None:
        if not documents.packed:
            return args, kwargs
        mask = documents.same if is_bidirectional(module) else documents.causal
        if not implementation.startswith("sdpa"):
            hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
    elif isinstance(mask, Tensor) and mask.dim() == 4 and _of_keys(mask, tokens):
        by_interface = uses_interface(type(module))
        mask = documents.restrict(mask, true_allows=by_interface or _true_allows(mask))
    else:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise LayoutError(
            f"{type(module).__name__} has a mask {shape} for {tokens} tokens: packed rows need a mask "
            f"[batch, heads or 1, {tokens}, {tokens}]"
        )
    place = _argument_names(type(module)).index(MASK)
    if place < len(args):
        return (*args[:place], mask, *args[place + 1 :]), kwargs
    return args, {**kwargs, MASK: mask}


def _of_keys(mask: Tensor, tokens: int) -> bool:
    """Return True for a mask of all pairs of tokens, and for an additive mask of all keys."""
    return mask.shape[2:] == (tokens, tokens) or (mask.shape[2:] == (1, tokens) and mask.is_floating_point())


def _true_allows(mask: Tensor) -> bool:
    """Return the meaning of true in a mask: the first token may attend to itself.  Waits for the device."""
    return mask.dtype != torch.bool or bool(mask[0, 0, 0, 0])


def _constant(function: Callable[[type], Any]) -> Callable[[type], Any]:
    """Cache a function of a class; its results are constants for the compiler, which does not trace it."""
    cached = cache(function)  # not around the constant function: the compiler ignores such a cache, and warns
    return torch.compiler.assume_constant_result(lambda cls: cached(cls))  # type: ignore[no-any-return,no-untyped-call]


@_constant
def uses_interface(cls: type) -> bool:
    """Return True for attention through ``transformers.AttentionInterface``: true in its masks allows."""
    return "ALL_ATTENTION_FUNCTIONS" in referenced_names(cls)


@_constant
def _argument_names(cls: type) -> tuple[str, ...]:
    """Return the argument names of a class's own forward; a wrapper's forward takes ``*args, **kwargs``."""
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    for base in cls.__mro__:
        if (forward := vars(base).get("forward")) is not None:
            names = tuple(arg.name for arg in signature(forward).parameters.values() if arg.kind not in variadic)
            if names[1:]:
                return names[1:]
    return ()
