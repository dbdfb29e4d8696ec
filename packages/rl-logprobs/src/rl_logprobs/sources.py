"""Sources of logits: a tensor, or hidden states and an LM head; each source is located on its mesh and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from rl_logprobs._torch_compat import all_gather_single
from rl_logprobs.errors import DtypeError, OptionError, PlacementError, ShapeError
from rl_logprobs.kept_tokens.entries import KeptEntries, kept_statistics, kept_targets
from rl_logprobs.kept_tokens.kept_logits import kept_linear_logits, kept_logits
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.sampling_filter import SamplingFilter, min_kept_logit
from rl_logprobs.softmax.backends import Backend, runs_triton
from rl_logprobs.softmax.fused_linear import HeadReducer, LMHead, product_dtype
from rl_logprobs.softmax.log2_scale import TemperatureScale
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.tile_pair import Side
from rl_logprobs.softmax.triton_backend import temperatures_of
from rl_logprobs.softmax.triton_linear import TritonHead
from rl_logprobs.softmax.triton_softmax import Launcher, TritonLogits
from rl_logprobs.softmax.vocab_parallel import LogitReducer, TokenStatistics, statistics_by
from rl_logprobs.softmax.vocab_shard import (
    LocalLogits,
    TokenSlice,
    VocabColumns,
    VocabShard,
    columns_of_dtensor,
    columns_of_plain,
    token_slice,
)
from rl_logprobs.targets import Targets
from rl_logprobs.tensors import require_same_device, statistics_dtype


@dataclass(frozen=True)
class LogitSource(LocalLogits):
    """Logits as a source of statistics, under a sampler's filter."""

    sampling: SamplingFilter | None = None
    backend: Backend = "torch"
    inplace_backward: bool = False

    def full_statistics(self, targets: Targets, options: SoftmaxOptions) -> TokenStatistics:
        """Return flat statistics over the full vocabulary."""
        min_logit = min_kept_logit(self.values, self.vocab, options.temperature, self.sampling)
        options = options if min_logit is None else replace(options, min_logit=min_logit)
        dtype = statistics_dtype(self.values.dtype)
        if self.backend == "triton":
            temperatures = temperatures_of(options.temperature, self.values.device)
            kernels = TritonLogits(self.vocab, targets.ignore_index, options, dtype, temperatures)
            return statistics_by(kernels, self.values, targets.ids.contiguous())
        reducer = LogitReducer(self.vocab, options, TemperatureScale.of(options.temperature, dtype))
        return statistics_by(reducer, self.values, targets.ids.reshape(-1), targets.ignored.reshape(-1))

    def entry_logits(self, entries: KeptEntries) -> torch.Tensor:
        """Return the logits of kept entries."""
        return kept_logits(self.values, entries, self.vocab, inplace_backward=self.inplace_backward)

    def side(self, temperature: float | torch.Tensor) -> Side:
        """Return these logits as one side of a divergence."""
        return Side((self.values,), self.vocab, temperature)

    def reference_side(self, tokens: TokenSlice, vocab: VocabColumns, temperature: float | torch.Tensor) -> Side:
        """Return the logits of other tokens and columns, without gradient, as the other side of a divergence."""
        values, shard = tokens_of(self.values.detach(), self.tokens, tokens), self.vocab
        if shard.group is None:
            values = values[..., vocab.start : vocab.start + vocab.width]
        elif not _sharded_alike(shard, vocab):
            raise PlacementError(
                f"this rank holds the teacher's logits of ids {shard.start} to {shard.start + shard.width} over ranks "
                f"{dist.get_process_group_ranks(shard.group)} and the student's of {vocab.start} to "
                f"{vocab.start + vocab.width}; shard both vocabularies the same way, give the teacher's logits in "
                f"full, or its hidden states and head as LinearLogits"
            )
        return Side((values,), vocab, temperature)


