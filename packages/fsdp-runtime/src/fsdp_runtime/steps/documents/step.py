"""Packed rows: the token mixers of a model get the beginnings of documents, or one warning tells where they meet."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import model_of_rows
from fsdp_runtime._transformers_compat.models import given_cache
from fsdp_runtime.errors import LayoutError, ModelError
from fsdp_runtime.model.token_mixers import Isolation, TokenMixer
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import ModelFacts, Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.attention.rows import attention_of_rows
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.documents.documents import Documents, find_documents
from fsdp_runtime.steps.documents.isolation import (
    BOUNDARIES,
    CurrentDocuments,
    PackedMixer,
    is_padding_mask,
    mask_argument,
)
from fsdp_runtime.steps.documents.recurrences import compute_rows
from fsdp_runtime.values import require_bool
from fsdp_runtime.wrap import hook_forward, hook_model, wrap

logger = logging.getLogger(__name__)

#: Number of forwards with inspected position ids; each one waits for the device.
_WATCHED = 4
#: Inputs that mark rows with shared prefixes: of this package, and of TRL's trees.
_SHARED_PREFIXES = frozenset({"subtree_end", "tree_kv_index"})


def check_packing(facts: ModelFacts) -> None:
    """Check that the token mixers are known and can isolate documents."""
    facts.require_transformers("keep documents apart in your own code and leave packed_sequences out")
    facts.require_known_positions("use one document a row")
    if (unmasked := facts.bidirectional_without_mask) is not None:
        raise ModelError(
            f"{facts.name} attends to later tokens, and {unmasked.path} ({unmasked.kind}) cannot isolate documents by "
            "its attention mask: use one document a row"
        )


@dataclass(frozen=True)
class PackedSequences(Step[None]):
    """Isolate the documents of packed rows: the outputs of a document do not depend on its neighbours.

    A document begins where ``position_ids`` restart, or where ``seq_idx`` or ``cu_seq_lens_q`` says.

    Args:
        isolate: isolate documents; ``False`` only warns where documents of the first packed rows read one another.
    """

    isolate: bool = True

    def __post_init__(self) -> None:
        require_bool("packed_sequences", self.isolate)

    def resolve(self, setup: Setup) -> Setup:
        """Tell the other steps whether documents are isolated."""
        return replace(setup, packed_sequences=self.isolate)

    def check(self, setup: Setup) -> None:
        """Check that the modules that mix tokens are known."""
        if self.isolate:
            check_packing(setup.facts)

    def prepare(self, model: Any, setup: Setup, checked: None) -> None:
        """Give the token mixers the documents; context parallelism isolates documents itself."""
        if setup.meshes.cp is not None:
            return
        if not self.isolate:
            if setup.facts.of_transformers and setup.facts.token_mixers:
                watch = PackedRowsWatch(setup.facts.token_mixers)
                hook_forward(model, "warns where documents meet", before=watch)
            return
        documents = runtime_state(setup.facts.base_model).documents = CurrentDocuments()
        mixers = setup.facts.token_mixers
        for isolation in get_args(Isolation):
            modules = [mixer.module for mixer in mixers if mixer.isolation == isolation]
            wrap(modules, PackedMixer, documents=documents, isolation=isolation)
        compute_rows(mixers, documents)
        attention = attention_of_rows(model, setup, documents)
        chunked = "chunked_attention" in (getattr(setup.facts.text_config, "layer_types", None) or ())
        inputs = _PackedInputs(documents, attention, setup.facts.attention.startswith("flash"), chunked)
        hook_model(model, "finds the documents of rows", inputs, inputs.after)
        logger.info("packed sequences: %s", dict(Counter(f"{mixer.kind} ({mixer.isolation})" for mixer in mixers)))


def _is_padded(mask: Any) -> bool:
    """Return True for a mask with padding.  Waits for the device."""
    return is_padding_mask("mask", mask) and not bool(mask.all())


@dataclass(frozen=True, eq=False)
class _PackedInputs:
    documents: CurrentDocuments
    attention: ContextAttention | None
    varlen: bool  # the attention's kernels take the boundaries
    chunked: bool  # layers attend within chunks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.documents.current = None
        if self.attention is not None:
            self.attention.whole_rows = True
        named: dict[str, Any] = dict(kwargs)
        mask = named.get("attention_mask")
        tokens = next((named[n] for n in ("input_ids", "inputs_embeds") if named.get(n) is not None), None)
        if tokens is None and args and isinstance(args[0], Tensor):
            tokens = args[0]
        if tokens is None:
            return None
        seq_idx, lengths = named.get("seq_idx"), named.get("cu_seq_lens_q")
        documents = find_documents(named.get("position_ids"), seq_idx, lengths, (tokens.shape[0], tokens.shape[1]))
        if documents is None:
            return None
        if given_cache(named) is not None or named.get("use_cache"):
            if documents.packed and not _is_padded(mask):  # positions restart after padding
                raise LayoutError("a key/value cache has no boundaries of documents: pass use_cache=False")
            return None  # one document a row, as in generation
        self.documents.current = documents
        if self.attention is None and documents.begins.is_cpu:
            _ = documents.packed  # compiled blocks read the answer and cannot compute it
        if named.get("position_ids") is None:
            named["position_ids"] = documents.positions
        if self.attention is not None:
            packed = documents.bounds is not None or documents.packed
            self.attention.whole_rows = not packed and mask is not None
            self.attention.begin(padding=mask, documents=documents if packed else None)
            if mask is None:  # transformers then does not look for documents, which waits
                named["attention_mask"] = torch.ones_like(documents.begins)
        elif is_padding_mask("mask", mask) and self.chunked and documents.packed:
            # transformers counts chunks by positions only where no mask is given.
            if _is_padded(mask):
                raise LayoutError(
                    f"attention_mask has padding in packed rows of {type(module).__name__}, which attends within "
                    "chunks: leave attention_mask out and give the padding its own position_ids from 0, as a document"
                )
            named["attention_mask"] = None
        takes = signature(type(model_of_rows(module)).forward).parameters
        anything = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in takes.values())
        hidden = () if self.varlen else BOUNDARIES
        inputs = {n: v for n, v in named.items() if n not in hidden and (n in takes or anything)}
        return args, {**inputs, "use_cache": False}

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the masks; the graph keeps the masks that it needs."""
        if self.documents.current is not None:
            self.documents.current.forget_masks()


