"""NeMo RL's functions from ``nemo_rl.models.dtensor.parallelize``, with their names and signatures.

A user of NeMo RL changes one import line.  Results differ where the originals are wrong: vocabularies that are not a
multiple of the ranks, parameters that are replicated over tensor parallelism, bfloat16 gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_logprobs.context_parallel import gather_sequence, sequence_shard
from rl_logprobs.errors import OptionError, PlacementError
from rl_logprobs.logprobs import token_logprobs
from rl_logprobs.norms.grad_norm import clip_grads_with_norm_, grad_norm
from rl_logprobs.targets import next_token_targets


def to_local_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, without autograd; other tensors unchanged.

    Example:
        >>> import torch
        >>> from rl_logprobs.nemo import to_local_if_dtensor
        >>> to_local_if_dtensor(torch.ones(2))
        tensor([1., 1.])
    """
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_grad_norm(
    parameters: torch.Tensor | Sequence[torch.Tensor],
    dp_cp_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup,
    norm_type: int | float | str = 2,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return :func:`rl_logprobs.grad_norm` as a float: the host waits for it.

    The groups are unused, because a DTensor knows the ranks over which it is sharded.  ``dtype`` is unused too: the sum
    is always computed in float64.

    Example:
        >>> import torch
        >>> from rl_logprobs.nemo import get_grad_norm
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> get_grad_norm([weight], dp_cp_group=None, tp_group=None)
        5.0
    """
    del dp_cp_group, tp_group, dtype
    return grad_norm(parameters, float(norm_type)).item()


def clip_grad_by_total_norm_(
    parameters: torch.Tensor | Sequence[torch.Tensor],
    max_grad_norm: int | float,
    total_norm: float | torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Scale the gradients in place by ``max_grad_norm / (total_norm + 1e-6)`` if that is less than one.

    A NaN norm leaves the gradients as they are, as in NeMo RL; ``clip_grad_norm_`` turns them into NaN, as torch does.
    ``dtype`` is unused: the gradients themselves are scaled.

    Example:
        >>> import torch
        >>> from rl_logprobs.nemo import clip_grad_by_total_norm_
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_by_total_norm_([weight], 1.0, total_norm=5.0)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    del dtype
    if isinstance(total_norm, torch.Tensor):
        total_norm = total_norm.nan_to_num(nan=0.0, posinf=math.inf)
    elif math.isnan(total_norm):
        return
    clip_grads_with_norm_(parameters, max_grad_norm, total_norm)


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: torch.Tensor,
    seq_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probability of every token but the first, given the tokens before it.

    Args:
        vocab_parallel_logits: ``[batch, seq, vocab]``, the vocabulary sharded over ``tp`` and, with
            ``seq_index``, the sequence over ``cp``.
        input_ids: ``[batch, seq]`` integers.  With ``seq_index`` a DTensor sharded on the sequence over ``cp``, in the
            same order as the logits.
        seq_index: ``[seq]`` int64, the sequence position of each token, in the order in which ``cp`` shards them.

    Returns:
        ``[batch, seq - 1]`` in sequence order, float32, the same on all ranks of ``tp`` and ``cp``.

    Raises:
        OptionError: ``seq_index`` is given and the mesh has no axis ``cp``.
        PlacementError: ``seq_index`` is given and the ids are not a DTensor, or the logits' vocabulary is sharded over
            two mesh axes.
        ShapeError: the shapes of logits, ids and ``seq_index`` contradict each other.
        DtypeError: the logits are not floating point, or the ids are not integers.
        TargetError: an id is outside the vocabulary.

    Example:
        >>> import torch
        >>> from rl_logprobs.nemo import get_logprobs_from_vocab_parallel_logits
        >>> logits = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]])  # or a DTensor, on every rank
        >>> get_logprobs_from_vocab_parallel_logits(logits, torch.tensor([[0, 1]]))
        tensor([[-0.4076]])
    """
    if seq_index is None:
        return token_logprobs(vocab_parallel_logits, input_ids, shift=True)[:, :-1]
    mesh = vocab_parallel_logits.device_mesh
    if "cp" not in (mesh.mesh_dim_names or ()):
        raise OptionError(f"seq_index is for logits sharded over an axis named cp; the mesh has {mesh.mesh_dim_names}")
    if not isinstance(input_ids, DTensor):
        raise PlacementError("with seq_index, input_ids must be a DTensor sharded on the sequence over cp")
    group = mesh.get_group("cp")
    in_order = input_ids.full_tensor().index_select(1, seq_index.argsort())
    targets = sequence_shard(next_token_targets(in_order), seq_index, group)
    logprobs = token_logprobs(vocab_parallel_logits, targets)
    return gather_sequence(logprobs, seq_index, group)[:, :-1]
