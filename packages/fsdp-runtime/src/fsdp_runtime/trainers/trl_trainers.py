"""TRL's trainers on a mesh: their shared part, and trainers that sample from the trained model.

They take log-probabilities from a patched ``model.forward`` (see ``logits.add_fused_lm_head``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from fsdp_runtime import stream_weights, submesh, unsharded
from fsdp_runtime._peft_compat import base_model, is_peft_model
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.steps.context.step import inputs_of, under_context_parallelism, whole_rows
from fsdp_runtime.steps.outputs.full_tensors import full_logits
from fsdp_runtime.trainers import _trl_compat as of_trl
from fsdp_runtime.trainers.logits import add_fused_lm_head
from fsdp_runtime.trainers.mesh_trainer import MeshTrainerMixin
from fsdp_runtime.trainers.model_source import is_sharded, keep_reference_adapter, with_reference_adapter
from fsdp_runtime.trainers.training_arguments import check_tokens

#: Arguments with a second model, which is sharded like the first.
_OTHER_MODELS = ("ref_model", "teacher_model")


class TrlMixin(MeshTrainerMixin):
    """Let a trainer of TRL train on a mesh; see :class:`MeshTrainerMixin`.

    The model may be a path: every rank then reads its shards from it.  ``peft_config`` wraps the model before it is
    sharded.  References and teachers that TRL loads come onto the same mesh.
    """

    _adapted: nn.Module | None

    def __init__(self, model: Any = None, *, mesh: DeviceMesh, args: Any = None, **kwargs: Any) -> None:
        _refuse_images_over_cp(mesh, kwargs)
        functions: dict[str, Any] = {
            "add_fused_lm_head": add_fused_lm_head,
            "create_model_from_path": self._create_model,
            "get_peft_model": lambda model, config, **_: self._adapted or self._source.shard(model, config),
            "hash_module": lambda model: "",  # of plain weights; names the file that _precompute_ref_logps goes without
        }
        if getattr(args, "use_vllm", False):
            functions["VLLMGeneration"] = server_generation(type(self))
        self._by_name = isinstance(model, str)
        self._adapter, self._adapted = kwargs.get("peft_config"), None
        self._given_reference = kwargs.pop("ref_model", None) if not of_trl.takes_reference(type(self)) else None
        self._adds_reference = (  # of a ``PeftModel``: the adapter ``ref``, a copy of the trained adapter
            kwargs.get("ref_model") is None
            if isinstance(self, (trl.DPOTrainer, trl.KTOTrainer))
            else isinstance(self, (trl.GRPOTrainer, trl.RLOOTrainer)) and args.beta != 0.0
        )
        with of_trl.replaced(type(self), functions):
            super().__init__(model, mesh=mesh, args=args, **kwargs)
        self._refuse_router_logits()

    @classmethod
    def _takes_stages(cls) -> bool:
        return issubclass(cls, trl.SFTTrainer)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the metrics that the last pipeline stage has counted."""
        if self._stages is not None:
            counted = {name: self.__dict__[name] for name in ("_metrics", "_total_train_tokens")}
            self.__dict__.update(self._stages.of_last_stage(counted))
        super().log(logs, *args, **kwargs)

    def _shard_models(self, model: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if isinstance(model, nn.Module):
            if self._adapter is not None and is_sharded(model):
                self._source.shard(model, self._adapter)  # raises
            copied = self._adds_reference and is_peft_model(model)
            if copied:
                model = with_reference_adapter(model)
            if self._adapter is None:
                model = self._source.shard(model)
            if copied:
                keep_reference_adapter(model)
        elif not isinstance(model, str):
            raise ModelError(f"model={model!r}: pass a model or its path")
        for name in _OTHER_MODELS:
            if isinstance(kwargs.get(name), nn.Module):
                kwargs = {**kwargs, name: self._shard_other(kwargs[name])}
        return model, kwargs

    def _refuse_router_logits(self) -> None:
        """Refuse the auxiliary loss of routers in stages, and with a padding mask, which counts tokens of full rows."""
        if not getattr(self, "aux_loss_enabled", False):
            return
        loss = f"the auxiliary loss of the routers of {type(base_model(self.model)).__name__}"
        if self._stages is not None:
            raise OptionError(
                f"{loss} reads all blocks, and pp={axis_size(self.mesh, 'pp')} divides them: set "
                "router_aux_loss_coef=0.0 in the trainer's arguments"
            )
        is_padded = not getattr(self, "padding_free", False)
        if is_padded and under_context_parallelism(self.model) and inputs_of(self.model).cuts_padding:
            raise OptionError(
                f"{loss} reads router logits beside a padding mask, and cp={axis_size(self.mesh, 'cp')} divides the "
                "rows: set router_aux_loss_coef=0.0 in the trainer's arguments, or output_router_logits=False in the "
                "config for ORPO and CPO; set padding_free=True for SFT and DPO; or use cp=1"
            )

    def _create_model(self, path: str, architecture: Any = None, **settings: Any) -> nn.Module:
        """Load the trainer's model, or a reference or teacher, in place of TRL's ``create_model_from_path``."""
        if self._by_name:
            self._by_name = False
            model = self._source.load(path, architecture, self._adapter, **settings)
            if self._adapter is not None:  # TRL gets the full model where it would wrap it
                self._adapted, model = model, base_model(model)
            return model
        if self._given_reference is not None:
            return self._shard_other(self._given_reference)
        if not path:
            raise OptionError("the model's config does not say where it was loaded from: pass ref_model=...")
        model = self._source.load(path, architecture, **settings)
        self._adopt(model)
        return model

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """Prepare a data set; KTO's mismatched pairs, for its KL, stay within one batch of all ranks."""
        if isinstance(self, trl.KTOTrainer):
            args = copy.copy(args)
            args.per_device_train_batch_size *= submesh(self.mesh, "dp").size()
        return super()._prepare_dataset(dataset, processing_class, args, *rest)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Add the reference's log-probabilities to a data set, through a file for all ranks; replaces TRL's method."""
        if not hasattr(dataset, "__len__"):
            return super()._precompute_ref_logps(dataset, name, batch_size)  # raises
        check_tokens(base_model(self.model), self.processing_class)
        model = self.ref_model or self.model
        self._adopt(model)
        batches = DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator)
        columns = [
            self.accelerator.gather_for_metrics(
                [own for own in self.compute_ref_log_probs(model, batch) if own is not None]
            )
            for batch in self.accelerator.prepare(batches)
        ]
        names = ("ref_chosen_logps", "ref_rejected_logps")  # in the order of compute_ref_log_probs
        if isinstance(self, trl.KTOTrainer):  # the second column only if its loss estimates a KL divergence
            names = ("ref_logps", "ref_KL_logps")
        for column, parts in zip(names, zip(*columns, strict=True), strict=False):
            dataset = dataset.add_column(column, torch.cat(parts).float().cpu().numpy())
        return dataset

    @contextmanager
    def _sampling(self, model: nn.Module) -> Iterator[None]:
        """Sample full rows with gathered FSDP2 parameters and plain logits, equally on ``tp`` and ``cp`` ranks."""
        self.accelerator.share_random_state()
        with torch.no_grad(), unsharded(model), full_logits(base_model(model)), whole_rows(model):
            yield

    def _from_first(self, value: Any) -> Any:
        """Return the value of the first rank of the ``cp`` and ``tp`` group."""
        values = [value]
        if (group := self.accelerator.model_group) is not None:
            dist.broadcast_object_list(values, group=group, group_src=0)
        return values[0]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss; also in evaluation, divide it by the labels of all ranks, as on one process."""
        if num_items_in_batch is None and not self.model.training and self.args.average_tokens_across_devices:
            num_items_in_batch = (
                self._get_num_items_in_batch([inputs], self.args.device) if "labels" in inputs else None
            )
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class GeneratingMixin(TrlMixin):
    """Let a trainer of TRL that samples completions, such as GRPO's, train on a mesh.

    Prompts are divided over ``dp``.  The ranks of one ``tp`` group generate the same completions together, with FSDP2's
    parameters gathered meanwhile, and use the rewards of the group's first rank.  So do the ranks of ``cp``: each
    rank generates full rows, and scores and trains its own tokens.

    ``generation_batch_size`` is set to ``per_device_train_batch_size * steps_per_generation`` times the size of ``dp``.
    """

    rollout_func: Any
    _logs: dict[str, Any]

    def __init__(self, model: Any = None, *, mesh: DeviceMesh, args: Any = None, **kwargs: Any) -> None:
        if args is None:
            raise OptionError("pass args=, such as trl.GRPOConfig(...)")
        _check(args, kwargs, mesh)
        if kwargs.get("eval_dataset") is not None:
            _check_evaluation(args, mesh)
        super().__init__(model, mesh=mesh, args=_generation_over_dp(args, mesh), **kwargs)
        rollout = getattr(self, "rollout_func", None)
        if rollout is not None:
            self.rollout_func = lambda prompts, trainer: self._from_first(rollout(prompts, trainer))
        # TRL seeds every process of the world differently; the ranks of tp must draw the same numbers.
        transformers.set_seed(self.args.seed + self.accelerator.process_index)

    def _check_data(self) -> None:
        check_tokens(base_model(self.model), self.processing_class)  # a prompt's completions are dealt, not prompts

    def _check_evaluated(self, name: str, dataset: Any) -> None:
        """Check the batches of an evaluation set, also of a set other than the trainer's."""
        _check_evaluation(self.args, self.mesh)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, in an engine or here, the same tokens on all ranks of ``tp``."""
        with nullcontext() if getattr(self, "use_vllm", False) else self._sampling(self.model):
            turn = super()._generate_single_turn(*args, **kwargs)
        return self._from_first(turn)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        gathering = {"gather": self.accelerator.gather_from_first, "gather_object": self.accelerator.gather_objects}
        logs_images = getattr(self, "log_multimodal", False)
        self.log_multimodal = False  # TRL gathers images over the ranks with images
        try:
            with of_trl.replaced(type(self), gathering):
                batch = super()._generate_and_score_completions(inputs)
        finally:
            self.log_multimodal = logs_images
        if logs_images:
            self._log_images(len(inputs) * self.accelerator.num_processes)
        return batch

    def _log_images(self, number: int) -> None:
        """Add the images of the newest prompts and completions of all ranks to TRL's log, if they have any."""
        pairs = list(zip(self._logs["prompt"], self._logs["completion"], strict=True))[-number:]
        images = [[*_images_of(prompt), *_images_of(completion)] for prompt, completion in pairs]
        if any(images):
            self._logs["images"].extend(images)


def _refuse_images_over_cp(mesh: DeviceMesh, kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`OptionError` where a trainer's own collator would give images to ranks of ``cp``."""
    if axis_size(mesh, "cp") == 1 or kwargs.get("data_collator") is not None:
        return
    for name in ("train_dataset", "eval_dataset"):
        given = kwargs.get(name)
        for dataset in given.values() if isinstance(given, Mapping) else (given,):
            if columns := {"image", "images"}.intersection(getattr(dataset, "column_names", None) or ()):
                raise OptionError(
                    f"the column {min(columns)!r} of {name}: TRL's collators give images without the position_ids of "
                    f"full rows, which cp={axis_size(mesh, 'cp')} needs: use cp=1 (tp and dp take images), or train "
                    "on text alone"
                )


def _images_of(messages: Any) -> Iterator[Any]:
    """Iterate over the images in the messages of a conversation."""
    contents = (each["content"] for each in messages if isinstance(each, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (part["image"] for part in parts if part.get("type") == "image")


def _check(args: Any, kwargs: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Raise :class:`OptionError` for options that a generating trainer does not support on a mesh."""
    if getattr(args, "use_vllm", False) and args.vllm_mode != "server":
        raise OptionError(
            f"use_vllm=True with vllm_mode={args.vllm_mode!r} cannot be used on a model that parallelize has sharded: "
            "start a server and set vllm_mode='server', or generate in your engine (rollout_func) and send "
            "it the weights with fsdp_runtime.sync.send_weights"
        )
    refused = {
        "use_transformers_continuous_batching": "it is not covered: leave it off",
        "cast_lm_head_to_fp32": "it replaces the sharded head: leave it off, or load float32 weights",
    }
    for name, instead in refused.items():
        if getattr(args, name, False):
            raise OptionError(f"{name}=True cannot be used on a model that parallelize has sharded: {instead}")
    ways = {axis: size for axis in ("tp", "cp") if (size := axis_size(mesh, axis)) > 1}
    for name in ("tools", "environment_factory"):
        if ways and kwargs.get(name):
            axis, size = next(iter(ways.items()))
            raise OptionError(f"{name} would act once on every rank of {axis}={size}: use a mesh with {axis}=1")


def _generation_over_dp(args: Any, mesh: DeviceMesh) -> Any:
    """Count the generation batch in the arguments over ``dp`` instead of the world."""
    args = copy.copy(args)
    if getattr(args, "steps_per_generation", None) is None:
        return args
    dp = submesh(mesh, "dp").size()
    args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * dp
    if args.generation_batch_size % args.num_generations:
        raise OptionError(
            f"per_device_train_batch_size={args.per_device_train_batch_size} times steps_per_generation="
            f"{args.steps_per_generation} on dp={dp} gives {args.generation_batch_size} completions at a time, which "
            f"num_generations={args.num_generations} does not divide"
        )
    return args


def _check_evaluation(args: Any, mesh: DeviceMesh) -> None:
    """Raise :class:`OptionError` if an evaluation batch of all ranks of ``dp`` would split the group of a prompt."""
    group = getattr(args, "num_generations_eval", None) or getattr(args, "num_generations", 1)
    dp = submesh(mesh, "dp").size()
    if args.per_device_eval_batch_size * dp % group:
        raise OptionError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} on dp={dp} gives "
            f"{args.per_device_eval_batch_size * dp} completions at a time, which the {group} completions of a prompt "
            "(num_generations_eval, or num_generations) do not divide: choose a multiple"
        )


def server_generation(trainer_class: type) -> type:
    """Return TRL's ``VLLMGeneration`` with the weights of :func:`fsdp_runtime.stream_weights`."""
    base: Any = of_trl.global_of(trainer_class, "VLLMGeneration")

    class MeshGeneration(base):
        """TRL's generation that requests the prompts of one ``tp`` group once."""

        def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
            """Iterate over full weights by their names in the checkpoint, adapters merged; collective."""
            yield from stream_weights(self.model)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            """Generate for the prompts of all ranks of ``dp``."""
            with of_trl.replaced(base, {"gather_object": self.accelerator.gather_objects}):
                return super().generate(*args, **kwargs)

    return MeshGeneration
