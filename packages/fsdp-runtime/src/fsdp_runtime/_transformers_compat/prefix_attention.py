"""Attention of a row of prefix trees: a run of queries at a time, against the keys on the run's path only.

Under one mask of the full row, attention computes the scores of every response with every other response.  A run
is a part of the row without a branch inside, in most cases one response.  A run sees its ancestors and its own tokens,
so ``G`` responses to one prompt need ``P**2 / 2 + G * R * (P + R)`` scores instead of ``(P + G * R)**2``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

#: The number of scores that take as long as one more call of attention.
_CALL = 128 * 128
#: The most tokens of a run with ancestors: attention computes its scores above the diagonal, too.
_LONGEST = 512
#: The attribute of a mask with its runs: recomputation passes the mask again, after the trees are forgotten.
_RUNS = "_fsdp_runtime_runs"
#: Options of attentions that torch's function cannot compute.
_FURTHER = ("position_bias", "cache", "softcap", "s_aux")


@dataclass(frozen=True)
class QueryRun:
    """Neighbouring queries, and the keys that any of the queries sees."""

    start: int
    stop: int  # the index after the last one
    keys: tuple[tuple[int, int], ...]  # ranges: ancestors of the first query, and the queries' own
    chain: bool  # each query is the parent of the next query

    @property
    def is_root(self) -> bool:
        """True if the run's mask is plain causal."""
        return self.chain and self.keys == ((self.start, self.stop),)

    def of_queries(self, values: Tensor) -> Tensor:
        """Return ``[batch, heads, queries, *]`` of ``[batch, heads, seq, *]``."""
        return values.narrow(2, self.start, self.stop - self.start)

    def of_keys(self, values: Tensor, dim: int = 2) -> Tensor:
        """Return the entries of the run's keys on a dim."""
        parts = [values.narrow(dim, start, stop - start) for start, stop in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def query_runs(subtree_end: Tensor) -> tuple[QueryRun, ...]:
    """Divide a row with a ``subtree_end`` ``[seq]`` into runs; waits for the device, once per forward."""
    ends = subtree_end.cpu()
    length = len(ends)
    index = torch.arange(length)
    after_leaf = (index[1:][ends[:-1] == index[1:]]).tolist()
    merged: list[tuple[int, int, Tensor, bool]] = []
    for start, stop in zip([0, *after_leaf], [*after_leaf, length], strict=True):
        ancestors = index[:start][ends[:start] > start]
        step = _LONGEST if len(ancestors) else stop - start
        for first in range(start, stop, step):
            last = min(first + step, stop)
            seen = torch.cat([ancestors, index[start:first]])
            if merged:
                begin, end, of_begin, _ = merged[-1]
                separate = (end - begin) * (len(of_begin) + end - begin) + (last - first) * (len(seen) + last - first)
                # The later run's ancestors before `begin` are ancestors of `begin`, too: the order is a pre-order.
                if (last - begin) * (len(of_begin) + last - begin) <= separate + _CALL:
                    merged[-1] = (begin, last, of_begin, False)
                    continue
            merged.append((first, last, seen, True))
    return tuple(
        QueryRun(start, stop, _ranges(torch.cat([ancestors, index[start:stop]])), chain)
        for start, stop, ancestors, chain in merged
    )


def _ranges(indices: Tensor) -> tuple[tuple[int, int], ...]:
    gaps = (indices.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *gaps.tolist(), len(indices)]
    return tuple((int(indices[begin]), int(indices[end - 1]) + 1) for begin, end in pairwise(bounds))


def remember_runs(mask: Any, runs: tuple[QueryRun, ...], *, causal: bool) -> None:
    """Keep the runs with the mask of a layer; ``causal`` if the mask is plain causal along a path."""
    if len(runs) > 1 and isinstance(mask, Tensor):
        setattr(mask, _RUNS, (runs, causal))


def attend_in_runs(
    attend: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Compute attention by the runs of its mask, or in one call under a mask without runs."""
    # ``attend`` is a function of ``transformers.AttentionInterface``. Backward gathers the keys of each run again, so
    # that no copy of the keys stays in memory.
    runs, causal = getattr(attention_mask, _RUNS, ((), False))
    plain = query.shape[2] == key.shape[2] and not any(options.get(name) is not None for name in _FURTHER)
    if not runs or not plain or attention_mask.shape[1] != 1 or torch.compiler.is_compiling():
        return attend(module, query, key, value, attention_mask, **options)
    recompute = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    outputs = []
    for run in runs:
        if causal and run.is_root:
            inputs = [run.of_queries(tensor) for tensor in (query, key, value)]
            outputs.append(attend(module, *inputs, None, **{**options, "is_causal": True})[0])
        elif recompute:
            random = bool(options.get("dropout"))
            arguments = (query, key, value, attention_mask, options, run)
            outputs.append(checkpoint(_attend_run, *arguments, use_reentrant=False, preserve_rng_state=random))
        else:
            outputs.append(_attend_run(query, key, value, attention_mask, options, run))
    return torch.cat(outputs, dim=1), None


def _attend_run(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any], run: QueryRun
) -> Tensor:
    """Attend from the queries of a run under their part of the mask, as ``[batch, queries, heads, head_dim]``."""
    queries, keys, values = run.of_queries(query), run.of_keys(key), run.of_keys(value)
    visible = run.of_keys(run.of_queries(mask), dim=3)
    count = queries.shape[2]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # a group's queries form one longer head, so no key is repeated
        queries = torch.unflatten(queries, 1, (key.shape[1], groups)).flatten(2, 3)
        visible = visible.repeat(1, 1, groups, 1)
    output = functional.scaled_dot_product_attention(
        queries, keys, values, visible, dropout_p=options.get("dropout", 0.0), scale=options.get("scaling")
    )
    if groups > 1:
        output = torch.unflatten(output, 2, (groups, count)).flatten(1, 2)
    return output.transpose(1, 2)
