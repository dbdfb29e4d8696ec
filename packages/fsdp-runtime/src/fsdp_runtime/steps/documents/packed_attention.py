"""Attention over packed rows by kernels that take the boundaries of documents, in the place of restricted masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._transformers_compat.attention import attend_alone, mask_alone, use_attention
from fsdp_runtime._transformers_compat.masks import MaskOfRows, is_causal_mask_function
from fsdp_runtime.model.token_mixers import TokenMixer
from fsdp_runtime.steps.attention.decision import AttentionKernels
from fsdp_runtime.steps.attention.kernels import attend, prepared
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.documents.isolation import REPLACED, CurrentDocuments


@dataclass(eq=False)
class PackedAttention:
    """The attention function and the mask function of one model; rows of one document keep the model's functions."""

    kernels: AttentionKernels
    documents: CurrentDocuments
    implementation: str
    eager: Callable[[type], Any]  # returns the eager attention function for a class of modules
    padding: Tensor | None = None  # ``[batch, seq]`` of the current forward, if the caller gave one

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedAttention:
        """Return itself: a copied model's attention is registered with the functions of this object."""
        return self

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """Compute attention with the signature of ``transformers.AttentionInterface``."""
        if isinstance(attention_mask, SequenceMask):
            output = attend(self.kernels, query, key, value, attention_mask, **options)
            if output is not None:
                return output.contiguous(), None
            attention_mask = attention_mask.full
            self.kernels.report_mask(attention_mask)
        function = self.eager(type(module)) if self.implementation == "eager" else self.implementation
        return attend_alone(function, module, query, key, value, attention_mask, **options)

    def mask(
        self, *, q_length: int, kv_length: int, mask_function: Any, attention_mask: Any, **options: Any
    ) -> Tensor | SequenceMask | None:
        """Build a mask with the signature of ``transformers.AttentionMaskInterface``."""
        documents = self.documents.current
        alone = documents is None or not q_length == kv_length == documents.begins.shape[1]
        plain = is_causal_mask_function(mask_function) or self.padding is not None
        if documents is None or alone or (plain and documents.bounds is None and not documents.packed):
            lengths = {"q_length": q_length, "kv_length": kv_length}
            further = {"mask_function": mask_function, "attention_mask": attention_mask}
            return mask_alone(self.implementation, {**lengths, **further, **options})
        between = MaskOfRows(
            mask_function=mask_function,
            documents=documents.numbers,
            positions=documents.positions,
            subtree_end=None,
            padding=None if self.padding is None else attention_mask,
            batch_size=options["batch_size"],
            use_vmap=options.get("use_vmap", False),
        )
        device, dtype = torch.device(options["device"]), options["dtype"]
        additive = dtype if self.implementation == "eager" else None
        layout = SequenceLayout(q_length, 1, 0)
        mask = SequenceMask(between, layout, device, additive, between.pattern, documents)
        return prepared(self.kernels, mask)


def replace_attention(
    model: Any, mixers: Sequence[TokenMixer], replaced: Sequence[TokenMixer], attention: PackedAttention
) -> None:
    """Register the functions, and leave all other token mixers their attention."""
    paths = {mixer.path for mixer in replaced}
    others = [mixer.module for mixer in mixers if mixer.path not in paths]
    name = f"{REPLACED}{attention.implementation}_{id(attention):x}"
    keep = [inside for module in others for inside in module.modules()]
    use_attention(model, name, attention.attend, attention.mask, keep=keep)
