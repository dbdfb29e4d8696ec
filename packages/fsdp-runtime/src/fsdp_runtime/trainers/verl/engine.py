"""The engine: verl's ``BaseEngine`` over ``parallelize``, for language models and for critics.

verl moves parameters, gradients and optimizer state to the host between phases.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_runtime import no_sync, offload, onload, stream_weights, submesh
from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded import first_rank_speaks
from fsdp_runtime.steps.pipeline.schedule import run_stages
from fsdp_runtime.sync import require_servable
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.trainers.stages import without_media
from fsdp_runtime.trainers.verl import checkpoints, export, verl_api
from fsdp_runtime.trainers.verl.config import check_configs, to_dtype
from fsdp_runtime.trainers.verl.micro_batches import cut, vocabulary_of
from fsdp_runtime.trainers.verl.model import build_module, optimizer_of, parallelized, scheduler_of, trained_parameters
from fsdp_runtime.trainers.verl.rows import Rows, idle_rows, nested_routes, recorded_or_replayed, rows_of, way_of
from fsdp_runtime.trainers.verl.scores import TokenScores, TokenValues

logger = logging.getLogger(__name__)


class FsdpRuntimeEngine(verl_api.BaseEngine):
    """The shared engine of both kinds of models, from verl's model, optimizer and checkpoint configs and its own."""

    value_head = False
    scorer: Any  # of a model: returns this rank's per-token values, by verl's names

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        check_configs(model_config, engine_config, optimizer_config, checkpoint_config)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.module: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self._away: set[Any] = set()  # names of the parts on the host
        self._adapter_is_off = False
        self._shards: export.Shards | None = None
        if engine_config.full_determinism:
            verl_api.enable_full_determinism(engine_config.seed)
        # verl's worker asks for ranks of dp before initialize().
        self.mesh = engine_config.axes.build(device_type=verl_api.get_device_name())
        self._dp = submesh(self.mesh, "dp")

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload) and not self.engine_config.offload_policy

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload) and not self.engine_config.offload_policy

    def get_data_parallel_rank(self) -> int:
        return self._dp.get_local_rank()

    def get_data_parallel_size(self) -> int:
        return self._dp.size()

    def get_data_parallel_group(self) -> Any:
        return self._dp.get_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank hands verl the outputs of the ranks that share its samples."""
        if (step := self.engine_config.pipeline) is not None:
            stages = self.mesh["pp"]
            if stages.get_local_rank() != step.stage_ranks(stages.size())[-1]:
                return False
        return all(int(self.mesh[axis].get_local_rank()) == 0 for axis in ("tp", "cp"))

    def initialize(self) -> None:
        """Build model, optimizer and schedule, and load the weights; a second call starts again."""
        module = build_module(self.model_config, self.engine_config, value_head=self.value_head)
        self.module = parallelized(module, self.mesh, self.model_config, self.engine_config, value_head=self.value_head)
        self.optimizer = self.lr_scheduler = self._shards = None
        if not self.engine_config.forward_only:
            self.optimizer = optimizer_of(self.module, self.optimizer_config)
            self.lr_scheduler = scheduler_of(self.optimizer, self.optimizer_config)
        self._away = set()
        self._saved: list[Path] = []
        self._scores = self.scorer(self.module)
        offloads, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to("cpu", model=offloads, optimizer=optimizer, grad=offloads)

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        return _Mode(self, "eval", **kwargs)

    def optimizer_zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _require_training(self) -> None:
        if self.optimizer is None:
            raise OptionError(
                "this engine is forward_only=True and has no optimizer: train the actor's or the critic's"
            )

    @first_rank_speaks()
    def optimizer_step(self) -> float:
        """Clip gradients and step, or skip the step if their norm is not finite; return the norm before clipping."""
        self._require_training()
        limit, parameters = self.optimizer_config.clip_grad, trained_parameters(self.module)
        norms = rl_logprobs()
        norm = norms.grad_norm(parameters) if limit is None else norms.clip_grad_norm_(parameters, limit)
        norm_value = float(norm)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            logger.warning("the norm of the gradients is %s: this step is skipped", norm_value)
            self.optimizer.zero_grad()
        return norm_value

    def lr_scheduler_step(self) -> float:
        """Advance the schedule and return the learning rate of the first group."""
        self._require_training()
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run verl's nested batch by micro-batches; return its dict of ``model_output``, ``loss`` and ``metrics``."""
        if not forward_only:
            self._require_training()
            if loss_function is None:
                raise OptionError("a backward needs a loss_function")
        words = vocabulary_of(self.model_config.hf_config)
        micro_batches = cut(data, self.get_data_parallel_group(), cp=self.engine_config.axes.cp, words=words)
        accumulates = self.engine_config.use_no_sync_for_gradient_accumulation
        keeps = forward_only or verl_api.tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        if self.engine_config.pipeline is not None:
            outputs, losses = self._scheduled(micro_batches, loss_function, forward_only)
            if not outputs:
                return {"model_output": {}, "loss": losses, "metrics": {}}
            if not keeps:
                outputs = [{**output, "model_output": {}} for output in outputs]
            return verl_api.postprocess_batch_func(output_lst=outputs, indices=micro_batches.indices, data=data)
        outputs = []
        for index in range(micro_batches.count):
            idle = index >= len(micro_batches.batches)
            syncs = forward_only or index == micro_batches.count - 1 or not accumulates
            with (
                torch.set_grad_enabled(not forward_only),
                nullcontext() if syncs else no_sync(self.module),
                torch.profiler.record_function(f"micro_batch{index}"),
            ):
                if idle:
                    loss = self._idle_loss(idle_rows(self.mesh, self.engine_config))
                    if not forward_only:
                        torch.autograd.backward(loss)
                    continue
                own = micro_batches.batches[index]
                loss, output = self._forward(own, self._rows(own), loss_function, forward_only)
                if not forward_only:
                    loss.backward()
            if not keeps:
                output.pop("model_output")
            outputs.append(output)
        return verl_api.postprocess_batch_func(output_lst=outputs, indices=micro_batches.indices, data=data)

    def _scheduled(
        self, micro_batches: Any, loss_function: Any, forward_only: bool
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """Run all micro-batches in pipeline stages; return the outputs on the last stage, and the losses."""
        own, idle = micro_batches.batches, micro_batches.count - len(micro_batches.batches)
        rows = [*map(self._rows, own), *([idle_rows(self.mesh, self.engine_config)] * idle)]
        outputs: dict[int, dict[str, Any]] = {}

        def last(index: int) -> Tensor:
            if index >= len(own):
                return self._idle_loss(rows[index])
            text = replace(rows[index], inputs=without_media(rows[index].inputs))
            loss, outputs[index] = self._forward(own[index], text, loss_function, forward_only)
            return loss

        losses = run_stages(self.module, [each.inputs for each in rows], last, backward=not forward_only)
        return [outputs[index] for index in sorted(outputs)], losses[: len(own)].tolist()

    def _rows(self, micro_batch: Any) -> Rows:
        packs = bool(self.model_config.use_remove_padding)
        return rows_of(micro_batch.to(verl_api.get_device_id()), self.mesh, self.engine_config, packs=packs)

    def _forward(
        self, micro_batch: Any, rows: Rows, loss_function: Any, forward_only: bool
    ) -> tuple[Any, dict[str, Any]]:
        micro_batch = micro_batch.to(verl_api.get_device_id())
        asked = verl_api.tensordict_utils.get_non_tensor_data(micro_batch, "enable_routing_replay", None)
        way = way_of(
            "disabled" if self._adapter_is_off else self.engine_config.router_replay.mode,
            forward_only=forward_only,
            has_loss=loss_function is not None,
            asked=asked,
        )
        with recorded_or_replayed(way, self.module, rows, micro_batch) as routes:
            scores = self._scores(rows, micro_batch, loss_function)
        output = {name: rows.nested(values) for name, values in scores.items()}
        if routes is not None:
            output["routed_experts"] = nested_routes(routes, rows)
        loss, metrics = torch.tensor(1.0), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=group)
        kept = {name: values.detach() for name, values in output.items()}  # not the graph
        return loss, {"model_output": kept, "loss": float(loss.detach()), "metrics": metrics}

    def _idle_loss(self, rows: Rows) -> Tensor:
        """Take part in the collectives of a micro-batch that this rank does not have; the loss is zero."""
        scores = self._scores(rows, {}, None)
        return torch.stack([values.sum() * 0 for values in scores.values()]).sum()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts to the host (``"cpu"``) or to the device (its name); a part already there stays."""
        if grad and not model:
            raise OptionError("gradients move with the model: give model=True")
        if self.engine_config.offload_policy or verl_api.get_device_name() == "cpu":
            return  # FSDP2 keeps them on the host, or there is no other memory
        parts = {"parameters": model, "buffers": model, "gradients": grad, "optimizer": optimizer}
        named = {part for part, moves in parts.items() if moves}
        if device == "cpu":
            self._offload(named - self._away)  # verl asks again
        else:
            self._onload(named & self._away)

    def _offload(self, parts: set[Any]) -> None:
        if parts := parts - ({"optimizer"} if self.optimizer is None else set()):
            offload(self.module, self.optimizer, parts=parts)
            self._away |= parts

    def _onload(self, parts: set[Any]) -> None:
        onload(self.module, parts=parts)
        self._away -= parts

    @contextmanager
    def _present(self, *parts: str) -> Iterator[None]:
        """Keep parts on the device inside, and move them back after."""
        away = self._away & {*parts}
        self._onload(away)
        try:
            yield
        finally:
            self._offload(away)

    def _sync_dtype(self) -> torch.dtype | None:
        name = self.engine_config.sync_dtype
        return None if name is None else to_dtype("sync_dtype", name)

    def _streamed(self, weights: Iterator[Any]) -> Iterator[Any]:
        with self._present("parameters", "buffers"):
            yield from weights

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool | None = None, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return an iterator over the weights for the rollout, which every rank exhausts, and an adapter's config."""
        # An unmerged adapter is sent alone once the rollout has the base model's weights (``base_sync_done``). Earlier
        # the base weights are sent. Checkpoint engines without adapters omit the argument, and get the adapter merged.
        # ``layered_summon``, to gather a part at a time, is always so here.
        merges = (self.model_config.get("lora", None) or {}).get("merge", False)
        dtype = self._sync_dtype()
        if not hasattr(self.module, "peft_config") or merges or base_sync_done is None:
            return self._streamed(stream_weights(self.module, dtype=dtype)), None
        if self.engine_config.pp > 1:
            raise OptionError(
                f"the adapter alone is not sent from pp={self.engine_config.pp} stages: set model.lora.merge=True"
            )
        require_servable(self.module, export.ADAPTER)
        config = self.module.peft_config[export.ADAPTER].to_dict()  # its types as enums
        if base_sync_done:
            return self._streamed(export.adapter_weights(self.module)), config
        return self._streamed(export.base_weights(self.module, dtype)), config

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Iterator[Any], dict[str, Any] | None]:
        """Return ``(name, flat values, ShardSpec)`` of this rank's blocks, without a gather."""
        return self._streamed(self._own_shards().specs()), None

    def prime_delta_snapshots(self) -> None:
        with self._present("parameters", "buffers"):
            self._own_shards().remember()

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Iterator[Any], dict[str, Any] | None]:
        """Return changes since the last call or :meth:`prime_delta_snapshots`, by the checkpoint's tensors."""
        return self._streamed(self._own_shards().changes()), None

    def _own_shards(self) -> export.Shards:
        if self._shards is None:
            self._shards = export.Shards(self.module, self._sync_dtype())
        return self._shards

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the contents that the checkpoint config lists; keep this engine's newest folders.  Collective."""
        _require_no_hdfs(hdfs_path)
        folder = Path(local_path)
        with self._present("parameters", "buffers", "optimizer"):
            checkpoints.save(self, folder, step=global_step)
        if dist.get_rank() == 0:
            self._saved = [*(saved for saved in self._saved if saved != folder), folder]
            while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
                shutil.rmtree(self._saved.pop(0), ignore_errors=True)
        dist.barrier()

    @first_rank_speaks()
    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False, **kwargs: Any
    ) -> None:
        """Load a checkpoint of any mesh; nothing for ``None``.  Collective."""
        if local_path is None:
            return
        _require_no_hdfs(hdfs_path)
        with self._present("parameters", "buffers", "optimizer"):
            checkpoints.load(self, Path(local_path))
        if del_local_after_load:
            logger.warning("del_local_after_load: %s is kept; remove it when no job needs it", local_path)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the adapter inside: the base model is the reference of a policy with an adapter."""
        self._adapter_is_off = hasattr(self.module, "peft_config")
        try:
            with self.module.disable_adapter() if self._adapter_is_off else nullcontext():
                yield
        finally:
            self._adapter_is_off = False


class LanguageModelEngine(FsdpRuntimeEngine):
    """Policies, references and SFT."""

    scorer = TokenScores


class ValueModelEngine(FsdpRuntimeEngine):
    """Critics: one value per token."""

    value_head = True
    scorer = TokenValues


class _Mode(verl_api.BaseEngineCtx):
    """verl's context of a phase, with the module's mode."""

    def __enter__(self) -> None:
        super().__enter__()
        module: nn.Module = self.engine.module
        module.train(self.mode == "train")

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_value, traceback)


def _require_no_hdfs(path: str | None) -> None:
    if path is not None:
        raise OptionError(f"hdfs_path={path!r}: checkpoints are written to a local path; copy them from there")
