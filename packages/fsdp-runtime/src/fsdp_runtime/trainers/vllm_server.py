"""TRL's client of a vLLM server, for a model that is sharded: it streams full weights, and sends prompts of dp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fsdp_runtime.trainers._trl_compat import global_of, replaced
from fsdp_runtime.weights import stream_weights


def server_generation(trainer_class: type) -> type:
    """Return TRL's ``VLLMGeneration`` with the weights of :func:`fsdp_runtime.stream_weights`."""
    base: Any = global_of(trainer_class, "VLLMGeneration")

    class MeshGeneration(base):
        """Prompts of the ranks of one ``tp`` group are asked for once."""

        def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
            """Iterate over full weights by their names in the checkpoint, adapters merged; collective."""
            yield from stream_weights(self.model)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            """Generate for the prompts of all ranks of ``dp``."""
            with replaced(base, {"gather_object": self.accelerator.gather_objects}):
                return super().generate(*args, **kwargs)

    return MeshGeneration
