"""Rows of samples with common prefixes; a row holds each prefix once."""

from __future__ import annotations

import ctypes
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_runtime.batching.balance import Items
from fsdp_runtime.batching.micro_batches import MicroBatches, micro_batches_of
from fsdp_runtime.batching.packed_rows import PAIR_COST, Sample, read_samples, require_rows_long_enough, row_sizes
from fsdp_runtime.batching.tree_row import GroupMember, TreeRow, common_prefix_length, prefix_tree, tree_row
from fsdp_runtime.errors import SampleError

#: Bytes of a token id in a sample.
_ID_BYTES = 8


def pack_tree(
    groups: Sequence[Sequence[Tensor | Sequence[int]]],
    budget: int,
    *,
    ranks: int = 1,
    loss_masks: Sequence[Sequence[Tensor | Sequence[int]]] | None = None,
    cp: int = 1,
    multiple_of: int = 1,
    distinct_lengths: int = 8,
    pair_cost: float = PAIR_COST,
    padding_id: int = 0,
) -> MicroBatches[TreeRow]:
    """Pack groups of samples so that shared prefixes of a group are computed once.

    A prompt of ``P`` tokens with ``G`` responses of ``R`` tokens takes ``P + G * R`` tokens, not ``G * (P + R)``.  The
    samples of a group form a prefix tree, found from their tokens: responses to one prompt, turns of a conversation
    with several continuations, or equal samples.  Attention follows the paths of the tree, so log-probabilities,
    entropies and all gradients equal separate rows.  The key of a sample is ``(group, index in the group)``.

    The model must have been parallelized with the step ``SharedPrefixes``.

    Args:
        groups: for each group its samples, token ids ``[length]`` with the prompt included; the same on every rank.
        budget: the largest number of tokens that one rank holds in a micro-batch.  A tree that exceeds a row is
            divided, and its parts repeat the prefix.
        ranks: the number of data-parallel ranks, ``submesh(mesh, "dp").size()``.
        loss_masks: for each group and sample ``[length]``, nonzero for tokens that count in the loss (such as the
            response); all by default.  Logits are needed only at tokens that predict a counted token.
        cp: the size of the context-parallel axis: rows have up to ``budget * cp`` tokens; see ``TreeRow.shard``.
        multiple_of: a divisor of all lengths of rows.
        distinct_lengths: the largest number of different lengths of rows.
        pair_cost: the work of attention between two tokens, in units of the other work of a token.
        padding_id: the token id of padding.

    Raises:
        SampleError: a group is empty, a sample is longer than a row, or a loss mask has another length than its sample.
        OptionError: an option is out of range.

    Example:
        >>> from fsdp_runtime.batching import pack_tree
        >>> prompt = [5, 6, 7]
        >>> (row,) = pack_tree([[prompt + [8, 9], prompt + [10], prompt + [8, 11]]], budget=8).rows()
        >>> row.input_ids
        tensor([[ 5,  6,  7,  8,  9, 11, 10]])
        >>> row.position_ids
        tensor([[0, 1, 2, 3, 4, 4, 3]])
        >>> row.predictors.tolist(), row.targets.tolist()  # the prompt's last token predicts two tokens
        ([0, 1, 2, 3, 3, 2], [6, 7, 8, 9, 11, 10])
    """
    sizes = row_sizes(budget, ranks, cp, multiple_of, distinct_lengths=distinct_lengths, pair_cost=pair_cost)
    if not len(groups):
        raise SampleError("no groups: give one or more")
    if loss_masks is not None and len(loss_masks) != len(groups):
        raise SampleError(f"{len(groups)} groups and {len(loss_masks)} groups of loss masks: give one list per group")
    read: list[list[Sample]] = []
    parts: list[TreePart] = []
    for group, samples in enumerate(groups):
        members = read_samples(samples, None if loss_masks is None else loss_masks[group], f" of group {group}")
        require_rows_long_enough(
            [sample.length for sample in members], sizes.capacity, budget, cp, f" of group {group}"
        )
        read.append(members)
        parts += _divided(group, members, sizes.capacity)

    def make_row(items: Sequence[int]) -> TreeRow:
        chosen = [parts[item] for item in items]
        members = [GroupMember(part.group, member) for part in chosen for member in part.members]
        trees = [prefix_tree([read[part.group][member].token_ids for member in part.members]) for part in chosen]
        scored = [read[group][member].scored for group, member in members]
        return tree_row(members, trees, scored, sizes.padded, padding_id)

    work = [part.tokens + pair_cost * part.attended_pairs for part in parts]
    return micro_batches_of(Items([part.tokens for part in parts], work, sizes.capacity), ranks, make_row)


@dataclass
class TreePart:
    """Samples of a group with a prefix tree that fits into a row; the tree is built with its row."""

    group: int  # index of the group
    members: list[int]  # indices of the samples in the group
    tokens: int = 0  # tokens of the tree
    attended_pairs: int = 0  # pairs of a query and a key under causal attention


def _divided(group: int, samples: Sequence[Sample], capacity: int) -> list[TreePart]:
    """Divide a group's samples into parts with trees that fit into a row; neighbours share the longest prefixes."""
    parts: list[TreePart] = []
    keys = [ctypes.string_at(sample.token_ids.data_ptr(), _ID_BYTES * sample.length) for sample in samples]
    previous = torch.empty(0, dtype=torch.int64)
    for index in sorted(range(len(samples)), key=keys.__getitem__):  # common prefixes come together in any order of ids
        length, shared = samples[index].length, common_prefix_length(previous, samples[index].token_ids)
        if not parts or parts[-1].tokens + length - shared > capacity:
            parts.append(TreePart(group, []))
            shared = 0
        part, previous = parts[-1], samples[index].token_ids
        insort(part.members, index)
        part.tokens += length - shared
        part.attended_pairs += (length * (length + 1) - shared * (shared + 1)) // 2
    return parts
