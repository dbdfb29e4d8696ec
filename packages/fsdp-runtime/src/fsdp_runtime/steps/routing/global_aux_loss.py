"""The auxiliary loss of a mixture over the global batch, in place of the loss of one rank's rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat.models import asks_for, computes_balancing_loss
from fsdp_runtime.errors import ModelError, OptionError, RoutesError
from fsdp_runtime.sharded.collectives import all_reduce_over
from fsdp_runtime.steps.routing.balance import batch_groups
from fsdp_runtime.wrap import effects_of, hook_forward, hook_model

_EFFECT = "returns the auxiliary loss of the global batch"


class GlobalAuxLoss:
    """Let a mixture return the auxiliary loss of the global batch for ``output_router_logits=True``.

    A model of transformers computes its auxiliary loss from one rank's rows, and the mean over ranks is not the loss of
    the batch: it balances every rank's rows alone.  With this object the outputs ``aux_loss`` and ``loss`` of every
    forward with gradients are the same on all data-parallel ranks as in one process with all rows.  The coefficient is
    the model's.  Gradients are complete after the mean over data-parallel ranks.  A forward has one all-reduce of
    ``2 * experts + 1`` numbers for each data-parallel axis.  A forward without gradients keeps the loss of its rows.

    The micro-batches of an accumulation are one batch if they run inside :meth:`counting` before.

    Args:
        model: a decoder of transformers with router logits, plain or parallelized, with or without adapters.

    Raises:
        ModelError: the class computes no such loss, or by another formula (at the first forward).

    Source: Z. Qiu et al., arXiv:2501.11873; Megatron-LM's ``global_aux_loss``.

    Example:
        >>> import torch, transformers
        >>> from fsdp_runtime.steps import GlobalAuxLoss
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=2, num_local_experts=4,
        ... )
        >>> model = transformers.MixtralForCausalLM(config)
        >>> aux_loss, micro_batches = GlobalAuxLoss(model), torch.randint(32, (2, 3, 5)).unbind()
        >>> options = {"output_router_logits": True, "use_cache": False}
        >>> with aux_loss.counting(), torch.no_grad():
        ...     for rows in micro_batches:
        ...         _ = model(rows, **options)
        >>> for rows in micro_batches:
        ...     (model(rows, labels=rows, **options).loss / len(micro_batches)).backward()
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_model(model)
        if not computes_balancing_loss(base):
            raise ModelError(f"{type(base).__name__} computes no auxiliary loss from router logits: use RouterBalance")
        if _EFFECT in effects_of(base):
            raise ModelError(f"{type(base).__name__} has a GlobalAuxLoss already: use it, or a fresh model")
        self._model, self._base = model, base
        self._mask: Tensor | None = None
        self._asked = self._is_counting = self._is_checked = False
        self._groups: list[ProcessGroup] = []
        self._counted: list[Tensor] = []
        self._batch: tuple[Tensor, int] | None = None  # sums of counted micro-batches over all ranks, and their number
        self._remaining = 0  # counted micro-batches that have not run with gradients yet
        trunk = getattr(base, base.base_model_prefix)
        hook_forward(trunk, "keeps the mask of the auxiliary loss", before=self._keep_mask)
        hook_model(model, _EFFECT, self._begin, self._replace)

    def __getstate__(self) -> dict[str, Any]:
        """Leave process groups out of copies of the model."""
        return {**self.__dict__, "_groups": []}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the micro-batches of one accumulation before they run with gradients.  Collective at the end.

        The next forwards with gradients, as many as were counted, are micro-batches of one batch.  The mean of their
        auxiliary losses is the loss of the batch, if routers select as in the counted forwards: same parameters, same
        rows, no dropout or router noise.  A pass for old log-probabilities serves.

        Raises:
            RoutesError: no forward inside had ``output_router_logits=True``.
        """
        self._counted, self._is_counting, self._remaining = [], True, 0
        try:
            yield
        finally:
            self._is_counting = False
        if not self._counted:
            raise RoutesError("no forward inside counting() had router logits: pass output_router_logits=True")
        local = torch.stack(self._counted).sum(0)
        self._remaining = len(self._counted)
        self._batch = all_reduce_over(batch_groups(self._model), local, dist.ReduceOp.SUM), self._remaining

    def _keep_mask(self, _module: nn.Module, _args: Any, kwargs: Any) -> None:
        self._mask = kwargs.get("attention_mask")

    def _begin(self, _module: nn.Module, _args: Any, kwargs: Any) -> None:
        self._asked = asks_for(self._base, kwargs, "router_logits")

    def _replace(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        mask, self._mask = self._mask, None
        if not self._asked or output is None:  # the forward raised
            return output
        local: Any = getattr(output, "aux_loss", None)
        if isinstance(output, tuple):
            raise OptionError(
                f"return_dict=False beside output_router_logits of {type(self._base).__name__}: leave return_dict out, "
                "so that the auxiliary loss has a name"
            )
        is_mixture = isinstance(local, Tensor)  # else no block of the model is one
        if not is_mixture or not (self._is_counting or (torch.is_grad_enabled() and local.requires_grad)):
            return output
        rows, config = output.router_logits[0].shape, self._base.config.get_text_config()
        if mask is not None and mask.numel() != rows[0]:
            raise ModelError(
                f"router logits {tuple(rows)} of {type(self._base).__name__} are not [tokens, experts] for a mask "
                f"{tuple(mask.shape)}: use output_router_logits=False"
            )
        top_k = getattr(config, "num_experts_per_tok", 0) or self._base.num_experts_per_tok
        sums = _sums(output.router_logits, mask, top_k)
        self._check_formula(local, sums)
        if self._is_counting:
            self._counted.append(sums.detach())
            return output
        loss = self._global_loss(sums).to(local.dtype)
        if getattr(output, "loss", None) is not None:
            # The gradients of the model's own term cancel at ``local`` to zeros.
            (coefficient,) = torch.autograd.grad(output.loss, local, retain_graph=True)
            output.loss = output.loss + coefficient * (loss - local)
        output.aux_loss = loss
        return output

    def _global_loss(self, sums: Tensor) -> Tensor:
        self._groups = groups = self._groups or batch_groups(self._model)
        experts, of_rank = len(sums) // 2, sums[len(sums) // 2 : -1]
        total = all_reduce_over(groups, sums.detach().clone(), dist.ReduceOp.SUM)
        batch, count = total, 1
        if self._remaining and self._batch is not None:
            self._remaining -= 1
            batch, count = self._batch
        # A rank has the gradient of its tokens, and gradients are divided by the number of ranks.
        ranks = math.prod(group.size() for group in groups)
        probabilities = total[experts:-1] + ranks * (of_rank - of_rank.detach())
        return experts * count * (batch[:experts] * probabilities).sum() / batch[-1].square()

    def _check_formula(self, local: Tensor, sums: Tensor) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        actual, experts = local.detach(), len(sums) // 2
        loads, probabilities = sums[: 2 * experts].detach().view(2, experts)
        expected = experts * (loads * probabilities).sum() / sums[-1].detach().square()
        if not torch.allclose(actual.double(), expected.double(), rtol=1e-4, equal_nan=True):
            raise ModelError(
                f"aux_loss of {type(self._base).__name__} is {float(actual):.6g}, and the loss of its router logits is "
                f"{float(expected):.6g}: the class has another formula; use output_router_logits=False"
            )


def _sums(router_logits: Sequence[Tensor], mask: Tensor | None, top_k: int) -> Tensor:
    """Return sums over layers of ``[tokens, experts]``, as in transformers' loss: ``[2 * experts + 1]``."""
    # The tokens that selected each expert, the probabilities of each expert, and the tokens. A masked token counts 0.
    first = router_logits[0]
    shape = (len(first), 1)
    weights = torch.ones(shape, device=first.device) if mask is None else mask.reshape(shape).to(first.device)
    weights = weights.float()
    loads = probabilities = torch.zeros(first.shape[-1], dtype=weights.dtype, device=first.device)
    for logits in router_logits:
        scores = logits.to(first.device).softmax(-1)
        selected = scores.topk(top_k, dim=-1).indices
        loads = loads.scatter_add(0, selected.flatten(), weights.expand_as(selected).flatten())
        probabilities = probabilities + (scores.float() * weights).sum(0)
    return torch.cat([loads, probabilities, len(router_logits) * weights.sum()[None]])
