"""One row of prefix trees: inputs, masks, predicting tokens, and values by sample.

The tokens of a prefix tree are in pre-order: every token comes after its ancestors, and the descendants of a token
follow it without a gap.  So one number per token, the end of its subtree, decides whether token ``k`` is on the path to
token ``q``: ``k <= q < subtree_end[k]``.  Sequences in lexicographic order visit the tokens of their tree in pre-order:
each sequence adds the tokens after its longest common prefix with the previous sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_runtime.errors import ModelError, SampleError
from fsdp_runtime.steps.context.exchange import sum_over_ranks
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.documents.shared_prefixes import takes_shared_prefixes


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
        shared = common_prefix_length(previous, sequence)
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


def common_prefix_length(one: Tensor, other: Tensor) -> int:
    """Return the number of equal tokens at the beginning of two sequences."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


#: A mask function for ``flex_attention``: of batch, head, query and key index.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class GroupMember(NamedTuple):
    """The key of a sample: its group, and its index in the group; equal to the plain tuple."""

    group: int
    sample: int


@dataclass(frozen=True, eq=False)
class TreeRow:
    """One row of prefix trees in pre-order, padded on the right; :func:`fsdp_runtime.batching.pack_tree` makes it.

    A token before several branches predicts the first token of each branch.  So a shift does not give the
    log-probabilities: the token at index ``predictors[i]`` predicts entry ``i`` of :attr:`targets`.

    Example:
        >>> import torch
        >>> from fsdp_runtime.batching import pack_tree
        >>> (row,) = pack_tree([[[5, 6, 8], [5, 6, 9]]], budget=4).rows()
        >>> row.mask()[0, 0].int()  # the last token does not see the third
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 0, 1]], dtype=torch.int32)
        >>> logits = torch.zeros(1, 4, 10)
        >>> logprobs = row.select(logits).log_softmax(-1).gather(-1, row.targets[:, None])[:, 0]
        >>> {tuple(key): part.tolist() for key, part in row.unpack(logprobs).items()}[(0, 1)]
        [-2.302585..., -2.302585..., 0.0]
    """

    samples: tuple[GroupMember, ...]  # the keys of the row's samples
    # for each sample ``[length]`` int64: the indices of its tokens in the full row, for values per token, such as the
    # routes of a mixture
    paths: tuple[Tensor, ...]
    input_ids: Tensor  # ``[1, seq]`` int64
    position_ids: Tensor  # ``[1, seq]`` int64: the position of each token on its path; 0 for padding
    subtree_end: Tensor  # ``[1, seq]`` int64: the index in the full row after the last descendant of each token
    predictors: Tensor  # ``[scored]`` int64: for each token that counts in the loss, the index of the token before it
    # ``[scored]`` int64: the ids of the tokens that count in the loss; one entry ``-100`` on a rank that predicts no
    # token
    targets: Tensor
    # ``[all lengths + 1]`` int64: for each token of each sample, the index of the next token's entry among the full
    # row's entries, or the number of entries if the next token has no entry; the last is that number
    way_back: Tensor
    # ``[scored]`` int64: each entry's index among the full row's entries, after :meth:`shard`; else ``None``
    slots: Tensor | None = None

    def inputs(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the inputs of a model's forward, by name.

        Args:
            model: a model that was parallelized with the step ``SharedPrefixes``.

        Raises:
            ModelError: the model lacks this step and would ignore the branches.
        """
        if not takes_shared_prefixes(model):
            raise ModelError(
                f"{type(model).__name__} would ignore the branches of a row: parallelize it with "
                "steps=(SharedPrefixes(),)"
            )
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "subtree_end": self.subtree_end}

    def mask_mod(self, own: MaskFunction | None = None) -> MaskFunction:
        """Return the mask of ancestors as a ``mask_mod`` of ``flex_attention``, for a model with custom attention.

        Args:
            own: a layer's further mask, of batch, head and two *positions*, such as a sliding window.
        """
        positions, subtree_end = self.position_ids, self.subtree_end

        def ancestors(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (query < subtree_end[batch, key])
            return seen if own is None else seen & own(batch, head, positions[batch, query], positions[batch, key])

        return ancestors

    def mask(self, own: MaskFunction | None = None) -> Tensor:
        """Return the mask of ancestors for ``scaled_dot_product_attention``, ``[1, 1, seq, seq]`` bool.

        Args:
            own: a layer's further mask, as in :meth:`mask_mod`.
        """
        index = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        zero = index[:1].view(1, 1, 1, 1)
        return self.mask_mod(own)(zero, zero, index.view(1, 1, -1, 1), index.view(1, 1, 1, -1))

    def select(self, values: Tensor) -> Tensor:
        """Return the logits or hidden states ``[scored, features]`` that predict :attr:`targets`, differentiable.

        Args:
            values: ``[1, seq, features]``, plain or a DTensor; sharded tokens are gathered, features stay sharded.

        Raises:
            SampleError: ``values`` does not have one value for each token of the row.
        """
        if values.dim() != 3 or tuple(values.shape[:2]) != tuple(self.input_ids.shape):
            raise SampleError(f"values {tuple(values.shape)} for a row of {tuple(self.input_ids.shape)} tokens")
        if not isinstance(values, DTensor):
            return values[0].index_select(0, self.predictors)
        sharded = [placement.is_shard(2) for placement in values.placements]
        gathered = values.redistribute(
            placements=[p if keep else Replicate() for p, keep in zip(values.placements, sharded, strict=True)]
        )
        return DTensor.from_local(
            gathered.to_local()[0].index_select(0, self.predictors),
            values.device_mesh,
            [Shard(1) if keep else Replicate() for keep in sharded],
            run_check=False,
            shape=torch.Size((len(self.predictors), values.shape[2])),
            stride=(values.shape[2], 1),
        )

    def unpack(self, values: Tensor, *, group: ProcessGroup | None = None) -> dict[Hashable, Tensor]:
        """Return the values of each sample, such as log-probabilities; samples share the values of shared tokens.

        Args:
            values: ``[scored]``, a value per entry of :attr:`targets`.
            group: the context-parallel ranks of a sharded row: one all-reduce in forward sums their values (none in
                backward: all ranks are assumed to compute the same function of the result).

        Returns:
            ``[length]`` for each sample: entry ``t`` is about token ``t + 1`` and 0 if that token does not count in the
            loss, as in ``rl_logprobs.token_logprobs(..., shift=True)`` for this sample only.

        Raises:
            SampleError: ``values`` does not have one value for each entry, or a sharded row has no ``group``.
        """
        if tuple(values.shape) != tuple(self.targets.shape):
            raise SampleError(f"values {tuple(values.shape)} for {len(self.targets)} targets: give one per target")
        if (self.slots is None) != (group is None):
            raise SampleError("unpack needs the group of cp for a sharded row, and no group for a full row")
        count = self._scored
        extended = torch.cat([values, values.new_zeros(1)])
        if self.slots is not None:
            extended = values.new_zeros(count + 1).index_add(0, self.slots, values)
            extended = sum_over_ranks(extended, group)
        parts = torch.split(extended.index_select(0, self.way_back[:-1]), [len(path) for path in self.paths])
        return dict(zip(self.samples, parts, strict=True))

    def shard(self, layout: SequenceLayout) -> TreeRow:
        """Return this rank's ``seq / cp`` tokens of a row, and the targets that they predict; no communication.

        Args:
            layout: ``sequence_layout(mesh, row.input_ids.shape[1])``.

        Raises:
            LayoutError: the layout has another length.
            SampleError: the row is sharded already.
        """
        if self.slots is not None:
            raise SampleError("the row is sharded already: shard the row of pack_tree")
        local: dict[str, Any] = {
            name: layout.shard(getattr(self, name)) for name in ("input_ids", "position_ids", "subtree_end")
        }
        if layout.ranks == 1:
            return self
        index_of = torch.full((layout.length,), -1, device=self.predictors.device)
        index_of[layout.positions.to(index_of.device)] = torch.arange(len(layout.positions), device=index_of.device)
        predictors = index_of[self.predictors]
        slots = (predictors >= 0).nonzero()[:, 0]
        targets, predictors = self.targets[slots], predictors[slots]
        if not len(slots):  # on a rank without targets the loss is still a function of its tokens
            slots, predictors, targets = self.targets.new_tensor([[self._scored], [0], [-100]])
        return replace(self, **local, predictors=predictors, targets=targets, slots=slots)

    def to(self, device: torch.device | str) -> TreeRow:
        """Return the row with its tensors on a device."""
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, paths=tuple(path.to(device) for path in self.paths), **moved)

    @property
    def _scored(self) -> int:
        return int(self.way_back[-1])


def tree_row(
    samples: Sequence[GroupMember],
    trees: Sequence[PrefixTree],
    scored_of: Sequence[Tensor],
    padded: Callable[[int], int],
    padding_id: int,
) -> TreeRow:
    """Return the row of the given trees, or of padding only; ``padded`` maps a number of tokens to a length."""
    # ``scored_of`` are ``[length]`` bool for each sample: the tokens that count in the loss.
    starts = [*accumulate((len(tree.token_ids) for tree in trees), initial=0)]
    length = padded(starts[-1])
    padding = torch.arange(starts[-1], length)
    located = list(zip(trees, starts, strict=False))
    ids = torch.cat([*(tree.token_ids for tree in trees), torch.full_like(padding, padding_id)])
    positions = torch.cat([*(tree.positions for tree in trees), torch.zeros_like(padding)])
    ends = torch.cat([*(tree.subtree_end + start for tree, start in located), padding + 1])
    paths = tuple(path + start for tree, start in located for path in tree.paths)
    scored = torch.zeros(length, dtype=torch.bool)
    before = torch.zeros(length, dtype=torch.int64)
    for path, counts in zip(paths, scored_of, strict=True):
        scored[path[counts]] = True
        before[path[1:]] = path[:-1]
    targets, predictors = ids[scored], before[scored]
    if not len(targets):  # a loss over no tokens is still a function of the row
        predictors, targets = torch.tensor([0]), torch.tensor([-100])
    count = len(targets)
    slot_of = torch.where(scored, scored.cumsum(0) - 1, count)
    last = torch.tensor([count])
    way_back: list[Tensor] = []
    for path, counts in zip(paths, scored_of, strict=True):
        way_back += [torch.where(counts, slot_of[path], count)[1:], last]
    return TreeRow(
        samples=tuple(samples),
        paths=paths,
        input_ids=ids[None],
        position_ids=positions[None],
        subtree_end=ends[None],
        predictors=predictors,
        targets=targets,
        way_back=torch.cat([*way_back, last]),
    )