@dataclass(frozen=True, eq=False)
class LinearLogits:
    """The logits ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``, computed tile by tile.

    Example:
        >>> import torch
        >>> from rl_logprobs import LinearLogits, token_divergence
        >>> student, teacher = torch.nn.Linear(4, 9), torch.nn.Linear(6, 9)
        >>> pair = LinearLogits(torch.ones(5, 4), student.weight), LinearLogits(torch.ones(5, 6), teacher.weight)
        >>> token_divergence(*pair).shape
        torch.Size([5])
    """

    # ``[batch, seq, features]`` or ``[tokens, features]``, as ``linear_token_statistics`` takes them
    hidden: torch.Tensor
    # ``[vocab, features]``: plain, a DTensor with its rows sharded over one axis, or, with ``shard``, a part
    weight: torch.Tensor
    bias: torch.Tensor | None = None  # ``[vocab]``, with the placements of the weight's rows
    logit_scale: float = 1.0  # factor on the products
    softcap: float | None = None  # positive bound of the logits
    # which ids the rows of a local weight are, or how many ids are no padding; see ``VocabShard``
    shard: VocabShard | None = None

    @classmethod
    def of(cls, hidden: torch.Tensor, head: Any, shard: VocabShard | None = None) -> LinearLogits:
        """Return the logits of a head with ``weight``, ``bias``, ``logit_scale`` and ``softcap``.

        Example:
            Within ``fsdp_runtime.forward_with_lm_head(model, function, tokens)``:
            ``def function(hidden, head): return token_divergence(LinearLogits.of(hidden, head), teacher)``.
        """
        return cls(hidden, head.weight, head.bias, head.logit_scale, head.softcap, shard)

    def located(self) -> HeadSource:
        """Check everything that follows from shapes and placements, and return the source of statistics.

        Raises:
            LogprobsError: as ``linear_token_statistics`` of hidden states and head.
        """
        _check_operands(self.hidden, self.weight, self.bias)
        require_same_device(hidden=self.hidden, weight=self.weight, bias=self.bias)
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise OptionError(f"softcap must be positive and finite, got {self.softcap}; leave it out for no cap")
        if not math.isfinite(self.logit_scale):
            raise OptionError(f"logit_scale must be finite, got {self.logit_scale}")
        vocab = _locate_weight(self.weight, self.shard)
        tokens = TokenSlice.all_of(self.hidden.shape[:-1])
        if isinstance(self.hidden, DTensor):  # after the gather
            vocab_dim = _vocab_mesh_dim(self.hidden, vocab.group)
            tokens = token_slice(self.hidden, _gathered_placements(self.hidden, vocab_dim))
        return HeadSource(self, tokens, vocab)


@dataclass(frozen=True, eq=False)
class HeadSource:
    """Hidden states and an LM head as a source of statistics."""

    logits: LinearLogits
    tokens: TokenSlice
    vocab: VocabColumns

    def full_statistics(self, targets: Targets, options: SoftmaxOptions) -> TokenStatistics:
        """Return flat statistics over the full vocabulary."""
        operands, head = self._gathered()
        dtype, ignore_index = product_dtype(*operands[:2]), targets.ignore_index
        reducer = HeadReducer(head, ignore_index, options, dtype)
        if runs_triton(operands[0].device):
            temperatures = temperatures_of(options.temperature, operands[0].device)
            launcher = Launcher(self.vocab, ignore_index, options, dtype, temperatures)
            reducer = TritonHead(head, ignore_index, options, dtype, launcher)
        return statistics_by(reducer, *operands, targets.ids.contiguous())

    def entry_logits(self, entries: KeptEntries) -> torch.Tensor:
        """Return the logits of kept entries."""
        operands, head = self._gathered()
        return kept_linear_logits(*operands, entries, head)

    def side(self, temperature: float | torch.Tensor) -> Side:
        """Return these logits as one side of a divergence."""
        operands, head = self._gathered()
        return Side(operands, self.vocab, temperature, head)

    def reference_side(self, tokens: TokenSlice, vocab: VocabColumns, temperature: float | torch.Tensor) -> Side:
        """Return the logits of other tokens and columns, without gradient, as the other side of a divergence."""
        # A head that is sharded otherwise sends its rows to the ranks that need them.
        states, _ = _gather_tokens(self.logits.hidden.detach(), self.vocab.group)
        states = tokens_of(states, self.tokens, tokens)
        parts = [part.detach() for part in self._local_head() if part is not None]
        weight, *bias = _head_rows(parts, self.vocab, vocab)
        operands = states.reshape(-1, states.shape[-1]), weight, bias[0] if bias else None
        return Side(operands, vocab, temperature, self._head(vocab))

    def _gathered(self) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], LMHead]:
        """Return hidden states of all tokens and this rank's rows of the head, and the computation of its logits."""
        rows, reduce_hidden_grad = _gather_tokens(self.logits.hidden, self.vocab.group)
        head = self._head(self.vocab, reduce_hidden_grad=reduce_hidden_grad)
        return (rows.reshape(-1, rows.shape[-1]), *self._local_head()), head

    def _head(self, vocab: VocabColumns, *, reduce_hidden_grad: bool = True) -> LMHead:
        scale, softcap = self.logits.logit_scale, self.logits.softcap
        return LMHead(vocab, float(scale), None if softcap is None else float(softcap), reduce_hidden_grad)

    def _local_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = self.logits.weight, self.logits.bias
        return (
            weight.to_local() if isinstance(weight, DTensor) else weight,
            bias.to_local() if isinstance(bias, DTensor) else bias,
        )


#: The sources of logits.
Source = LogitSource | HeadSource


def score(source: Source, targets: Targets, kept_tokens: KeptTokens | None, options: SoftmaxOptions) -> TokenStatistics:
    """Return the statistics of a rank's targets, over the full vocabulary or over kept sets, in their shape."""
    if kept_tokens is None:
        statistics = source.full_statistics(targets, options)
    else:
        scored = kept_targets(kept_tokens, source.tokens, targets, source.vocab.vocab_size)
        statistics = kept_statistics(source.entry_logits(scored.entries), scored, options)
    shape = targets.ids.shape
    shaped = (value if value is None or value.shape == shape else value.view(shape) for value in statistics)
    return TokenStatistics(*shaped)  # type: ignore[arg-type]  # the first two are always there


