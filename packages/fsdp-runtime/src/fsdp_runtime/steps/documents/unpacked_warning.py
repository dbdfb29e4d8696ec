"""One warning where packed rows reach a model without ``packed_sequences=True`` whose documents then meet."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime.setup import ModelFacts
from fsdp_runtime.steps.documents.documents import Documents, find_documents
from fsdp_runtime.steps.documents.isolation import mask_argument
from fsdp_runtime.steps.documents.token_mixers import TokenMixer
from fsdp_runtime.wrap import hook_forward

logger = logging.getLogger(__name__)

#: Forwards whose position ids are looked at; each one waits for the device.
_WATCHED = 4
#: What a model is given beside rows whose documents share prefixes: by this package, and by TRL's trees.
_SHARED_PREFIXES = frozenset({"subtree_end", "tree_kv_index"})


def warn_of_packed_rows(model: nn.Module, facts: ModelFacts) -> None:
    """Watch the first forwards of a model with position ids, and warn where documents meet in some layer."""
    if facts.of_transformers and facts.token_mixers:
        hook_forward(model, "warns where documents meet", before=PackedRowsWatch(facts.token_mixers))


class PackedRowsWatch:
    """A forward pre-hook that warns once where documents of packed rows meet."""

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
        _Report(module, self.mixers, documents)


def _only_padding_restarts(documents: Documents, mask: Any) -> bool:
    """Return True where no token of a row begins a document right after another one that a mask lets through."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != documents.begins.shape[1]:
        return False
    real = mask.bool()
    return not (documents.begins[:, 1:] & real[:, 1:] & real[:, :-1]).any()


class _Report:
    """Looks at the masks of one forward, and warns after it."""

    def __init__(self, model: nn.Module, mixers: tuple[TokenMixer, ...], documents: Documents) -> None:
        self.documents = documents
        self.leaking = [mixer for mixer in mixers if mixer.way != "mask"]
        self.handles = [
            hook_forward(mixer.module, "looks at masks", before=_Mask(self, mixer))
            for mixer in mixers
            if mixer.way == "mask"
        ]
        self.handles.append(hook_forward(model, "warns where documents meet", after=self.after, always=True))

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        for handle in self.handles:
            handle.remove()
        if self.leaking:
            kinds = dict.fromkeys(mixer.kind for mixer in self.leaking)
            paths = [mixer.path for mixer in self.leaking]
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            logger.warning(
                "position_ids restart within a row, and %d layers of %s let documents read one another: %s (%s%s); "
                "pass packed_sequences=True to parallelize",
                len(paths), type(model).__name__, ", ".join(kinds), ", ".join(paths[:3]), more,
            )  # fmt: skip


class _Mask:
    def __init__(self, report: _Report, mixer: TokenMixer) -> None:
        self.report, self.mixer = report, mixer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        documents = self.report.documents
        mask, implementation = mask_argument(module, args, kwargs)
        if mask is None:
            leaks = not implementation.startswith(("flash", "flex"))
        elif (
            isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2] == mask.shape[3] == len(documents.begins[0])
        ):
            kept = documents.restrict(mask)
            leaks = not torch.equal(mask.expand_as(kept), kept)
        else:
            leaks = False
        if leaks:
            self.report.leaking.append(self.mixer)
