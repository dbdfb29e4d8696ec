"""Options of ``TrainingArguments`` and ``Accelerator`` that would be wrong on a model sharded by ``parallelize``."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime import describe_parallelism
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.keywords import Options
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.steps import Compile
from fsdp_runtime.trainers.model_source import is_sharded

logger = logging.getLogger(__name__)

#: Optimizers that work elementwise, so that a shard is stepped as the full tensor would be.
_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
_SAMPLING = frozenset({"random", "sequential"})

#: Refused, except by trainers that read all batches on the first rank.
_DISPATCHED, _REPLICAS = "accelerator_config's dispatch_batches", "DataParallel over several GPUs of one process"
#: The alternative to each refused option.
_REFUSED = {
    "fsdp": "use parallelize(..., fsdp=FSDP2(...))",
    "deepspeed": "use MeshSpec(dp_shard=...)",
    "parallelism_config": "the trainer's mesh is the model's: use MeshSpec(...)",
    "fp16": "its gradient scaler does not know of shards: use bf16=True",
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "it converts the shards: load the model in that dtype"),
    "auto_find_batch_size": "ranks run out of memory at different times: find the size with fsdp-runtime estimate",
    "neftune_noise_alpha": "noise differs by rank: leave it out",
    "enable_jit_checkpoint": "ranks could save at different steps: use fsdp_runtime.monitor.stop_on_signal",
    "eval_use_gather_object": "objects are not gathered: return tensors",
    _DISPATCHED: "every rank reads its own batches: set dispatch_batches=False",
    _REPLICAS: "start one process a GPU: torchrun",
}

_MESH = "the mesh says how models are sharded: MeshSpec(...), and parallelize_kwargs"
_REFUSED_SETTINGS = {
    **dict.fromkeys(("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"), _MESH),
    **dict.fromkeys(("torch_tp_plugin", "parallelism_config"), _MESH),
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin"), "compile blocks: parallelize_kwargs={'compile': True}"),
}
#: Environment variables that ``accelerate launch`` sets from a configuration file.
_ENVIRONMENT = tuple(f"ACCELERATE_USE_{kind}" for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"))
_PRECISIONS = (None, "no", "bf16")


def check_arguments(args: Any, *, dispatched: bool = False) -> None:
    """Raise :class:`OptionError` for the options of ``TrainingArguments`` that the trainers cannot serve."""
    options = {name: getattr(args, name, None) for name in _REFUSED}
    options["neftune_noise_alpha"] = args.neftune_noise_alpha is not None
    options[_DISPATCHED] = args.accelerator_config.dispatch_batches is True and not dispatched
    options[_REPLICAS] = args.n_gpu > 1
    for name, value in options.items():
        if value:
            raise OptionError(f"{name} cannot be used on a model that parallelize has sharded: {_REFUSED[name]}")
    sampling = str(getattr(args, "train_sampling_strategy", "random"))
    if sampling not in _SAMPLING:
        raise OptionError(
            f"train_sampling_strategy={sampling!r} orders samples by the world's ranks, not by dp ranks: "
            f"choose one of {', '.join(sorted(_SAMPLING))}"
        )


def check_optimizer(args: Any) -> None:
    """Raise :class:`OptionError` unless the optimizer in the arguments steps every element separately."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _OPTIMIZERS:
        raise OptionError(
            f"optim={name!r} is not known to be right on shards: choose one of {', '.join(sorted(_OPTIMIZERS))}, or "
            "pass optimizers=(optimizer, None) with one that you built after parallelize"
        )


def adapted(args: Any, options: Options, *, sharded: bool) -> Any:
    """Return the arguments without options that ``parallelize`` replaces; these go to its ``options``."""
    mode = options.get("activation_checkpointing", "none")
    if getattr(args, "activation_checkpointing", False) and getattr(mode, "mode", mode) != "none":
        _refuse_two_checkpointings(f"parallelize_kwargs has activation_checkpointing={mode!r}")
    args = copy.copy(args)
    if getattr(args, "use_liger_kernel", False):
        logger.warning(
            "use_liger_kernel=True: its layers and loss would replace sharded ones; losses and log-probabilities are "
            "computed from sharded logits or hidden states by rl_logprobs instead"
        )
        args.use_liger_kernel = False
    if args.torch_compile:
        if sharded:
            raise OptionError(
                "torch_compile cannot be used on a model that parallelize has sharded: parallelize(..., compile=True)"
            )
        keywords = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        options.setdefault("compile", Compile({name: value for name, value in keywords.items() if value is not None}))
        args.torch_compile = False
        for name in ("BACKEND", "MODE"):  # set by the arguments: for the model whole
            os.environ.pop(f"ACCELERATE_DYNAMO_{name}", None)
    return args


def _refuse_two_checkpointings(option: str) -> NoReturn:
    raise OptionError(f"{option}, and the training arguments recompute too: set their gradient_checkpointing=False")


def check_model(model: Any, mesh: DeviceMesh, args: Any) -> None:
    """Raise :class:`ModelError` unless the model has its weights and, if it is sharded, is sharded on ``mesh``."""
    if on_meta := next((name for name, tensor in model.named_parameters() if tensor.is_meta), None):
        raise ModelError(f"{on_meta} is on the meta device: call parallelize and load_weights before the trainer")
    if is_sharded(model):
        recomputes = getattr(args, "activation_checkpointing", False)
        if recomputes and (recomputing := describe_parallelism(model).recomputing):
            _refuse_two_checkpointings(f"{recomputing[0]} recomputes its activations by parallelize")
        check_on_mesh(model, mesh)