@dataclass(eq=False)
class PackedRowsWatch:
    """A forward pre-hook that warns once where documents of packed rows interact."""

    mixers: tuple[TokenMixer, ...]
    left: int = _WATCHED

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the position ids of the first forwards."""
        shared = kwargs.keys() & _SHARED_PREFIXES
        positions = None if shared else kwargs.get("position_ids")
        if not self.left or type(positions) is not Tensor or positions.dim() < 2 or positions.is_meta:
            return
        self.left -= 1
        documents = find_documents(positions, None, None, (positions.shape[-2], positions.shape[-1]))
        if documents is None or not documents.packed or _only_padding_restarts(documents, kwargs.get("attention_mask")):
            return
        self.left = 0
        _report(module, self.mixers, documents)


def _only_padding_restarts(documents: Documents, mask: Any) -> bool:
    """Return True where no unmasked token begins a document right after another unmasked token."""
    if not is_padding_mask("mask", mask) or mask.shape[1] != documents.begins.shape[1]:
        return False
    real = mask.bool()
    return not (documents.begins[:, 1:] & real[:, 1:] & real[:, :-1]).any()


def _report(model: nn.Module, mixers: tuple[TokenMixer, ...], documents: Documents) -> None:
    leaking = [mixer for mixer in mixers if mixer.isolation != "mask"]

    def look(mixer: TokenMixer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _leaks(*mask_argument(module, args, kwargs), documents):
            leaking.append(mixer)

    def warn(model: nn.Module, args: Any, output: Any) -> None:
        for hook in hooks:
            hook.remove()
        if leaking:
            kinds = dict.fromkeys(mixer.kind for mixer in leaking)
            paths = [mixer.path for mixer in leaking]
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            logger.warning(
                "position_ids restart within a row, and %d layers of %s let documents read one another: %s (%s%s); "
                "pass packed_sequences=True to parallelize",
                len(paths), type(model).__name__, ", ".join(kinds), ", ".join(paths[:3]), more,
            )  # fmt: skip

    by_mask = [mixer for mixer in mixers if mixer.isolation == "mask"]
    hooks = [hook_forward(mixer.module, "looks at masks", before=partial(look, mixer)) for mixer in by_mask]
    hooks.append(hook_forward(model, "warns where documents meet", after=warn, always=True))


def _leaks(mask: Any, implementation: str, documents: Documents) -> bool:
    """Return True for a mask that lets documents interact; masks of other shapes are not judged."""
    if mask is None:
        return not implementation.startswith(("flash", "flex"))
    length = documents.begins.shape[1]
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2:] != (length, length):
        return False
    isolated = documents.restrict(mask)
    return not torch.equal(mask.expand_as(isolated), isolated)
