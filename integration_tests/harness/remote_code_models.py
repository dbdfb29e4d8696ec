"""Small models with the module trees of classes that transformers does not ship: Baichuan, DeciLM and two Nemotrons.

Their checkpoints bring their own code.  What a plan has to cope with is kept as that code has it: names, fused
weights, sizes held in attributes, and what forward does with a weight itself.  The arithmetic is otherwise plain.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.remote_code_layers import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    VOCAB,
    Attention,
    DeltaMemory,
    GatedMLP,
    LinearAttention,
    LinearMLP,
    Norm,
    NormHead,
    PackedAttention,
    StateSpace,
    rotary,
)


class Block(nn.Module):
    """A pre-norm block of named parts; a mixer or an MLP may be absent, and its norm with it."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        attention, parts = getattr(self, "self_attn", None), self._modules
        if attention is not None:
            hidden_states = hidden_states + attention(self.input_layernorm(hidden_states), angles, mask)
        for name in ("gla", "mamba"):
            if name in parts:
                hidden_states = hidden_states + parts[name](self.input_layernorm(hidden_states))
        for norm, name in (("post_attention_layernorm", "mlp"), ("pre_ffn_layernorm", "ffn")):
            if name in parts:
                hidden_states = hidden_states + parts[name](parts[norm](hidden_states))
        return hidden_states


class Body(nn.Module):
    """Embedding, blocks and final norm, with as many learned tokens before the sequence as asked."""

    def __init__(self, blocks: list[Block], *, norm: str = "norm", memory_tokens: int = 0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.layers = nn.ModuleList(blocks)
        self.add_module(norm, Norm(HIDDEN))
        self.final = norm
        self.memory_tokens = nn.Parameter(torch.randn(memory_tokens, HIDDEN)) if memory_tokens else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_states.shape[1]
        if self.memory_tokens is not None:
            memory = self.memory_tokens.expand(hidden_states.shape[0], -1, -1)
            hidden_states, position_ids = torch.cat([memory, hidden_states], dim=1), None
            if attention_mask is not None:
                attention_mask = functional.pad(attention_mask, (len(self.memory_tokens), 0), value=1)
        angles = rotary(hidden_states, position_ids, HEAD_DIM)
        for block in self.layers:
            hidden_states = block(hidden_states, angles, attention_mask)
        hidden_states = self._modules[self.final](hidden_states)
        return hidden_states[:, -length:] if self.memory_tokens is not None else hidden_states


class RemoteCodeModel(nn.Module):
    """A body under one name, a head under another, and a config that says whose tree this is."""

    body_name, head_name, model_type = "model", "lm_head", ""

    def __init__(self, body: Body, head: nn.Module) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            architectures=[type(self).__name__],
            model_type=self.model_type,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            head_dim=HEAD_DIM,
        )
        self.add_module(self.body_name, body)
        self.add_module(self.head_name, head)

    def forward(self, input_ids: Tensor | None = None, use_cache: bool = False, **inputs: Any) -> SimpleNamespace:
        hidden_states = self._modules[self.body_name](input_ids, **inputs)
        return SimpleNamespace(logits=self._modules[self.head_name](hidden_states))

    def get_input_embeddings(self) -> nn.Module:
        return self._modules[self.body_name].embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self._modules[self.head_name]


class BaichuanForCausalLM(RemoteCodeModel):
    model_type = "baichuan"


class DeciLMForCausalLM(RemoteCodeModel):
    model_type = "nemotron-nas"


class NemotronLabsDiffusionModel(RemoteCodeModel):
    body_name, head_name, model_type = "encoder", "diffusion_head", "nemotron_labs_diffusion"


class NemotronFlashForCausalLM(RemoteCodeModel):
    model_type = "nemotron_flash"

    def forward(self, input_ids: Tensor | None = None, use_cache: bool = False, **inputs: Any) -> SimpleNamespace:
        logits = super().forward(input_ids, **inputs).logits
        return SimpleNamespace(logits=logits / self.lm_head.weight.norm(p=2, dim=1))


def _block(attention: nn.Module | None, mlp: nn.Module | None) -> Block:
    parts: dict[str, nn.Module] = {}
    if attention is not None:
        parts |= {"input_layernorm": Norm(HIDDEN), "self_attn": attention}
    if mlp is not None:
        parts |= {"post_attention_layernorm": Norm(HIDDEN), "mlp": mlp}
    return Block(**parts)


def _flash_block(name: str | None, mixer: nn.Module | None, *, ffn: bool = True) -> Block:
    parts: dict[str, nn.Module] = {}
    if name is not None and mixer is not None:
        parts |= {"input_layernorm": Norm(HIDDEN), name: mixer}
    if ffn:
        parts |= {"pre_ffn_layernorm": Norm(HIDDEN), "ffn": GatedMLP(INTERMEDIATE)}
    return Block(**parts)


def _linear_head() -> nn.Module:
    return nn.Linear(HIDDEN, VOCAB, bias=False)


def baichuan() -> RemoteCodeModel:
    """Fused queries, keys and values, and a head that normalises its rows."""
    return BaichuanForCausalLM(Body([_block(PackedAttention(), GatedMLP(INTERMEDIATE)) for _ in range(2)]), NormHead())


def deci_lm() -> RemoteCodeModel:
    """Blocks that differ: in key heads and widths, and in what stands for attention or the MLP, if anything does."""
    blocks = [
        _block(Attention(HEADS // 2), GatedMLP(INTERMEDIATE)),
        _block(None, GatedMLP(2 * INTERMEDIATE)),
        _block(Attention(HEADS // 4), None),
        _block(LinearAttention(), GatedMLP(INTERMEDIATE // 2)),
        _block(Attention(HEADS), LinearMLP()),
    ]
    return DeciLMForCausalLM(Body(blocks), _linear_head())


def nemotron_labs_diffusion() -> RemoteCodeModel:
    """A Ministral tree under ``encoder``, read in both directions, with the head called ``diffusion_head``."""
    blocks = [_block(Attention(HEADS // 2, causal=False), GatedMLP(INTERMEDIATE)) for _ in range(2)]
    return NemotronLabsDiffusionModel(Body(blocks), _linear_head())


def nemotron_flash() -> RemoteCodeModel:
    """Attention, delta memory, state space and plain feed-forward blocks; learned tokens before the sequence."""
    blocks = [
        _flash_block("gla", DeltaMemory()),
        _flash_block("mamba", StateSpace()),
        _flash_block("self_attn", Attention(HEADS // 2)),
        _flash_block(None, None),
    ]
    model = NemotronFlashForCausalLM(Body(blocks, norm="final_layernorm", memory_tokens=3), _linear_head())
    model.lm_head.weight = model.model.embed_tokens.weight  # tied, as in the checkpoints
    return model


REMOTE_CODE_MODELS: dict[str, Callable[[], RemoteCodeModel]] = {
    "baichuan": baichuan,
    "deci_lm": deci_lm,
    "nemotron_flash": nemotron_flash,
    "nemotron_labs_diffusion": nemotron_labs_diffusion,
}
