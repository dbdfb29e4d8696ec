"""Attention masks of packed documents, parts of sequences and prefix trees."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime._transformers_compat.prefix_attention import QueryRun, attend_in_runs, query_runs, remember_runs
from fsdp_runtime.errors import LayoutError, ModelError
from fsdp_runtime.swaps import swapped


@dataclass(frozen=True)
class MaskPattern:
    """The tokens of its document that a query sees."""

    causal: bool = True
    window: int | None = None  # the query's token and the ``window - 1`` tokens before it
    chunk: int | None = None  # the query's part of its document, by tokens a part


def pattern_of(mask_function: Any) -> MaskPattern | None:
    """Return the pattern of one of transformers' own mask functions, ``None`` for any other function."""
    # The functions are closures: their names and variables are private (5.10 to 5.24).
    from transformers.masking_utils import bidirectional_mask_function

    if mask_function is bidirectional_mask_function:
        return MaskPattern(causal=False)
    combined = _maker(mask_function) == "and_masks"
    parts = mask_function.__closure__[0].cell_contents if combined else (mask_function,)
    overlays = {"sliding_window_overlay": "window", "chunked_overlay": "chunk"}
    made = [(overlays[maker], part) for part in parts if (maker := _maker(part)) in overlays]
    # The tokens of a window or a chunk are the first of the overlay's variables, in alphabetical order.
    sizes: dict[str, Any] = {name: int(part.__closure__[0].cell_contents) for name, part in made}
    known = all(is_causal_mask_function(part) or _maker(part) in overlays for part in parts)
    causal = any(map(is_causal_mask_function, parts))
    return MaskPattern(**sizes) if known and causal and all(size > 0 for size in sizes.values()) else None


def _maker(mask_function: Any) -> str:
    """Return the name of the function of transformers that made a mask function."""
    of_transformers = getattr(mask_function, "__module__", "") == "transformers.masking_utils"
    return str(mask_function.__qualname__).partition(".<locals>")[0] if of_transformers else ""


def mask_of_rows(
    *,
    mask_function: Any,
    documents: Tensor | None,
    positions: Tensor | None,
    subtree_end: Tensor | None,
    padding: Tensor | None,
) -> Any:
    """Return the mask of rows as a function of batch, head, query and key index."""
    # ``documents``, ``positions``, ``subtree_end`` and ``padding`` (false at padding) are ``[batch, seq]``, or
    # ``None``; positions count per document, or along a path of a prefix tree (``PathMask``).
    # ``transformers.masking_utils`` is documented but not exported, and has moved functions between releases (5.10 to
    # 5.24).
    from transformers.masking_utils import and_masks, padding_mask_function

    if subtree_end is not None and positions is not None:
        mask_function = PathMask(positions, subtree_end).along_paths(mask_function)
    elif documents is not None and positions is not None:
        of_positions, at = mask_function, positions  # chunks of attention restart in each document
        mask_function = and_masks(
            lambda b, h, q, k: of_positions(b, h, at[b, q], at[b, k]),
            lambda b, h, q, k: documents[b, q] == documents[b, k],
        )
    return mask_function if padding is None else and_masks(mask_function, padding_mask_function(padding))


def sdpa_mask_between(queries: Tensor, keys: Tensor, *, mask_function: Any, batch_size: int, use_vmap: bool) -> Tensor:
    """Build the boolean mask ``[batch, 1, queries, keys]`` of SDPA with transformers' own function."""
    # With ``use_vmap`` the mask function takes single indices.
    from transformers.masking_utils import sdpa_mask

    device = queries.device
    # The function adds offsets to indices: vectors of offsets turn indices into positions.
    offsets = {
        "q_offset": queries - torch.arange(len(queries), device=device),
        "kv_offset": keys - torch.arange(len(keys), device=device),
    }
    build: Callable[..., Any] = sdpa_mask  # its annotations know neither vectors nor that no mask is skipped here
    mask: Tensor = build(
        batch_size=batch_size,
        q_length=len(queries),
        kv_length=len(keys),
        mask_function=mask_function,
        attention_mask=None,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
        **offsets,
    )
    return mask