def check_on_mesh(model: Any, mesh: DeviceMesh) -> None:
    """Raise :class:`ModelError` unless a model is parallelized on ``mesh``."""
    stages, pp = stages_of(model), axis_size(mesh, "pp")
    if pp != (1 if stages is None else stages.mesh.size()):
        now = "not in pipeline stages" if stages is None else f"in stages over pp={stages.mesh.size()}"
        raise ModelError(f"the model is {now}, and the trainer's mesh has pp={pp}: call parallelize(model, mesh) first")
    sharded = [tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)]
    lacks_dp = axis_size(mesh, "dp_shard") * axis_size(mesh, "dp_replicate") > 1 and not isinstance(model, FSDPModule)
    if lacks_dp or (axis_size(mesh, "tp") > 1 and not sharded):
        axis = "dp" if lacks_dp else "tp"
        raise ModelError(f"the model is not sharded, and {axis} > 1: call parallelize(model, mesh) first")
    ranks = set(mesh.mesh.flatten().tolist())
    if stray := [own for own in sharded if not set(own.mesh.flatten().tolist()) <= ranks]:
        raise ModelError(f"the model is sharded over {stray[0]}, which is not part of the trainer's mesh {mesh}")


def check_tokens(model: Any, processing_class: Any) -> None:
    """Raise :class:`ModelError` if a tokenizer has more tokens than the model's embedding has rows."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    config: Any = getattr(model, "config", None)
    rows = getattr(config.get_text_config(), "vocab_size", None) if hasattr(config, "get_text_config") else None
    if rows is not None and hasattr(tokenizer, "get_vocab") and len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's vocabulary {rows}: call "
            "model.resize_token_embeddings(len(tokenizer)) before parallelize"
        )


def check_samples(dataset: Any, batch: int, mesh: DeviceMesh, *, drop_last: bool) -> None:
    """Raise :class:`OptionError` if a rank of ``dp`` gets no sample; warn where the last batch is filled up."""
    ranks = axis_size(mesh, "dp_replicate") * axis_size(mesh, "dp_shard")
    if 0 < size_of(dataset) < ranks:
        raise OptionError(
            f"the training set has {len(dataset)} samples for dp={ranks} ranks, which take one each or more: use a "
            "smaller dp_replicate or dp_shard, or give more samples"
        )
    warn_of_repeated("training", dataset, batch, ranks, drop_last=drop_last)


def warn_of_repeated(name: str, dataset: Any, batch: int, ranks: int, *, drop_last: bool) -> None:
    """Warn if the last batch of all ``ranks`` of ``dp`` is filled up with repeated samples."""
    if ranks > 1 and size_of(dataset) % (batch * ranks) and not drop_last:
        logger.warning(
            "the %s set's %d samples are no multiple of %d, a batch of each of the dp=%d ranks: the last batch "
            "repeats samples, which one process would not; dataloader_drop_last=True leaves it out",
            name,
            len(dataset),
            batch * ranks,
            ranks,
        )


def size_of(dataset: Any) -> int:
    """Return the number of samples of a data set, 0 if it is unknown."""
    try:
        return len(dataset)
    except TypeError:  # a stream, or a wrapper of one that has ``__len__``
        return 0


def accelerator_settings(mesh: DeviceMesh, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Accelerator`` for a mesh."""
    for name, instead in _REFUSED_SETTINGS.items():
        if settings.get(name) not in (None, "no"):
            raise OptionError(f"{name} cannot be used on a mesh: {instead}")
    if variables := [name for name in _ENVIRONMENT if os.environ.get(name, "false").lower() == "true"]:
        raise OptionError(f"{variables[0]}=true asks accelerate to shard models itself: start the script with torchrun")
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise OptionError(f"ACCELERATE_DYNAMO_BACKEND cannot be used on a mesh: {_REFUSED_SETTINGS['dynamo_backend']}")
    precision = settings.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in _PRECISIONS:
        raise OptionError(f"mixed_precision={precision!r} scales losses or replaces layers: use 'bf16', or 'no'")
    loading = settings.get("dataloader_config") or DataLoaderConfiguration()
    if loading.dispatch_batches:
        raise OptionError("dispatch_batches=True: every rank reads its own batches: leave it out, or False")
    loading.dispatch_batches = False  # None deals the batches of an iterable data set from one rank of the world
    return {**settings, "dataloader_config": loading, "cpu": settings.get("cpu", mesh.device_type == "cpu")}


def check_ranks(accelerator: Accelerator, mesh: DeviceMesh) -> None:
    """Raise :class:`OptionError` if accelerate's setup differs, or counts other ranks than the mesh has."""
    state = accelerator.state
    kinds = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    if state.distributed_type in kinds or state.parallelism_config is not None:
        raise OptionError(
            f"accelerate is set up for {state.distributed_type.value}: start the script with torchrun, and make the "
            "Accelerator on a mesh before any other"
        )
    if state.mixed_precision not in _PRECISIONS:
        precision = f"mixed_precision={state.mixed_precision!r}"
        raise OptionError(f"an earlier Accelerator of this process has {precision}: use 'bf16' or 'no'")
    if state.num_processes != mesh.size():
        raise OptionError(
            f"accelerate counts {state.num_processes} processes and the mesh has {mesh.size()} ranks: start the script "
            "with torchrun, build the mesh over all ranks, and on CPUs set use_cpu=True in the training arguments"
        )
