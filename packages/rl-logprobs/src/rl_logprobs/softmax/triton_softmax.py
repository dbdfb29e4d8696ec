"""Statistics of logits by Triton kernels: two launches and one collective forward, two launches backward.

``reduce_kernel`` reads the logits once, and ``finish_kernel`` combines the ranks.  ``coefficient_kernel`` turns the
gradients of statistics to factors of a token, and ``gradient_kernel`` writes the gradient of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import assert_on_device
from rl_logprobs.softmax.backends import kernels_check
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions, TargetColumns
from rl_logprobs.softmax.torch_kernels import target_logits
from rl_logprobs.softmax.triton_backend import (
    KERNELS,
    TOKENS,
    blocks,
    gradient_options,
    kernel_output,
    launch,
    most_units,
    note_write,
    per_token,
    reduce_options,
    rows_of,
)
from rl_logprobs.softmax.vocab_parallel import Gradients, TokenStatistics, all_gather
from rl_logprobs.softmax.vocab_shard import VocabColumns

#: The fields of ``TokenStatistics``: names of arguments; the first three are differentiable.
FIELDS = ("logprobs", "logsumexp", "entropy", "argmax", "target_rank")


@dataclass(frozen=True)
class Launcher:
    """The launches of one call on logits or tiles of logits, with the kernels' arguments that they share."""

    shard: VocabColumns
    ignore_index: int
    options: SoftmaxOptions
    dtype: torch.dtype  # of the statistics
    temperatures: dict[str, Any]  # the kernels' arguments of the temperature

    def _tokens(self, ids: torch.Tensor) -> dict[str, Any]:
        return {"targets": ids, "tokens": ids.numel(), "ignore_index": self.ignore_index, **self.temperatures}

    def new_state(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the sums of each token, and the number that a kernel sets to 0 for a wrong target."""
        fields = 3 + self.options.entropy + self.options.argmax + self.options.target_rank
        state = torch.empty(fields, ids.numel(), dtype=torch.float64, device=ids.device)
        return state, torch.ones((), dtype=torch.int32, device=ids.device)

    def reduce(
        self, logits: torch.Tensor, ids: torch.Tensor, state: torch.Tensor, first_token: int = 0, **arguments: Any
    ) -> None:
        """Reduce logits ``[..., width or more]`` of the tokens from ``first_token`` into ``state``."""
        options = self.options
        arguments |= {**self._tokens(ids), "state": state, "min_logits": options.min_logit}
        arguments |= {"ENTROPY": options.entropy, "ARGMAX": options.argmax, "RANK": options.target_rank}
        arguments |= reduce_options(self.dtype, arguments["width"], units=most_units(options))
        for rows in rows_of(logits, first_token=first_token):
            arguments |= {**rows.arguments(logits=""), "CONTIGUOUS": rows.contiguous}
            if options.inplace_forward:
                arguments["weights"] = rows.tensors[0]
            launch(KERNELS, "reduce_kernel", (rows.number,), ids.device, vocab_size=self.shard.vocab_size, **arguments)

    def check(self, valid: torch.Tensor) -> None:
        """Fail on the device if a kernel has found a wrong target."""
        if kernels_check(valid.device):
            message = f"a target is outside [0, {self.shard.vocab_size}) and is not {self.ignore_index}"
            assert_on_device(valid, message)

    def finish(self, state: torch.Tensor, ids: torch.Tensor) -> tuple[TokenStatistics, torch.Tensor]:
        """Exchange the ranks' sums in one collective, and return the statistics and totals ``[3 or 4, tokens]``."""
        group, options, device = self.shard.group, self.options, ids.device

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(ids.shape, dtype=dtype, device=device)

        statistics = TokenStatistics(
            empty(self.dtype),
            empty(self.dtype),
            empty(self.dtype) if options.entropy else None,
            empty(torch.int64) if options.argmax else None,
            empty(torch.int64) if options.target_rank else None,
        )
        totals = torch.empty(3 + options.entropy, ids.numel(), dtype=torch.float64, device=device)
        arguments = self._tokens(ids) | dict(zip(FIELDS, statistics, strict=True))
        arguments |= {"totals": totals, "WIDE": self.dtype, "BLOCK": TOKENS}
        arguments |= {"ENTROPY": options.entropy, "ARGMAX": options.argmax, "RANK": options.target_rank}
        gathered, ranks = (state, 1) if group is None else (all_gather(state, group), dist.get_world_size(group))
        grid = (blocks(ids.numel(), TOKENS),)
        launch(KERNELS, "finish_kernel", grid, device, gathered=gathered, ranks=ranks, **arguments)
        return statistics, totals

    def coefficients(
        self, totals: torch.Tensor, ids: torch.Tensor, gradients: Gradients, local_max: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``[3, tokens]``, the factors of the gradient; for logits overwritten relative to ``local_max``."""
        factors = torch.empty(3, ids.numel(), dtype=self.dtype, device=ids.device)
        arguments = {**self._tokens(ids), "totals": totals, "local_max": local_max, "coefficients": factors}
        for name, gradient in zip(FIELDS[:3], gradients[:3], strict=True):
            arguments[f"d_{name}"], arguments[f"{name}_stride"] = per_token(gradient)
        grid = (blocks(ids.numel(), TOKENS),)
        launch(KERNELS, "coefficient_kernel", grid, ids.device, **arguments, WIDE=self.dtype, BLOCK=TOKENS)
        return factors

    def write(
        self, logits: torch.Tensor, out: torch.Tensor, ids: torch.Tensor, first_token: int = 0, **arguments: Any
    ) -> None:
        """Write the gradient of logits ``[..., columns]`` of the tokens from ``first_token`` to ``out``."""
        columns, options = out.shape[-1], gradient_options(self.dtype, out.shape[-1])
        arguments |= {**self._tokens(ids), **options, "out_width": columns}
        for rows in rows_of(logits, out, first_token=first_token) if out.numel() else ():
            arguments |= {**rows.arguments(logits="", out="out_"), "CONTIGUOUS": rows.contiguous}
            grid = rows.number, blocks(columns, options["BLOCK"])
            launch(KERNELS, "gradient_kernel", grid, ids.device, **arguments)


class TritonLogits(Launcher):
    """Statistics of the full softmax, of the shape of the ids, from this rank's columns of any strides."""

    # The ids are checked on the device. Tokens with ``ignore_index`` get 0 and no gradient, whatever their logits.

    def statistics(
        self, tensors: tuple[Any, ...], needed: Sequence[bool]
    ) -> tuple[TokenStatistics, Sequence[torch.Tensor | None]]:
        """Return the statistics of logits and ids, with the tensors to save."""
        logits, ids = tensors
        shard, options = self.shard, self.options
        state, valid = self.new_state(ids)
        greater_than = None
        if options.target_rank and shard.group is not None:  # one rank holds the target's logit
            columns = TargetColumns.locate(ids.view(-1), ids.view(-1) == self.ignore_index, shard.start, shard.width)
            local_logits = target_logits(logits[..., : shard.width], columns)
            greater_than = all_gather(local_logits[None], shard.group).sum(0)[0]
        overwritten = kernel_output(logits) if options.inplace_forward else logits
        place = {"width": shard.width, "start": shard.start}
        self.reduce(overwritten, ids, state, greater_than=greater_than, valid=valid, **place)
        if overwritten is not logits:
            logits.copy_(overwritten)
        if options.inplace_forward:
            note_write(logits)
        self.check(valid)
        statistics, totals = self.finish(state, ids)
        # Autograd refuses to return a saved input that is a view made by another function and has been overwritten.
        saved = (logits.detach(), ids, state) if options.inplace_forward else (logits, ids, None)
        return statistics, (*saved, totals)

    def gradients(self, saved: Sequence[Any], needed: Sequence[bool], gradients: Gradients) -> Gradients:
        """Return the gradient of the logits."""
        logits, ids, local, totals = saved
        options = self.options
        out = logits if options.inplace_backward or options.inplace_forward else logits.new_empty(logits.shape)
        written = kernel_output(out)
        arguments: dict[str, Any] = {"width": self.shard.width, "start": self.shard.start}
        arguments |= {"ENTROPY": gradients[2] is not None}
        if local is None:
            arguments |= {"totals": totals, "min_logits": options.min_logit}
        factors = self.coefficients(totals, ids, gradients, local)
        self.write(logits, written, ids, coefficients=factors, **arguments)
        if written is not out:
            out.copy_(written)
        if out is logits:
            note_write(out)
        return out, None
