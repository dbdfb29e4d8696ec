"""One warning for packed rows without ``packed_sequences=True``: tokens of different documents interact."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime.model.token_mixers import TokenMixer
from fsdp_runtime.setup import ModelFacts
from fsdp_runtime.steps.documents.documents import Documents, find_documents
from fsdp_runtime.steps.documents.isolation import mask_argument
from fsdp_runtime.wrap import hook_forward

logger = logging.getLogger(__name__)

#: Number of forwards with inspected position ids; each one waits for the device.
_WATCHED = 4
#: Inputs that mark rows with shared prefixes: of this package, and of TRL's trees.
_SHARED_PREFIXES = frozenset({"subtree_end", "tree_kv_index"})


def warn_of_packed_rows(model: nn.Module, facts: ModelFacts) -> None:
    """Watch the first forwards of a model with position ids, and warn where documents interact in some layer."""
    if facts.of_transformers and facts.token_mixers:
        hook_forward(model, "warns where documents meet", before=PackedRowsWatch(facts.token_mixers))


class PackedRowsWatch:
    """A forward pre-hook that warns once where documents of packed rows interact."""

    def __init__(self, mixers: tuple[TokenMixer, ...]) -> None:
        self.mixers = mixers
        self.left = _WATCHED

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
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != documents.begins.shape[1]:
        return False
    real = mask.bool()
    return not (documents.begins[:, 1:] & real[:, 1:] & real[:, :-1]).any()


def _report(model: nn.Module, mixers: tuple[TokenMixer, ...], documents: Documents) -> None:
    """Look at the masks of one forward, and warn after it."""
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
