"""Names: the model's, the checkpoint's, and which of several tied names is the one on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from fsdp_runtime import _transformers_compat as transformers_compat
from fsdp_runtime.errors import ConversionError, OptionError
from fsdp_runtime.weights.entries import Entry

Names = Literal["checkpoint", "model"]

_LISTED = 8


@dataclass(frozen=True)
class Sources:
    """Where a model's tensors come from.

    Args:
        by_model_name: the checkpoint's name by the model's.
        unexpected: names in the checkpoint that fit nothing.
        rules: the renamings that applied, as transformers has them.
    """

    by_model_name: Mapping[str, str]
    unexpected: Sequence[str]
    rules: list[Any]


def sources(model: nn.Module, found: Sequence[Entry], stored: Sequence[str]) -> Sources:
    """Match a checkpoint's names with the model's.

    Raises:
        ConversionError: the checkpoint has tensors that would have to be fused or cut to fit the model.
    """
    known = {name for entry in found for name in entry.names}
    renamed, rules = transformers_compat.model_names(model, stored, known)
    to_convert = [name for name, (target, converts) in renamed.items() if converts and target in known]
    if to_convert:
        raise ConversionError(
            f"{len(to_convert)} of the checkpoint's tensors are fused or cut differently in the model: "
            f"{_first(to_convert)}. Only renaming is done while loading: convert the checkpoint once with "
            f"{type(model).__name__}.from_pretrained(...).save_pretrained(..., save_original_format=False)"
        )
    return Sources(
        by_model_name={target: name for name, (target, _) in renamed.items() if target in known},
        unexpected=[
            name
            for name, (target, _) in renamed.items()
            if target not in known and not transformers_compat.is_ignored_on_load(model, target)
        ],
        rules=rules,
    )


def outgoing_names(model: nn.Module, found: Sequence[Entry], names: Names) -> list[str | None]:
    """For every entry the name under which it leaves, or ``None`` for one that is not saved.

    Raises:
        ConversionError: the checkpoint's form has other tensors than the model, and not only other names.
        OptionError: ``names`` is neither ``"checkpoint"`` nor ``"model"``.
    """
    if names not in get_args(Names):
        raise OptionError(f"names={names!r}: write 'checkpoint' or 'model'")
    aliases, ignored = transformers_compat.declared_aliases(model), transformers_compat.ignored_on_save(model)
    canonical = [next((name for name in entry.names if name not in aliases), entry.names[0]) for entry in found]
    if names == "model":
        return [None if name in ignored else name for name in canonical]
    outgoing = transformers_compat.checkpoint_names(model, canonical)
    if to_convert := [name for name in canonical if outgoing[name][1]]:
        raise ConversionError(
            f"{len(to_convert)} of the model's tensors are fused or cut differently in its checkpoints: "
            f"{_first(to_convert)}. Only renaming is done on the way out: pass names='model' to get the model's own "
            "tensors, which transformers loads too"
        )
    return [None if name in ignored else outgoing[name][0] for name in canonical]


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
