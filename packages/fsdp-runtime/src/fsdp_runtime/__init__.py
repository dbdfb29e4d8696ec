"""Everything between a model and a running mesh: plans applied, FSDP2, weights in and out.

Mesh:        ``MeshSpec``, ``adopt_mesh``, ``submesh``
Parallelize: ``parallelize``, ``FSDP2``, ``SelectiveCheckpoint``, ``ContextAttention``, ``describe_parallelism``,
             ``resolve_parallelism``, ``Parallelism``
Train:       ``sequence_layout``, ``forward_with_lm_head``, ``no_sync``, ``unsharded``, ``offload``, ``onload``,
             ``assert_inputs_equal``, ``assert_finite_gradients``, ``assert_replicas_equal``
Routes:      ``record_routes``, ``replay_routes``, ``Routes``, ``routes_from_generator``
Weights:     ``meta_device``, ``materialize``, ``load_weights``, ``save_weights``, ``stream_weights``,
             ``init_adapters``, ``load_adapter``, ``save_adapter``
Resume:      ``save_training_state``, ``load_training_state``, ``TrainingState``
Errors:      ``FsdpRuntimeError``, and of its subclasses ``BackendError``, ``GradientError``, ``LayoutError``,
             ``MeshError``, ``ModelError``, ``OptionError``, ``WeightsError``; all are in ``fsdp_runtime.errors``

Rooms with a table of their own are imported by name, such as ``fsdp_runtime.dry_run``: ``batching``, ``dry_run``,
``mesh``, ``meters``, ``model``, ``monitor``, ``sync``, ``trainers``, ``weights``.  The modules below may move.

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

    __getattr__, __dir__ = lazy_names(__name__, "fsdp_runtime._api", renamed={"FSDPOptions": "FSDP2"})
