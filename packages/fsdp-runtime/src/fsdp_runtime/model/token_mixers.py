"""The modules of a model that mix tokens, and the isolation of packed documents in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal

from torch import nn

from fsdp_runtime._transformers_compat.models import CACHES
from fsdp_runtime.model.structure import ModelStructure
from tp_plans.runtime import referenced_names

#: How packed documents are isolated in a module: by its mask, by runs on padded batches with a document per row, or by
#: a run per document.
Isolation = Literal["mask", "documents", "singles"]

#: The attention argument that decides which tokens interact.
MASK = "attention_mask"
#: Forward arguments that only token mixers take: caches, states, masks and document boundaries.
_MARKS = {*CACHES, "past_key_value", "layer_past", "state", "use_cache", MASK, "seq_idx", "cu_seq_lens_q"}
#: Names used by attention code in which tokens interact only through the mask.
_ATTENTION = {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention", "softmax", "baddbmm"}
#: Modules without these arguments that mix all tokens of a batch, also across rows.
_BATCH_DEPENDENT = {"DogeCDMoE"}  # router_logits.view(2, tokens, -1) splits the tokens instead of the features
#: Modules that make their own masks, from the number of a row's tokens and not from position ids.
_OWN_MASKS = {"CpmAntAttention"}


@dataclass(frozen=True)
class TokenMixer:
    """A module that mixes tokens."""

    path: str
    module: nn.Module
    isolation: Isolation
    cls: type  # without the wrappers of this package

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__


def token_mixers(structure: ModelStructure) -> tuple[TokenMixer, ...]:
    """Find the modules in the decoder's blocks that mix tokens, by their forward's arguments, not by class names."""
    # A token mixer's forward takes a cache, a state or an attention mask, or the module has a convolution over the
    # sequence. The outermost mixer inside a block counts.
    return tuple(mixer for path in structure.decoder for mixer in _below(structure.blocks[path], path))


def makes_own_masks(structure: ModelStructure) -> str | None:
    """Return the path of a module in the decoder's blocks that makes its own masks; they cannot be restricted."""
    for path in structure.decoder:
        for inner, module in structure.blocks[path].named_modules(prefix=path):
            if type(module).__name__ in _OWN_MASKS:
                return str(inner)
    return None


def is_bidirectional(module: nn.Module) -> bool:
    """Return True if ``is_causal`` is False: without a mask, all tokens interact."""
    return getattr(module, "is_causal", True) is False


def _below(module: nn.Module, path: str) -> Iterator[TokenMixer]:
    if _has_convolution(module):
        yield TokenMixer(path, module, "documents", type(module))
        return
    for name, child in module.named_children():
        at = f"{path}.{name}"
        if type(child).__name__ in _BATCH_DEPENDENT:
            yield TokenMixer(at, child, "singles", type(child))
        elif _arguments(type(child).forward) & _MARKS:
            yield TokenMixer(at, child, "mask" if _is_masked_attention(child) else "documents", type(child))
        else:
            yield from _below(child, at)


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) and child.kernel_size != (1,) for child in module.children())


def _is_masked_attention(module: nn.Module) -> bool:
    """Return True if the mask alone decides which tokens interact; an indexer inside must take the mask, too."""
    if not referenced_names(type(module)) & _ATTENTION or any(map(_has_convolution, module.modules())):
        return False
    mixing = [child for child in module.modules() if child is module or _arguments(type(child).forward) & _MARKS]
    return all(MASK in _arguments(type(child).forward) for child in mixing)


def has_inner_mixer(module: nn.Module) -> bool:
    """Return True for a mixer with another mixer inside, such as an indexer."""
    return any(_arguments(type(child).forward) & _MARKS for child in module.modules() if child is not module)


def attend_between_layers(model: nn.Module, mixers: Iterable[TokenMixer]) -> list[nn.Module]:
    """Return the modules that attend from a token to its states in several layers, by an attention function."""
    inside = {module for mixer in mixers for module in mixer.module.modules()}
    return [each for each in model.modules() if each not in inside and _attends_without_mask(type(each))]  # type: ignore[arg-type]  # mypy: a class is hashable


@cache
def _attends_without_mask(cls: type[nn.Module]) -> bool:
    takes = signature(cls.forward).parameters.values()
    known = not any(one.name in _MARKS or one.kind is Parameter.VAR_KEYWORD for one in takes)
    return known and "ALL_ATTENTION_FUNCTIONS" in referenced_names(cls)


@cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(forward).parameters)
