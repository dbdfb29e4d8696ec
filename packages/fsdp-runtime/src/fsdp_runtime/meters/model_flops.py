"""Count the floating-point operations that a model needs, without the ranks' extra work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.model.structure import ModelStructure, inspect_model
from fsdp_runtime.steps.float8 import float8_products
from fsdp_runtime.steps.routing.routers import routers_of

#: A multiply-add is two operations.
_MULTIPLY_ADD = 2
#: Passes of a product with a trained weight: forward, gradient of its input, gradient of the weight.
_TRAINED, _FROZEN = 3, 2


@dataclass(frozen=True)
class AttentionFlops:
    """The attention of one block."""

    per_pair: int  # operations of the forward for one query and one key that it attends to, over all heads
    causal: bool = True  # a query attends to itself and earlier tokens; else to the whole sequence
    window: int | None = None  # the most keys of a query; ``None`` without a bound
    chunk: int | None = None  # attention stays within chunks of this many tokens; ``None`` without chunks

    def pairs(self, length: int) -> int:
        """Return the pairs of a query and a key in one sequence."""
        if self.chunk is not None and length > self.chunk:
            return length // self.chunk * self.pairs(self.chunk) + self.pairs(length % self.chunk)
        if not self.causal:
            return length * length
        near = length if self.window is None else min(length, self.window)
        return near * (near + 1) // 2 + (length - near) * near


@dataclass(frozen=True)
class ModelFlops:
    """The operations of forward and backward of a model's text, without recomputation.

    It counts products with weights and attention, as in `PaLM's appendix B <https://arxiv.org/abs/2204.02311>`_, but
    with the actual mask: causal attention has half of the pairs, a sliding window fewer, and documents of packed
    rows do not see one another.  A token uses ``top_k`` of a mixture's experts.  A frozen weight has no gradient.  The
    count leaves out norms, activation functions, recurrences of linear attention, and towers of images and sound.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        ...     vocab_size=64)
        >>> flops = ModelFlops.of(AutoModelForCausalLM.from_config(config))
        >>> flops.per_token == 6 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 64 * 32)
        True
        >>> flops.attention[0].pairs(4)
        10
    """

    per_token: float  # operations of the products with weights for one token, forward and backward
    attention: tuple[AttentionFlops, ...]  # the attention of each block that has attention
    float8_per_token: float = 0.0  # the part of ``per_token`` in float8, by the step ``Float8``

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Count the operations of a model, before or after ``parallelize``.

        Raises:
            ModelError: the model has no blocks or is in pipeline stages, or a router does not tell the number of
                experts per token.
        """
        if stages_of(model) is not None:
            raise ModelError(
                "a rank has only the blocks of its pipeline stages: count with ModelFlops.of(model) before "
                "parallelize, and pass StepMeter(..., flops=...)"
            )
        structure = inspect_model(model)
        operations = [*_of_weights(structure)]
        in_float8 = sum(part for _, part in operations)
        return cls(sum(count for count, _ in operations), tuple(_of_attention(structure)), in_float8)

    def step(self, lengths: Iterable[int]) -> float:
        """Return the operations of forward and backward for sequences of these lengths, in tokens."""
        total = 0.0
        for length in lengths:
            pairs = sum(block.per_pair * block.pairs(length) for block in self.attention)
            total += self.per_token * length + _TRAINED * pairs
        return total


def _of_weights(structure: ModelStructure) -> Iterator[tuple[float, float]]:
    """Yield the operations of each weight for one token, and their part in float8."""
    tree = structure.tree
    towers = _towers(structure)
    shares = dict(_expert_shares(structure))
    head = structure.lm_head
    for path, module in tree.modules.items():
        if path.startswith(towers) or (isinstance(module, nn.Embedding) and path != head):
            continue
        share = next((share for prefix, share in shares.items() if f"{path}.".startswith(f"{prefix}.")), 1.0)
        for parameter in tree.own_parameters(path).values():
            if parameter.ndim >= 2:
                passes = _TRAINED if parameter.requires_grad else _FROZEN
                once = _MULTIPLY_ADD * parameter.numel() * share
                yield passes * once, min(passes, float8_products(module)) * once


def _towers(structure: ModelStructure) -> tuple[str, ...]:
    """Return the prefixes of the modules around blocks that the token embedding does not feed."""
    decoder = structure.decoder
    paths = set()
    for block in structure.blocks:
        if block in decoder:
            continue
        parts = block.split(".")
        prefixes = [".".join(parts[:count]) + "." for count in range(1, len(parts))]
        outside = [p for p in prefixes if not any(f"{path}.".startswith(p) for path in decoder)]
        paths.update(outside[:1])
    return tuple(paths) or ("\0",)


def _expert_shares(structure: ModelStructure) -> Iterator[tuple[str, float]]:
    """Yield the path of each mixture's experts and the fraction of experts that a token uses."""
    for router in routers_of(structure).by_path.values():
        if router.share is None:
            raise ModelError(
                f"{router.path} ({type(router.module).__name__}) does not tell its number of experts per token: set "
                "its attribute top_k, or give StepMeter flops=ModelFlops(per_token=..., attention=...)"
            )
        yield router.experts_path, router.share


def _of_attention(structure: ModelStructure) -> Iterator[AttentionFlops]:
    for index, block in enumerate(structure.decoder):
        heads = structure.heads.get(block)
        for path in (block, *structure.tree.below(block)):
            module = structure.tree.modules[path]
            dims = (getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None))
            count = getattr(module, "num_heads", None)
            if all(isinstance(size, int) for size in (*dims, count)):  # latent attention
                yield _attention(module, index, _MULTIPLY_ADD * count * sum(dims))  # type: ignore[operator, arg-type]
                break
            if heads is not None and isinstance(getattr(module, "head_dim", None), int):
                yield _attention(module, index, 2 * _MULTIPLY_ADD * heads.query * heads.dim)
                break


def _attention(module: nn.Module, index: int, per_pair: int) -> AttentionFlops:
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[index] if index < len(kinds) else None
    of_config = getattr(config, "sliding_window", None) if kind in (None, "sliding_attention") else None
    window = getattr(module, "sliding_window", of_config)
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    causal = bool(getattr(module, "is_causal", True))
    return AttentionFlops(per_pair, causal, window if isinstance(window, int) else None, chunk)