@dataclass(frozen=True, eq=False)
class PathMask:
    """The prefix trees of a batch, for masks along their paths."""

    positions: Tensor  # ``[batch, seq]``, the position of each token on its path
    subtree_end: Tensor  # ``[batch, seq]``, the index after the last descendant of each token in pre-order

    @cached_property
    def runs(self) -> tuple[QueryRun, ...]:
        """The runs of a batch with one row; no runs for a larger batch."""
        return query_runs(self.subtree_end[0]) if len(self.subtree_end) == 1 else ()

    def along_paths(self, mask_function: Any) -> Any:
        """Return a mask function of row indices from a layer's mask function, which compares positions."""
        from transformers.masking_utils import and_masks

        positions, subtree_end = self.positions, self.subtree_end
        return and_masks(
            lambda b, h, q, k: mask_function(b, h, positions[b, q], positions[b, k]),
            lambda b, h, q, k: (k <= q) & (q < subtree_end[b, k]),
        )


def build_masks_along_paths(current: ContextVar[PathMask | None], implementations: Iterable[str]) -> None:
    """Let transformers' own mask functions build masks along the paths of prefix trees, if the batch has trees."""
    # The registered functions are wrapped, once per process; without trees nothing changes. The
    # model's implementation of attention keeps its name, because some models compare it with known names.
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in implementations:
        build = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not isinstance(build, _BuildAlongPaths):
            AttentionMaskInterface.register(name, _BuildAlongPaths(build, current))
            if name == "sdpa":
                AttentionInterface.register(name, partial(attend_in_runs, ALL_ATTENTION_FUNCTIONS[name]))


@dataclass(frozen=True)
class _BuildAlongPaths:
    """A mask function of ``AttentionMaskInterface``, wrapped for the trees of the current batch."""

    build: Callable[..., Any]
    current: ContextVar[PathMask | None]

    def __call__(self, *, q_length: int, kv_length: int, **options: Any) -> Any:
        """Build a mask."""
        trees = self.current.get()
        # A vision tower's masks are bidirectional, over its own patches.
        bidirectional = "allow_is_bidirectional_skip" in options
        if trees is None or (bidirectional and q_length != trees.subtree_end.shape[1]):
            return self.build(q_length=q_length, kv_length=kv_length, **options)
        if bidirectional:
            raise ModelError("bidirectional attention cannot share prefixes: a prefix depends on later tokens")
        if not q_length == kv_length == trees.subtree_end.shape[1]:
            raise LayoutError(
                f"attention from {q_length} to {kv_length} tokens, but the row with shared prefixes has "
                f"{trees.subtree_end.shape[1]} tokens: only self-attention without a cache can share prefixes"
            )
        causal = is_causal_mask_function(options["mask_function"])
        options |= {
            "mask_function": trees.along_paths(options["mask_function"]),
            "attention_mask": None,
            "allow_is_causal_skip": False,
        }
        mask = self.build(q_length=q_length, kv_length=kv_length, **options)
        remember_runs(mask, trees.runs, causal=causal)
        return mask


def is_causal_mask_function(mask_function: Any) -> bool:
    """Return True for transformers' plain causal mask function, which is not exported either."""
    from transformers.masking_utils import causal_mask_function

    return mask_function is causal_mask_function


def fake_tensors_are_data() -> AbstractContextManager[None]:
    """Let transformers treat fake tensors as tensors with data, as it does in training."""
    # transformers takes fake tensors for a traced graph, and then builds attention masks that a real run skips.
    utilities = sys.modules.get("transformers.utils.import_utils")
    return nullcontext() if utilities is None else swapped(utilities, is_fake_tensor=lambda _tensor: False)


def chunks_count_the_row(config: Any) -> bool:
    """Return True if transformers counts a model's chunks of attention over a packed row and not per document."""
    # Releases before ``remap_positions_for_packed_sequence``, 5.10 among them.
    from transformers import masking_utils

    types = getattr(config.get_text_config(), "layer_types", None) or ()
    return "chunked_attention" in types and not hasattr(masking_utils, "remap_positions_for_packed_sequence")
