"""TRL's ``AsyncGRPOTrainer`` on a mesh: rows that the first rank packs, and weights that all ranks send."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import save_adapter, stream_weights
from fsdp_runtime.errors import OptionError
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.steps import SharedPrefixes
from fsdp_runtime.sync import WeightTransfer, on_every_rank, require_servable
from fsdp_runtime.trainers._trl_compat import BEGINS, MANIFEST, PEAK_FLOPS, TREE, global_of, replaced
from fsdp_runtime.trainers.training_arguments import check_tokens
from fsdp_runtime.trainers.trl_trainers import TrlMixin
from fsdp_runtime.weights import WeightExport
from fsdp_runtime.wrap import effects_of, hook_model

_TAKES_TREES = "takes trees of prefixes"

_log = logging.getLogger(__name__)


class AsyncGRPOMixin(TrlMixin):
    """Let TRL's asynchronous GRPO trainer train on a mesh; see :class:`TrlMixin`.

    Rank 0 reads the rollouts and packs a row for every rank of ``dp``; the ranks of one ``tp`` group get the same row.
    Errors on rank 0, such as a server that does not answer, are raised on every rank.  Pass ``weight_transfer`` on
    every rank: a :class:`~fsdp_runtime.sync.WeightTransfer` is then called on all of them, and another object, or TRL's
    own, on rank 0, with gathered weights.  An adapter (``peft_config``) is sent alone if TRL does
    so: without ``weight_transfer``, to a server started with ``--enable-lora``.  Else it is merged into the weights.
    """

    _takes_dispatched_batches = True
    _groups_before_resume: int
    _trained_groups: set[int]

    def __init__(self, model: Any = None, *, mesh: DeviceMesh, args: Any = None, **kwargs: Any) -> None:
        _check(model, args, kwargs)
        if axis_size(mesh, "cp") > 1:
            options = kwargs.get("parallelize_kwargs") or {}
            steps = (*options.get("steps", ()), SharedPrefixes())
            kwargs["parallelize_kwargs"] = {**options, "steps": steps}
        self._transfer, self._begun = kwargs.get("weight_transfer"), False
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), _OnEveryRank(self)]
        functions: dict[str, Any] = {
            MANIFEST: lambda model: [(each.name, each) for each in WeightExport().describe(model)]
        }
        if mesh.device_type == "cpu":
            functions[PEAK_FLOPS] = lambda accelerator, dtype: None  # TRL's asks CUDA for its name
        with replaced(type(self), functions):
            super().__init__(model, mesh=mesh, args=args, **kwargs)
        self.remove_callback(global_of(type(self), BEGINS))  # its part is done on every rank
        WeightExport().describe(self.model)  # raises for an adapter that cannot be merged

    def _check_data(self) -> None:
        check_tokens(self.model, self.processing_class)  # prompts go to the rollout worker, not to ranks

    def _create_model(self, path: str, architecture: Any = None, **settings: Any) -> nn.Module:
        config: Any = transformers.AutoConfig.from_pretrained(path)
        if config.get_text_config() is not config:
            raise OptionError(f"{path} is a vision-language model: use GRPOTrainer, or AsyncGRPOTrainer without a mesh")
        if axis_size(self.mesh, "cp") > 1:  # TRL's kernel for trees reads the keys of one rank
            settings["attn_implementation"] = "sdpa"
        return super()._create_model(path, architecture, **settings)

    def _adopt(self, model: nn.Module) -> None:
        super()._adopt(model)
        if axis_size(self.mesh, "cp") > 1 and _TAKES_TREES not in effects_of(model):
            hook_model(model, _TAKES_TREES, _with_subtree_ends, first=True)  # before the hook of full rows

    def get_train_dataloader(self) -> Any:
        """Return the rows that rank 0 packs, one for each rank of ``dp``."""
        loaders: list[Any] = []
        on_every_rank(lambda: loaders.append(super(AsyncGRPOMixin, self).get_train_dataloader()), None)
        return loaders[0]

    def _init_lora_sync(self, model: Any) -> bool:
        """Send the adapter alone if the server takes it, as TRL decides, and reads it as peft does."""
        if not super()._init_lora_sync(model):
            return False
        try:
            require_servable(model, self._adapter_name)
        except OptionError as error:
            _log.warning("merged weights are sent: %s", error)
            return False
        return True

    def _sync_weight_lora(self, t0: float) -> tuple[float, float, float]:
        """Publish the adapter under the name of its version; TRL's method would write one rank's shards."""
        version = on_every_rank(lambda: self.model_version + 1, None)[0]
        name = f"{self._lora_name}-v{version}"
        client, folder = self.vllm_client, Path(self._lora_dir)
        self._on_first(client, "pause")
        paused = time.time()
        save_adapter(self.model, folder / name, adapter=self._adapter_name)
        sent = time.time()
        self._on_first(client, "load_lora_adapter", name, str(folder / name))
        self._on_first(client, "resume")
        if (stale := version - (self.args.max_staleness + 1)) > 0:
            self._on_first(client, "unload_lora_adapter", f"{self._lora_name}-v{stale}")
        if self.accelerator.is_main_process:
            # The server reads an adapter's files late: they outlive its unloading by one version.
            shutil.rmtree(folder / f"{self._lora_name}-v{stale - 1}", ignore_errors=True)
        self._name_version(version)
        return paused, paused, sent

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """Send the weights, adapters merged; in TRL's method, rank 0 gathers while it sends."""
        version = on_every_rank(lambda: self.model_version + 1, None)[0]
        self._on_first(self.weight_transfer, "pause")
        paused = time.time()
        if isinstance(self._transfer, WeightTransfer):
            self._transfer.send(self.model, version)
        else:
            self._on_first(self.weight_transfer, "send_weights", self._gathered())
        sent = time.time()
        self._on_first(self.weight_transfer, "resume")
        self._name_version(version)
        return paused, paused, sent

    def _name_version(self, version: int) -> None:
        if self.accelerator.is_main_process:
            self.model_version = version
            if self.rollout_worker:
                self.rollout_worker.update_model_version(version)

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Gather every weight to rank 0's host memory, and iterate over them there."""
        is_first = self.accelerator.is_main_process
        # Every rank exhausts the stream before rank 0 sends.
        weights = [(name, tensor.cpu()) for name, tensor in stream_weights(self.model) if is_first]
        return ((name, tensor.to(self.accelerator.device)) for name, tensor in weights)

    def _on_first(self, owner: Any, method: str, *arguments: Any) -> None:
        """Call a method of an object on rank 0, and raise its error on every rank."""

        def call() -> None:
            if owner is not None:
                getattr(owner, method)(*arguments)

        on_every_rank(call, None)

    def begin(self) -> None:
        """Set up the transfer, send the first weights and start the rollouts, once."""
        if not self._begun:
            self._begun = True
            self._on_first(self.weight_transfer, "init_weight_transfer")
            self._sync_weight()
            self._on_first(self.rollout_worker, "start")

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            if isinstance(self._transfer, WeightTransfer) and not self.accelerator.is_main_process:
                self._transfer.destroy()  # rank 0's is TRL's part


