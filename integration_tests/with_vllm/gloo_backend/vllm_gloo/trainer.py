"""The gloo backend for ``WeightTransferTrainerFactory``, for trainers that have vLLM in their environment.

Imported by that factory alone.  Without vLLM, use :class:`~vllm_gloo.EngineSync` itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer import base

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sync.vllm_source import WeightSource
from vllm_gloo.plugin import BACKEND
from vllm_gloo.report import EngineSyncReport
from vllm_gloo.sync import EngineSync


@dataclass
class GlooTrainerInitInfo(base.TrainerInitInfo):
    """Where the trainer is, and how many workers the engine has.

    Args:
        world_size: the engine's workers.
        address: this machine, as they reach it.
        timeout_s: seconds after which an operation that a worker misses fails.
        rank: this process's rank among the trainer's.
    """

    backend: ClassVar[str] = BACKEND

    world_size: int
    address: str = "127.0.0.1"
    timeout_s: float = 60.0


class GlooTrainerWeightTransferEngine(base.TrainerWeightTransferEngine):
    """vLLM's trainer side of the backend ``gloo``."""

    init_info_cls = GlooTrainerInitInfo
    sync: EngineSync

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None) -> Any:
        """Return an engine for this rank; the group with the workers is formed by the first update."""
        if not isinstance(source, WeightSource):
            raise OptionError("source: give a fsdp_runtime.sync.WeightSource")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.sync = EngineSync(
            source,
            client if init_info.is_sender else None,
            address=init_info.address,
            timeout_s=init_info.timeout_s,
            world_size=init_info.world_size,
        )
        engine.versions = itertools.count(1)
        return engine

    def send_weights(self) -> EngineSyncReport:
        """Update the engine; versions are numbered from 1.  Called on every rank of the trainer."""
        return self.sync.update(str(next(self.versions)))

    def shutdown(self) -> None:
        """Leave the group with the workers."""
        self.sync.close()
