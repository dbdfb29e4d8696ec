"""Build the prefix tree of token sequences, with its tokens in pre-order.

In pre-order every token comes after its ancestors, and the descendants of a token follow it without a gap.  So one
number per token, the end of its subtree, decides whether token ``k`` is on the path to token ``q``:
``k <= q < subtree_end[k]``.  Sequences in lexicographic order visit the tokens of their tree in pre-order: each
sequence adds the tokens after its longest common prefix with the previous sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The distinct prefixes of sequences: ``[tokens]`` int64 in pre-order."""

    token_ids: Tensor
    positions: Tensor  # the number of ancestors of each token
    subtree_end: Tensor  # the index after the last descendant of each token
    paths: tuple[Tensor, ...]  # for each sequence, the indices of its tokens


def prefix_tree(sequences: Sequence[Tensor]) -> PrefixTree:
    """Return the prefix tree of non-empty CPU sequences of int64 token ids; common prefixes are shared in full."""
    keys = [sequence.tolist() for sequence in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    added: list[Tensor] = []
    closed: list[tuple[Tensor, int]] = []  # tokens, and the index at which their subtrees end
    paths: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(sequences)
    path = paths[0]
    previous = sequences[order[0]][:0]
    depths: list[Tensor] = []
    total = 0
    for index in order:
        sequence = sequences[index]
        shared = _common_prefix_length(previous, sequence)
        closed.append((path[shared:], total))
        path = torch.cat([path[:shared], torch.arange(total, total + len(sequence) - shared)])
        added.append(sequence[shared:])
        depths.append(torch.arange(shared, len(sequence)))
        paths[index], previous, total = path, sequence, total + len(sequence) - shared
    closed.append((path, total))
    subtree_end = torch.empty(total, dtype=torch.int64)
    for tokens, end in closed:
        subtree_end[tokens] = end
    return PrefixTree(torch.cat(added), torch.cat(depths), subtree_end, tuple(paths))


def _common_prefix_length(one: Tensor, other: Tensor) -> int:
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
