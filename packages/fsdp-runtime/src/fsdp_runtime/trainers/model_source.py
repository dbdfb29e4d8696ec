"""Build a trainer's sharded model from a path, an unsharded model, or a model with adapters.

Optimizers that were built earlier get the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime import init_adapters, load_weights, meta_device, parallelize, resolve_parallelism
from fsdp_runtime._transformers_compat.models import auto_class_builds, model_from_config
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.keywords import Options
from fsdp_runtime.model import state_entries
from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.steps.context.step import under_context_parallelism

#: Arguments of ``from_pretrained`` that concern one process alone, or are its defaults here.
_DROPPED = ("device_map", "low_cpu_mem_usage", "use_cache")
#: Arguments of ``from_pretrained`` for the config.
_OF_CONFIG = ("revision", "trust_remote_code", "num_labels", "attn_implementation")
#: The prefix of attention functions that ``parallelize`` registers with transformers.
_OWN_ATTENTION = "context_parallel_"


def is_sharded(model: nn.Module) -> bool:
    """Return True if a model has been parallelized, by this package or another."""
    return (
        isinstance(model, FSDPModule)
        or stages_of(model) is not None
        or under_context_parallelism(model)
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    )


@dataclass(frozen=True)
class ModelSource:
    """Load and shard a trainer's models on its mesh."""

    mesh: DeviceMesh  # the trainer's mesh
    options: Options  # keywords of ``parallelize``
    seed: int = 0  # of adapters that are drawn on the meta device

    def shard(self, model: nn.Module, adapter: Any = None) -> nn.Module:
        """Parallelize a model with data or on the meta device, in a new adapter if a peft config is given."""
        if is_sharded(model):
            if adapter is not None:
                raise OptionError(
                    "peft_config on a model that is sharded already: pass the model before parallelize, with "
                    "parallelize_kwargs=..., or call peft.get_peft_model before parallelize"
                )
            return model
        if adapter is not None:
            import peft

            model = cast(nn.Module, peft.get_peft_model(model, adapter))
        parallelize(model, self.mesh, **self.options)
        return model

    def check(self, model: nn.Module) -> None:
        """Raise the errors of :meth:`shard` for one of several models, before any model is sharded."""
        try:
            resolve_parallelism(model, self.mesh, **self.options)
        except ModelError as error:
            raise ModelError(
                f"{type(model).__name__} cannot be prepared beside another model: {error}. Make a small module, such "
                "as a head, a submodule of the model before prepare"
            ) from error

    def load(self, path: str, architecture: Any = None, adapter: Any = None, **settings: Any) -> nn.Module:
        """Build a model under ``meta_device``, shard it and load the checkpoint: every rank reads its own slices."""
        # A class that differs from the checkpoint's, as with a fresh score head, is loaded in full and then
        # sharded. Without an architecture the class is the checkpoint's own.
        import transformers

        settings = {name: value for name, value in settings.items() if name not in _DROPPED}
        if settings.get("quantization_config") is not None:
            raise OptionError("quantization_config: shards of quantized weights are not trained; load in bfloat16")
        if str(settings.get("attn_implementation")).startswith(_OWN_ATTENTION):  # of a policy that is sharded
            del settings["attn_implementation"]
        if (dtype := settings.setdefault("dtype", "float32")) != "auto":
            settings["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        of_config = {name: settings[name] for name in _OF_CONFIG if settings.get(name) is not None}
        config = transformers.AutoConfig.from_pretrained(path, **of_config)
        saved = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0], None)
        cls = architecture or saved or transformers.AutoModelForCausalLM
        if saved is None or (cls is not saved and auto_class_builds(cls, config) is not saved):
            return self.shard(cls.from_pretrained(path, **settings), adapter)
        with meta_device():
            model = model_from_config(saved, config, None if settings["dtype"] == "auto" else settings["dtype"])
        sharded = self.shard(model, adapter)
        if adapter is not None:
            init_adapters(sharded, seed=self.seed)
        load_weights(sharded, path, training=False)
        return sharded


def with_reference_adapter(model: Any) -> Any:
    """Add a copy of a ``PeftModel``'s adapter as ``ref`` before sharding; TRL would do so afterwards."""
    if "ref" not in model.peft_config:
        if is_sharded(model):
            raise OptionError(
                "the trainer keeps a copy of the adapter as reference, and this PeftModel is sharded already: pass it "
                "before parallelize, with parallelize_kwargs=..., or call model.add_adapter('ref', config) before "
                "parallelize"
            )
        model.add_adapter("ref", model.peft_config["default"])
    return model


def keep_reference_adapter(model: Any) -> None:
    """Let ``add_adapter`` of a sharded ``PeftModel`` leave ``ref`` as it is; the trainer then copies the weights in."""
    refuse = model.add_adapter
    model.__dict__["add_adapter"] = lambda name, *args, **kwargs: name == "ref" or refuse(name, *args, **kwargs)


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def check_parameters(optimizers: Iterable[Any], models: Iterable[nn.Module], unsharded: Iterable[nn.Module]) -> None:
    """Check that optimizers hold only parameters of ``models``, and no state for parameters to be sharded."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    replaced = {id(parameter) for model in unsharded for parameter in model.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if unknown := [tuple(own.shape) for own in _parameters(optimizer) if id(own) not in known]:
            raise ModelError(
                f"{name} holds {len(unknown)} parameters of no model that is prepared (first of shape {unknown[0]}), "
                "which would be trained on each rank alone: prepare the model together with it, or before, and build "
                "it from the prepared model's parameters()"
            )
        stepped = [own for own in _parameters(optimizer) if id(own) in replaced and optimizer.state.get(own)]
        if stepped:
            raise ModelError(
                f"{name} has state of {len(stepped)} parameters that prepare replaces by shards: prepare before the "
                "first step, and resume with load_state"
            )


@contextmanager
def follow_parameters(model: nn.Module, optimizers: Sequence[Any]) -> Iterator[None]:
    """Let optimizers hold the parameters that replace a model's parameters inside the ``with``."""
    before = {id(entry.tensor): entry.names[0] for entry in state_entries(model)}
    yield
    after = {name: entry.tensor for entry in state_entries(model) for name in entry.names}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [after[before[id(own)]] if id(own) in before else own for own in group["params"]]