def tokens_of(values: torch.Tensor, held: TokenSlice, wanted: TokenSlice) -> torch.Tensor:
    """Return the teacher's values ``[..., columns]`` of the student's tokens: all, or a part of a full batch."""
    same_batch = held.full == wanted.full and wanted.full != wanted.shape
    if held.shape == wanted.shape and not (same_batch and held.offset != wanted.offset):
        return values
    if held.shape == wanted.full:
        return wanted.local(values)
    raise ShapeError(
        f"the teacher has tokens {held.shape} from {held.offset} of {held.full} on this rank, and the student "
        f"{wanted.shape} from {wanted.offset} of {wanted.full}; give its values for the same tokens, or for the "
        f"full batch"
    )


def _check_operands(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise DtypeError(f"{name} must be floating point, got {tensor.dtype}")
    if hidden.dim() < 2 or 0 in hidden.shape[:-1]:
        raise ShapeError(f"hidden must be [..., tokens, features] with at least one token, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ShapeError(
            f"weight must be [vocab, {hidden.shape[-1]}] for hidden {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is None:
        return
    if isinstance(bias, DTensor) != isinstance(weight, DTensor) or bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"bias {tuple(bias.shape)} must have one element per row of weight {tuple(weight.shape)}, and both must be "
            f"DTensors or both local"
        )
    if isinstance(bias, DTensor) and isinstance(weight, DTensor) and bias.placements != weight.placements:
        raise PlacementError(
            f"bias has {bias.placements} and weight {weight.placements}; give them the same placements"
        )


def _locate_weight(weight: torch.Tensor, shard: VocabShard | None) -> VocabColumns:
    if not isinstance(weight, DTensor):
        return columns_of_plain(weight.shape[0], shard)
    sharded = sum(not isinstance(placement, Replicate) for placement in weight.placements)
    if sharded > 1 or weight.to_local().shape[1] != weight.shape[1]:
        raise PlacementError(
            f"weight has {weight.placements}; only its rows may be sharded, over one axis (the vocabulary's), "
            f"so call this while an FSDP head is unsharded (module.unshard(), or inside forward)"
        )
    return columns_of_dtensor(weight, 0, shard)


def _vocab_mesh_dim(hidden: DTensor, group: dist.ProcessGroup | None) -> int | None:
    """Return the dim of hidden's mesh with the ranks of the vocabulary's group; None without a group."""
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    mesh = hidden.device_mesh
    for dim in range(mesh.ndim):
        if dist.get_process_group_ranks(mesh.get_group(dim)) == ranks:
            return dim
    raise PlacementError(
        f"the weight's vocabulary is sharded over ranks {ranks}, which hidden's mesh {mesh} has no axis for; place "
        f"hidden on a mesh with that axis, or pass its local tensor"
    )


def _gathered_placements(hidden: DTensor, vocab_dim: int | None) -> list[Placement]:
    """Return hidden's placements after the gather over the vocabulary's axis."""
    placements = list(hidden.placements)
    if vocab_dim is not None:
        placements[vocab_dim] = Replicate()
    for placement in placements:
        if isinstance(placement, Partial) or getattr(placement, "dim", 0) % hidden.dim() == hidden.dim() - 1:
            raise PlacementError(
                f"hidden has {hidden.placements}; every rank must hold all features of its tokens, so "
                f"redistribute it to Replicate() or to a shard of the tokens"
            )
    return placements


def _gather_tokens(hidden: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, bool]:
    """Return hidden states of all tokens of the vocabulary's group, and whether their gradient needs an all-reduce."""
    # The gradient of gathered tokens is returned as a partial sum, which the backward pass of the gather
    # reduce-scatters.
    if not isinstance(hidden, DTensor):
        return hidden, True
    vocab_dim = _vocab_mesh_dim(hidden, group)
    placements = _gathered_placements(hidden, vocab_dim)
    if vocab_dim is None or not isinstance(hidden.placements[vocab_dim], Shard):
        return hidden.redistribute(placements=placements).to_local(), True
    grad_placements = [Partial() if dim == vocab_dim else placement for dim, placement in enumerate(placements)]
    return hidden.redistribute(placements=placements).to_local(grad_placements=grad_placements), False


def _head_rows(parts: Sequence[torch.Tensor], held: VocabColumns, wanted: VocabColumns) -> list[torch.Tensor]:
    """Return the rows ``wanted`` of a weight (and a bias); this rank holds the rows ``held``."""
    # Views if one rank holds all rows, the parts themselves if both have the same shards. Otherwise the ranks of the
    # holder's group call together and send each other the wanted rows: one collective per part. An earlier collective
    # sends a few integers, and the host waits for these.
    if held.group is None:
        return [part[wanted.start : wanted.start + wanted.width] for part in parts]
    if _sharded_alike(held, wanted):
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


def _sharded_alike(held: VocabColumns, wanted: VocabColumns) -> bool:
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
    first = max(start, other_start)
    return first, max(0, min(start + length, other_start + other_length) - first)
