"""Layers of the remote-code models: attention, feed-forward and recurrent ones, which compute as the originals."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE = 131, 64, 8, 8, 96


class Norm(nn.Module):
    """Root-mean-square norm, in the precision of its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotary(hidden_states: Tensor, position_ids: Tensor | None, head_dim: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a batch's positions, as ``[batch or 1, 1, seq, head_dim]``."""
    if position_ids is None:
        position_ids = torch.arange(hidden_states.shape[1]).unsqueeze(0)
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = position_ids.unsqueeze(-1) * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotated(states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    cosines, sines = angles
    return (states * cosines + torch.cat([-second, first], dim=-1) * sines).to(states.dtype)


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool = True) -> Tensor:
    """Attention over ``[batch, heads, seq, head_dim]`` with fewer key heads repeated; ``mask`` is ``[batch, seq]``."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    length = query.shape[2]
    allowed = torch.ones(length, length, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if mask is not None:
        allowed = allowed & (mask[:, None, None, :].bool() | torch.eye(length, dtype=torch.bool))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


class GatedMLP(nn.Module):
    def __init__(self, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, intermediate, bias=False)
        self.up_proj = nn.Linear(HIDDEN, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class Attention(nn.Module):
    """Separate projections whose head counts are read from attributes, as code before transformers 4.48 does."""

    def __init__(self, key_value_heads: int, head_dim: int = HEAD_DIM, *, causal: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, key_value_heads, head_dim
        self.num_key_value_groups = HEADS // key_value_heads
        self.causal = causal
        self.q_proj = nn.Linear(HIDDEN, HEADS * head_dim, bias=False)
        self.k_proj = nn.Linear(HIDDEN, key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(HIDDEN, key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(HEADS * head_dim, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        mixed = attended(rotated(query, angles), rotated(key, angles), value, mask, causal=self.causal)
        if mixed.shape != (batch, self.num_heads, length, self.head_dim):
            raise ValueError(f"attention gave {list(mixed.shape)} for {self.num_heads} heads of {self.head_dim}")
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class PackedAttention(nn.Module):
    """Baichuan's: one weight with all queries, then all keys, then all values."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = HIDDEN, HEADS, HEAD_DIM
        self.W_pack = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden_states.shape
        packed = self.W_pack(hidden_states).unflatten(-1, (3, self.hidden_size))
        query, key, value = (
            states.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2) for states in packed.unbind(-2)
        )
        mixed = attended(rotated(query, angles), rotated(key, angles), value, mask).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch, length, self.hidden_size))


class NormHead(nn.Module):
    """Baichuan 2's output projection, whose rows are normalised in every training step; no ``nn.Linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.linear(hidden_states, functional.normalize(self.weight))


class LinearAttention(nn.Module):
    """DeciLM's replacement of attention by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        return self.linear_attn(hidden_states)


class LinearMLP(nn.Module):
    """DeciLM's replacement of the MLP by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_mlp = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.linear_mlp(hidden_states)


class DeltaMemory(nn.Module):
    """A linear-attention layer of Nemotron-Flash: per head, a matrix that the delta rule updates token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.b_proj = nn.Linear(HIDDEN, HEADS, bias=False)
        self.o_norm = Norm(HEAD_DIM)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:2], self.num_heads, -1)
        query, key, value = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        key, step = functional.normalize(key, dim=-1), self.b_proj(hidden_states).sigmoid().unsqueeze(-1)
        memory = key.new_zeros(shape[0], self.num_heads, key.shape[-1], value.shape[-1])
        read = []
        for t in range(shape[1]):
            error = value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], memory)
            memory = memory + torch.einsum("bhk,bhv->bhkv", key[:, t], step[:, t] * error)
            read.append(torch.einsum("bhk,bhkv->bhv", query[:, t], memory))
        return self.o_proj(self.o_norm(torch.stack(read, dim=1)).flatten(2))


class StateSpace(nn.Module):
    """A Mamba-2 layer of Nemotron-Flash: one fused projection, a causal convolution, a decaying state per head."""

    def __init__(self, state: int = 4, kernel: int = 3) -> None:
        super().__init__()
        self.num_heads, self.state, self.kernel = HEADS, state, kernel
        self.in_proj = nn.Linear(HIDDEN, 2 * HIDDEN + 2 * state + HEADS, bias=False)
        self.conv1d = nn.Conv1d(HIDDEN + 2 * state, HIDDEN + 2 * state, kernel, groups=HIDDEN + 2 * state)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.zeros(HEADS)) for _ in range(3))
        self.norm = Norm(HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, mixed, step = self.in_proj(hidden_states).split([HIDDEN, HIDDEN + 2 * self.state, self.num_heads], dim=-1)
        mixed = functional.silu(
            self.conv1d(functional.pad(mixed.transpose(1, 2), (self.kernel - 1, 0))).transpose(1, 2)
        )
        values, write, read = mixed.split([HIDDEN, self.state, self.state], dim=-1)
        values = values.unflatten(-1, (self.num_heads, -1))
        step = functional.softplus(step + self.dt_bias)
        decay = torch.exp(-step * self.A_log.exp())
        state = values.new_zeros(*values.shape[:1], *values.shape[2:], self.state)
        outputs = []
        for t in range(values.shape[1]):
            written = torch.einsum("bhd,bs->bhds", step[:, t].unsqueeze(-1) * values[:, t], write[:, t])
            state = decay[:, t, :, None, None] * state + written
            outputs.append(torch.einsum("bhds,bs->bhd", state, read[:, t]))
        mixed = torch.stack(outputs, dim=1) + self.D.unsqueeze(-1) * values
        return self.out_proj(self.norm(mixed.flatten(2) * functional.silu(gate)))
