"""Everything between a model and a running mesh: plans applied, FSDP2, weights in and out.

Mesh:        ``MeshSpec``, ``adopt_mesh``, ``submesh``
Parallelize: ``parallelize``, ``FSDP2``, ``resolve_parallelism``, ``describe_parallelism``
Train:       ``sequence_layout``, ``forward_with_lm_head``, ``no_sync``, ``unsharded``, ``offload``, ``onload``,
             ``assert_inputs_equal``, ``assert_finite_gradients``, ``assert_replicas_equal``
Routes:      ``record_routes``, ``replay_routes``
Weights:     ``meta_device``, ``materialize``, ``load_weights``, ``save_weights``, ``stream_weights``,
             ``init_adapters``, ``load_adapter``, ``save_adapter``
Resume:      ``save_training_state``, ``load_training_state``
Errors:      ``FsdpRuntimeError``, and of its subclasses ``BackendError``, ``GradientError``, ``LayoutError``,
             ``MeshError``, ``ModelError``, ``OptionError``, ``WeightsError``; all are in ``fsdp_runtime.errors``

Rooms with their own table are imported by name, such as ``fsdp_runtime.dry_run``: ``batching``, ``dry_run``,
``mesh``, ``meters``, ``model``, ``monitor``, ``optim``, ``steps``, ``sync``, ``trainers``,
``weights``.  Other modules may move.

A name is imported at its first use: the command line refuses wrong arguments, and prints its help and version, before
torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fsdp_runtime._api import *  # noqa: F403
    from fsdp_runtime._api import __all__ as __all__
else:
    from fsdp_runtime._lazy import lazy_names

    #: The successors of names of earlier versions.
    _MOVED = {
        "ContextAttention": "fsdp_runtime.steps.ContextAttention",
        "FSDPOptions": "fsdp_runtime.FSDP2",
        "Parallelism": "fsdp_runtime.parallelism.Parallelism",
        "Routes": "fsdp_runtime.steps.Routes",
        "SelectiveCheckpoint": "fsdp_runtime.steps.SelectiveCheckpoint",
        "TrainingState": "fsdp_runtime.training_state.TrainingState",
        "routes_from_generator": "fsdp_runtime.steps.routes_from_generator",
    }
    __getattr__, __dir__ = lazy_names(__name__, "fsdp_runtime._api", moved=_MOVED)
