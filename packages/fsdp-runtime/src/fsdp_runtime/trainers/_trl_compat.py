"""Every use of TRL's private API, with its reason; tested on TRL 1.15 and 1.16.

TRL's trainers build models, wrap them in adapters and gather over the world by functions of other modules, found under
global names of the trainer's module.  Inside of :func:`replaced` these names are functions of a mesh.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from fsdp_runtime.swaps import swapped


def modules_of(trainer_class: type) -> list[ModuleType]:
    """Return TRL's modules that define a trainer and its base classes."""
    names = dict.fromkeys(cls.__module__ for cls in trainer_class.__mro__ if cls.__module__.startswith("trl."))
    return [sys.modules[name] for name in names]


@contextmanager
def replaced(trainer_class: type, functions: Mapping[str, Any]) -> Iterator[None]:
    """Replace the global names that a trainer's modules have by these functions inside the ``with``."""
    with ExitStack() as swaps:
        for module in modules_of(trainer_class):
            present = {name: function for name, function in functions.items() if name in vars(module)}
            swaps.enter_context(swapped(module, **present))
        yield


#: Methods of TRL's trainers that the mixins work through: batches over the ranks, hidden states, logits and the loss.
_WORKED_THROUGH = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "get_train_dataloader",
    "_inner_training_loop",
    "_generate_single_turn",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_get_last_hidden_state",
)


#: Modules of the experimental trainers that the package adapts with its own classes, and a method of each class.
ASYNC_GRPO = ("trl.experimental.async_grpo.async_grpo_trainer", "_sync_weight")
GKD = ("trl.experimental.gkd.gkd_trainer", "generalized_jsd_loss")
#: By the first words of an experimental trainer's name, the trainer of trl that is nearest to it.
_NEAREST = {
    ("GOLD", "SDFT", "SDPO", "IWOPD", "AsyncDistillation", "ServerDistillation"): "DistillationTrainer",
    ("CPO", "ORPO", "TPO", "OnlineDPO"): "DPOTrainer",
    ("A2PO",): "RLOOTrainer",
}
#: The method that lists the sent weights, by the names of the checkpoint; the callback that begins training; and the
#: function that looks up the device's operations a second.  The prefix of the names of a packed row's paths.
MANIFEST, BEGINS, PEAK_FLOPS = "_iter_vllm_named_params", "_TrainBeginCallback", "get_peak_flops_per_device"
TREE = "tree_"


def derives(trainer_class: type, module: str, method: str) -> bool:
    """Return True if a trainer derives from a class of a module that has a method."""
    return any(cls.__module__ == module and hasattr(cls, method) for cls in trainer_class.__mro__)


def nearest(trainer_class: type) -> str:
    """Return the name of the trl trainer nearest to an experimental trainer."""
    names = [cls.__name__ for cls in trainer_class.__mro__]
    return next(
        (trainer for starts, trainer in _NEAREST.items() if any(name.startswith(starts) for name in names)),
        "GRPOTrainer",
    )


def own_methods(trainer_class: type) -> list[str]:
    """Return the methods of TRL's experimental classes that override methods used by the mixins."""
    # Their own code reads the model's logits or weights, or counts the world's ranks.
    adapted = (ASYNC_GRPO[0], GKD[0])
    return [
        f"{cls.__name__}.{name}"
        for cls in trainer_class.__mro__
        if cls.__module__.startswith("trl.experimental.") and cls.__module__ not in adapted
        for name in _WORKED_THROUGH
        if name in vars(cls)
    ]


def generates(trainer_class: type) -> bool:
    """Return True if a trainer samples from the model that it trains."""
    return hasattr(trainer_class, "_generate_single_turn")


#: The function to which TRL's distillation trainer hands hidden states and the weights of both heads.
DIVERGENCE = "_chunked_divergence_loss"


def reads_head_weights(trainer_class: type) -> bool:
    """Return True if a trainer computes its loss from hidden states and the weights of two heads."""
    return generates(trainer_class) and any(DIVERGENCE in vars(module) for module in modules_of(trainer_class))


def global_of(trainer_class: type, name: str) -> Any:
    """Return the global object with a name from a trainer's modules."""
    return next(vars(module)[name] for module in modules_of(trainer_class) if name in vars(module))


def takes_reference(trainer_class: type) -> bool:
    """Return True if a trainer has the argument ``ref_model``; GRPO's and RLOO's load the model by name."""
    own: Any = next(
        cls for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.") and "__init__" in vars(cls)
    )
    return "ref_model" in inspect.signature(own.__init__).parameters
