"""Every use of NeMo Automodel's private API, with its reason; tested on nemo-automodel 0.7.0.

- ``get_model_parallelizer(model)`` takes ``type(model).parallelizer``, an object with ``parallelize(model,
  mesh_context)``; classes without the attribute get Automodel's default.  The attribute is Automodel's contract for
  Automodel's classes; here ``PreTrainedModel`` gets it, and a class with the attribute keeps it.
- ``MeshContext`` has ``device_mesh`` over ``pp, dp_replicate, dp_shard, cp, tp``, ``moe_mesh`` over ``pp, ep_shard,
  ep``, ``strategy_config`` (an ``FSDP2Config``), ``moe_parallel_config``, ``activation_checkpointing`` and
  ``reapply_trainability``.
- Recipes back-propagate the loss of a rank times ``dp * cp``: gradients are means over both axes.
- ``ContextParallelSharder(model, device_mesh, batch)`` calls ``model.prepare_model_inputs_for_cp(batch, num_chunks=1)``
  for a sharder; its ``shard_batch(cp_mesh, tp_mesh, batch, loss_mask, padding_token_id)`` returns a factory of
  contexts, the batch and a ``ShardLayout``.
- Recipes divide the gradients of DTensors on an axis ``ep`` by their own ratio of ranks; a parameter with the attribute
  ``_nemo_model_owned_grad_divisor`` is divided by its value.
- ``attach_context_parallel_hooks(model)`` removes attention masks: the model's own context parallelism is causal only.
- ``ModelSupports.supports_ep`` asks for one of Automodel's classes before a model is built with ``ep_size > 1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def set_parallelizer(cls: Any, parallelizer: Any) -> None:
    """Let Automodel shard the models of a class, and of its subclasses, by an object of ours."""
    cls.parallelizer = parallelizer


def keep_expert_gradients(model: nn.Module) -> None:
    """Let recipes take experts' gradients unchanged: they are complete, like all other gradients."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ()):
            parameter.__dict__["_nemo_model_owned_grad_divisor"] = 1.0


def keep_attention_masks(has_own_attention: Callable[[nn.Module], bool]) -> None:
    """Let recipes keep the masks of models with an attention that spans the ranks of ``cp`` itself."""
    from nemo_automodel.components.distributed.context_parallel import utils

    attach = utils.attach_context_parallel_hooks

    def attach_to_others(model: nn.Module) -> None:
        if not has_own_attention(model):
            attach(model)

    utils.attach_context_parallel_hooks = attach_to_others


def allow_expert_parallelism(parallelizer: Any, has_experts: Callable[[Any], bool]) -> None:
    """Let Automodel build models with experts and ``ep_size > 1`` that ``parallelizer`` shards."""
    from nemo_automodel._transformers.capabilities import ModelSupports

    own: Any = ModelSupports.supports_ep

    def supports_ep(self: Any) -> bool:
        ours = getattr(type(self._model), "parallelizer", None) is parallelizer
        return bool(own.fget(self)) or (ours and has_experts(self._model))

    ModelSupports.supports_ep = property(supports_ep, doc=own.__doc__)