class _OnEveryRank(transformers.TrainerCallback):
    """The callback steps that TRL runs on rank 0 alone."""

    def __init__(self, trainer: AsyncGRPOMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Give every rank the prompt groups that rank 0 has trained on, so that all ranks end together."""
        trainer, is_first = self._trainer, self._trainer.accelerator.is_main_process
        progress = (trainer._groups_before_resume, trainer._trained_groups) if is_first else None
        shared = on_every_rank(lambda: progress, None)[0]
        if not is_first:  # rank 0's collator adds to its own set
            trainer._groups_before_resume, trainer._trained_groups = shared


def _with_subtree_ends(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Describe a packed row by ``subtree_end`` of each token, in place of the paths of TRL's kernel."""
    paths = {name: kwargs[name] for name in kwargs if name.startswith(TREE)}
    kwargs = {name: value for name, value in kwargs.items() if name not in paths}
    if paths:  # segments in pre-order: a token's subtree ends with the last segment with the token on its path
        seen, ends, path_ends = (paths[TREE + name] for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k"))
        last = ends[1:].long().repeat_interleave(path_ends.diff())
        subtree_end = torch.zeros_like(kwargs["position_ids"][0]).scatter_reduce(0, seen, last, "amax")
        kwargs["subtree_end"] = subtree_end[None]
    return args, kwargs


def _check(model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`OptionError` for options that the trainer does not support on a mesh."""
    if args is None:
        raise OptionError("pass args=, such as AsyncGRPOConfig(...)")
    if not isinstance(model, str):
        raise OptionError(
            f"model={type(model).__name__}: AsyncGRPOTrainer names its model to the server: pass its path"
        )
    options = kwargs.get("parallelize_kwargs") or {}
    if options.get("packed_sequences"):
        raise OptionError(
            "parallelize_kwargs has packed_sequences=True, which would hide the common prefix from the branches of "
            "AsyncGRPOTrainer's rows: leave it out"
        )
