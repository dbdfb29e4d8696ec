"""The steps of ``parallelize``: each class owns its options, their checks and their application.

Shard:    ``TensorParallel``, ``ExpertParallel``, ``ContextParallel``, ``FSDP2``
Stages:   ``Pipeline``, with ``forward_backward`` and ``forward_only`` for a model in stages
Rows:     ``PackedSequences``, ``SharedPrefixes``
Memory:   ``ActivationCheckpointing``, ``Quantized``
Speed:    ``Compile``, ``Float8``
Checks:   ``CheckInputs``
Your own: a subclass of ``Step``
Mixtures: ``RouterBalance`` and ``load_table``, ``GlobalAuxLoss``
Heads:    ``MultiTokenHeads``
Values:   ``SelectiveCheckpoint`` of a checkpointing step, ``ContextAttention`` of a model, ``Routes`` of a mixture and
          ``routes_from_generator``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_runtime._lazy import lazy_names

if TYPE_CHECKING:
    from fsdp_runtime.steps._api import *  # noqa: F403
    from fsdp_runtime.steps._api import __all__ as __all__
else:
    __getattr__, __dir__ = lazy_names(__name__, "fsdp_runtime.steps._api")
