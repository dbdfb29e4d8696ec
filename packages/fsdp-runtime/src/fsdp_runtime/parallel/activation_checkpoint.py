"""Activation checkpointing: what a module computed is freed after forward and recomputed in backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.model.structure import ModelStructure

logger = logging.getLogger(__name__)

Mode = Literal["none", "mlp", "block", "selective"]

#: What models call the feed-forward part of a block.
MLP_NAMES = ("mlp", "feed_forward", "ffn", "moe", "block_sparse_moe")

_SAVED = "_fsdp_runtime_saved"


@dataclass(frozen=True)
class SelectiveCheckpoint:
    """Recompute every operator of a block but some, whose results are kept.

    Args:
        save: names of ATen or collective operators, as ``"aten.mm"`` or ``"_c10d_functional.all_reduce"``, whose
            results are kept; all overloads of each.  By default those that cost most to run again: matrix products,
            attention and collectives.
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
        """The operators as torch's objects; those that this torch lacks are left out.

        Raises:
            OptionError: a name has no namespace, or none of the names exists.
        """
        found = []
        for name in self.save:
            namespace, dot, operator = name.partition(".")
            if not dot:
                raise OptionError(f"SelectiveCheckpoint(save=...): {name!r} has no namespace: write 'aten.{name}'")
            packet = getattr(getattr(torch.ops, namespace), operator, None)
            found += [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
        if not found:
            raise OptionError(
                f"SelectiveCheckpoint(save={self.save!r}): torch {torch.__version__} has none of these operators"
            )
        return found


ActivationCheckpointing = Mode | SelectiveCheckpoint


def modules_to_recompute(structure: ModelStructure, mode: object) -> dict[str, nn.Module]:
    """The modules that :func:`apply_ac` would make recompute; nothing is changed.

    Raises:
        OptionError: an unknown mode.
        ModelError: ``"mlp"`` of a model whose blocks have no part of that name.
    """
    if isinstance(mode, SelectiveCheckpoint):
        mode.overloads()
    elif mode not in get_args(Mode):
        allowed = ", ".join(map(repr, get_args(Mode)))
        raise OptionError(
            f"activation_checkpointing={mode!r}: write one of {allowed}, or a SelectiveCheckpoint(save=...)"
        )
    if mode == "none":
        return {}
    return _mlps(structure) if mode == "mlp" else dict(structure.blocks)


def apply_ac(model: nn.Module, structure: ModelStructure, mode: ActivationCheckpointing) -> list[str]:
    """Make modules recompute their activations in backward, in place.

    A key/value cache cannot survive recomputation (each key would be appended twice), so the configs'
    ``use_cache`` is turned off.

    Args:
        model: the model.
        structure: its parts.
        mode: ``"none"``; ``"mlp"`` for the feed-forward part of every block; ``"block"`` for every block;
            ``"selective"`` or a :class:`SelectiveCheckpoint` for every block but its costly operators.

    Returns:
        The paths of the modules that recompute.

    Raises:
        OptionError: an unknown mode.
        ModelError: ``"mlp"`` of a model whose blocks have no part of that name.
    """
    chosen = modules_to_recompute(structure, mode)
    selective = SelectiveCheckpoint() if mode == "selective" else mode
    saved = selective.overloads() if isinstance(selective, SelectiveCheckpoint) else None
    for module in chosen.values():
        _recompute(module, saved)
    if mode not in ("none", "mlp"):  # no cache is filled inside a feed-forward part
        _turn_off_cache(model)
    logger.info("activation checkpointing: %d modules recompute", len(chosen))
    return list(chosen)


def recomputes(module: nn.Module) -> bool:
    """Whether a module recomputes its activations by :func:`apply_ac`."""
    return isinstance(module, _Recomputing)


class _Recomputing:
    """Mixed in before a module's class; a subclass rather than a replaced ``forward``, so that deepcopy works."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            raise ModelError(
                f"{type(self).__name__} recomputes its activations but was given a key/value cache, which "
                "recomputation would fill twice: pass use_cache=False"
            )
        context = {} if (context_fn := self.__dict__.get(_SAVED)) is None else {"context_fn": context_fn}
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)


def _mlps(structure: ModelStructure) -> dict[str, nn.Module]:
    found = {
        f"{path}.{name}": child
        for path, block in structure.blocks.items()
        for name, child in block.named_children()
        if name in MLP_NAMES
    }
    if not any(path.startswith(f"{block}.") for path in found for block in structure.decoder):
        block = structure.decoder[0]
        parts = ", ".join(name for name, _ in structure.blocks[block].named_children())
        raise ModelError(
            f"activation_checkpointing='mlp': {block} has {parts}, none of which is called "
            f"{', '.join(MLP_NAMES)}; use 'block' or 'selective'"
        )
    return found


def _recompute(module: nn.Module, saved: list[Any] | None) -> None:
    if not isinstance(module, _Recomputing):
        module.__class__ = _recomputing(type(module))  # type: ignore[arg-type]  # mypy: type[Module] is hashable
    context_fn: Callable[[], Any] | None = partial(create_selective_checkpoint_contexts, saved) if saved else None
    module.__dict__[_SAVED] = context_fn


@cache
def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """One subclass a class: the compiler guards on types and would compile each block anew."""
    return type(f"Recomputing{cls.__name__}", (_Recomputing, cls), {})


def _turn_off_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
