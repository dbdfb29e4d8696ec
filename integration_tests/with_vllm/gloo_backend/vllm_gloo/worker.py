"""The engine's side of the gloo backend: weights arrive apart, and replace the model's only when all are there.

Imported by vLLM's workers alone.  vLLM writes an update into the model as it arrives; here a worker first tries the
names and shapes on meta tensors, then receives everything into host memory, then loads it.  Until then the engine
serves its old weights, so that a trainer that dies, stalls or sends what does not fit leaves it as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import base

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sync.broadcast import unflatten_bucket
from vllm_gloo.gloo_group import GlooGroup, join_group
from vllm_gloo.messages import GlooInit, GlooUpdate, buckets, dtype_name
from vllm_gloo.reload import load_into, try_on_meta

logger = logging.getLogger(__name__)

_FULL_PRECISION = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Weights = list[tuple[str, Tensor]]


class _Init(GlooInit, base.WeightTransferInitInfo):
    """How this worker joins the trainer's group."""


class _Update(GlooUpdate, base.WeightTransferUpdateInfo):
    """A part of an update."""


class GlooWeightTransferEngine(base.WeightTransferEngine):
    """vLLM's worker side of the backend ``gloo``; see :class:`vllm_gloo.EngineSync`."""

    init_info_cls, update_info_cls = _Init, _Update
    supports_draft_weight_update = False

    _group: GlooGroup | None = None
    _expected: GlooUpdate | None = None
    _fitting: GlooUpdate | None = None
    _arrived: Weights | None = None
    _current: Weights | None = None
    _before: Weights | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Join the trainer's group, instead of any earlier one."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._leave()
        self._group = join_group(
            init_info.master_address,
            init_info.master_port,
            worker + init_info.rank_offset,
            init_info.world_size,
            init_info.timeout_s,
            init_info.group,
        )

    def start_weight_update(self) -> None:
        """Forget what arrived before and was not applied."""
        self._expected = self._arrived = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do one part of an update; see :meth:`receive_weights`."""
        # The base class synchronizes an accelerator afterwards, which a CPU is not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Do one part of an update, and report to the trainer what became of it.

        Nothing is raised where the trainer can be told: of several workers that fail, vLLM's executor takes the first
        one's answer alone, and hands those of the others out as answers to later calls (0.32, and 0.33 unless it is set
        to be fault-tolerant).
        """
        group = self._group
        if group is None or group.name != update_info.group:
            return  # of another trainer; the one that asks hears no report
        parts = {"check": self._check, "receive": self._receive, "apply": self._apply, "undo": self._undo}
        problem = ""
        try:
            parts[update_info.action](update_info, group)
        except Exception as error:
            logger.warning("weight update, part %s: %s", update_info.action, error)
            problem = str(error) or type(error).__name__
        with suppress(Exception):  # a trainer that died is told nothing
            group.report(update_info.number, problem)

    def finish_weight_update(self) -> None:
        """End an update; vLLM's session cannot end in an error here, so that nothing is left to do."""

    def shutdown(self) -> None:
        """Leave the group."""
        self._expected = self._arrived = None
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _check(self, update: GlooUpdate, group: GlooGroup) -> None:
        weights, self._before = update.weights(), None
        if getattr(self.model_config, "quantization", None) is None:
            for weight in weights:
                if weight.dtype.is_floating_point and weight.dtype not in _FULL_PRECISION:
                    raise WeightSyncError(
                        f"{weight.name} has dtype {dtype_name(weight.dtype)}, and the engine is not quantized: it "
                        "would read the values without their scales"
                    )
        if self._fitting is None or update.tensors != self._fitting.tensors:
            try_on_meta(self.model, self.model_config, weights, self.parallel_config.tensor_parallel_size)
            self._fitting = update
        self._expected = update

    def _receive(self, update: GlooUpdate, group: GlooGroup) -> None:
        if self._expected is None:
            raise WeightSyncError("nothing was announced to this worker: start the update anew")
        self._arrived = list(_incoming(group, self._expected))

    def _apply(self, update: GlooUpdate, group: GlooGroup) -> None:
        if self._arrived is None:
            raise WeightSyncError("no weights arrived at this worker: start the update anew")
        self._before, arrived, self._arrived = self._current, self._arrived, None
        try:
            load_into(self.model, self.model_config, arrived)
        except BaseException as error:
            if self._before is None:
                raise WeightSyncError(f"this worker has no usable weights until the next update: {error}") from error
            load_into(self.model, self.model_config, self._before)
            self._before = None
            raise
        self._current = arrived

    def _undo(self, update: GlooUpdate, group: GlooGroup) -> None:
        if self._before is not None:
            load_into(self.model, self.model_config, self._before)
            self._current, self._before = self._before, None


def _incoming(group: GlooGroup, update: GlooUpdate) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets(update.weights(), update.bucket_bytes):
        flat = torch.empty(sum(weight.nbytes for weight in bucket), dtype=torch.uint8)
        group.broadcast(flat)
        yield from unflatten_bucket(bucket, flat)
