"""Activation checkpointing: activations are freed after forward and recomputed in backward.

Source of the method: Chen et al., arXiv:1604.06174; selective: torch's ``create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from fsdp_runtime._torch_compat import has_forward
from fsdp_runtime._transformers_compat.models import disable_cache
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.memory.activations import ActivationOrder
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.recomputation import Offloading, Recomputing, SelectiveContexts
from fsdp_runtime.steps.routing.routers import routers_of
from fsdp_runtime.steps.routing.session import CarriedRoutes
from fsdp_runtime.values import require_bool, require_one_of
from fsdp_runtime.wrap import wrap
from tp_plans.naming import MLP_MODULES

logger = logging.getLogger(__name__)

Mode = Literal["none", "mlp", "block", "selective"]


@dataclass(frozen=True)
class SelectiveCheckpoint:
    """Recompute every operator of a block except for the operators in ``save``: their results are kept.

    Args:
        save: names of the ATen or collective operators with kept results, such as ``"aten.mm"`` or
            ``"_c10d_functional.all_reduce"``; a name stands for all its overloads.  By default the most expensive
            operators: matrix products, attention and collectives.

    Example:
        >>> from fsdp_runtime.steps import SelectiveCheckpoint
        >>> SelectiveCheckpoint(save=("aten.mm",)).overloads()[0]
        <OpOverload(op='aten.mm', overload='default')>
    """

    save: tuple[str, ...] = (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.reduce_scatter_tensor",
    )

    def overloads(self) -> list[Any]:
        """Return the operators as torch's objects, except for operators that this torch lacks.

        Raises:
            OptionError: a name has no namespace, or none of the names exists.
        """
        operators = []
        for name in self.save:
            namespace, dot, operator = name.partition(".")
            if not dot:
                raise OptionError(f"SelectiveCheckpoint(save=...): {name!r} has no namespace: write 'aten.{name}'")
            packet = getattr(getattr(torch.ops, namespace), operator, None)
            operators += [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
        if not operators:
            raise OptionError(
                f"SelectiveCheckpoint(save={self.save!r}): torch {torch.__version__} has none of these operators"
            )
        return operators


CheckpointMode = Mode | SelectiveCheckpoint


@dataclass(frozen=True)
class ActivationCheckpointing(Step[tuple[str, ...]]):
    """Make modules recompute their activations in backward.

    Recomputation would append each key to a key/value cache twice, so ``use_cache`` of the model's configs is set to
    ``False`` where whole blocks recompute.

    With ``offload`` the tensors that blocks keep for backward, such as the inputs of blocks that recompute, are copied
    to host memory (pinned for an accelerator) on a separate stream.  Backward copies them back a block ahead of their
    use.  Parameters, buffers, masks and storages below 1,024 bytes stay on the device.  Gradients are the same, bit for
    bit.  ``fsdp_runtime.meters.StepMeter`` reports the bytes on the host.

    Args:
        mode: ``"none"``; ``"mlp"``, ``"block"`` or ``"selective"`` to recompute those parts in backward; or a
            :class:`SelectiveCheckpoint` with the operators to keep.
        offload: keep the tensors that blocks save for backward on the host, in every mode.

    Raises:
        OptionError: an unknown mode.
        OffloadError: in a forward, if the host's memory does not suffice.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]))
        >>> model = parallelize(model, MeshSpec().build(device_type="cpu"), activation_checkpointing="block")
        >>> describe_parallelism(model).recomputing
        ('0.0', '0.1')
    """

    mode: CheckpointMode = "block"
    offload: bool = False

    def __post_init__(self) -> None:
        require_bool("offload", self.offload)

    @property
    def joins_gradients(self) -> bool:
        """A recomputation serves one backward."""
        return self.mode != "none"

    def check(self, setup: Setup) -> tuple[str, ...]:
        """Return the paths of the modules that recompute."""
        mode, known = self.mode, ", or a SelectiveCheckpoint(save=...)"
        if isinstance(mode, SelectiveCheckpoint):
            mode.overloads()
        else:
            require_one_of("activation_checkpointing", mode, get_args(Mode), or_else=known)
        if mode == "none":
            return ()
        if mode == "mlp":
            return _mlps(setup.structure)
        return tuple(path for path, block in setup.structure.blocks.items() if has_forward(block))

    def apply(self, model: nn.Module, setup: Setup, checked: tuple[str, ...]) -> None:
        """Make the modules recompute, and blocks keep tensors on the host."""
        selective = SelectiveCheckpoint() if self.mode == "selective" else self.mode
        saved = selective.overloads() if isinstance(selective, SelectiveCheckpoint) else None
        exchanged = routers_of(setup.structure) if checked and setup.expert_plan is not None else None
        documents = runtime_state(setup.facts.base_model).documents
        modules = {path: model.get_submodule(path) for path in checked}
        wrap(modules.values(), Recomputing)
        for path, module in modules.items():
            state = runtime_state(module)
            state.checkpoint_contexts = SelectiveContexts(saved) if saved else None
            routes = CarriedRoutes(exchanged and exchanged.inside(path))
            state.carried = (routes,) if documents is None else (routes, documents)
        if self.mode not in ("none", "mlp"):  # no cache is filled inside a feed-forward part
            disable_cache(model)
        if self.offload:
            order = ActivationOrder()
            blocks = [block for block in map(model.get_submodule, setup.structure.blocks) if has_forward(block)]
            wrap(blocks, Offloading)
            for block in blocks:
                runtime_state(block).activations = order
        if self.mode != "none" or self.offload:
            text = "activation checkpointing: %d modules recompute; activations of blocks on the host: %s"
            logger.info(text, len(checked), self.offload)


def _mlps(structure: ModelStructure) -> tuple[str, ...]:
    paths = tuple(
        f"{path}.{name}"
        for path, block in structure.blocks.items()
        for name, _ in block.named_children()
        if name in MLP_MODULES
    )
    if not any(path.startswith(f"{block}.") for path in paths for block in structure.decoder):
        block = structure.decoder[0]
        parts = ", ".join(name for name, _ in structure.blocks[block].named_children())
        raise ModelError(
            f"activation_checkpointing='mlp': {block} has {parts}, and no module called "
            f"{' or '.join(MLP_MODULES)}; use 'block' or 'selective'"
        )
    return paths
