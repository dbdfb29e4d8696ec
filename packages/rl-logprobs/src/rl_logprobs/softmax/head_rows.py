"""Rows of an LM head for columns that other ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import all_gather_single
from rl_logprobs.errors import PlacementError
from rl_logprobs.softmax.vocab_shard import VocabColumns


def head_rows(parts: Sequence[torch.Tensor], held: VocabColumns, wanted: VocabColumns) -> list[torch.Tensor]:
    """Return the rows ``wanted`` of a weight (and a bias); this rank holds the rows ``held``."""
    # Views if one rank holds all rows, the parts themselves if both have the same shards. Otherwise the ranks of the
    # holder's group call together and send each other the wanted rows: one collective per part. An earlier collective
    # sends a few integers, and the host waits for these.
    if held.group is None:
        return [part[wanted.start : wanted.start + wanted.width] for part in parts]
    if sharded_alike(held, wanted):
        return list(parts)
    rank, ranks = dist.get_rank(held.group), dist.get_world_size(held.group)
    if rank < 0:
        raise PlacementError(
            f"the head is sharded over ranks {dist.get_process_group_ranks(held.group)}, and this rank is none of "
            f"them; bring the head to the student's ranks"
        )
    extents = torch.tensor([held.start, held.width, wanted.start, wanted.width], device=parts[0].device)
    gathered = extents.new_empty(ranks * 4)
    all_gather_single(gathered, extents, held.group)
    table = gathered.view(ranks, 4).tolist()
    _check_disjoint([(start, start + width) for start, width, _, _ in table if width], held.vocab_size)
    sent = [_overlap(held.start, held.width, *row[2:]) for row in table]
    received = [_overlap(wanted.start, wanted.width, *row[:2]) for row in table]
    order = sorted(range(ranks), key=lambda index: table[index][0])
    return [_exchange(part, held, sent, received, order) for part in parts]


def _exchange(
    part: torch.Tensor,
    held: VocabColumns,
    sent: Sequence[tuple[int, int]],
    received: Sequence[tuple[int, int]],
    order: Sequence[int],
) -> torch.Tensor:
    """Send each rank its rows ``(start, length)``, and return the received ones in the ascending order of ids."""
    received_rows = part.new_empty(sum(length for _, length in received), *part.shape[1:])
    rows = torch.cat([part[start - held.start : start - held.start + length] for start, length in sent])
    into, out_of = ([length for _, length in extents] for extents in (received, sent))
    dist.all_to_all_single(received_rows, rows, into, out_of, group=held.group)
    if order == sorted(order):
        return received_rows
    by_rank = torch.split(received_rows, into)
    return torch.cat([by_rank[index] for index in order])


def sharded_alike(held: VocabColumns, wanted: VocabColumns) -> bool:
    """Return whether both have the same shards; all ranks of a group get the same answer."""
    if held.group is None or wanted.group is None:
        return False
    ranks = [dist.get_process_group_ranks(columns.group) for columns in (held, wanted)]
    return ranks[0] == ranks[1] and (held.start, held.width) == (wanted.start, wanted.width)


def _check_disjoint(ranges: Sequence[tuple[int, int]], vocab_size: int) -> None:
    ends = [0, *(end for _, end in sorted(ranges))]
    if [start for start, _ in sorted(ranges)] != ends[:-1] or ends[-1] != vocab_size:
        raise PlacementError(
            f"the ranks hold the head's rows {sorted(ranges)}, which are not each of {vocab_size} once; give "
            f"VocabShard the right start"
        )


def _overlap(start: int, length: int, other_start: int, other_length: int) -> tuple[int, int]:
    """Return start and length of the overlap of two ranges."""
    first = max(start, other_start)
    return first, max(0, min(start + length, other_start + other_length) - first)
