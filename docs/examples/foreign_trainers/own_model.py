"""A trainer with a model class of its own: the Llama plan, with its names replaced and what differs overridden.

torchrun --standalone --nproc-per-node 2 docs/examples/foreign_trainers/own_model.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import tp_plans
from tp_plans import Plan, Replicate, RowwiseParallel
from tp_plans.styles import ParallelAttention

VOCABULARY, WIDTH, HEAD_WIDTH, HEADS, KV_HEADS = 131, 64, 16, 4, 2

#: What Llama's parts are called here.
NAMES = {
    "model": "decoder",
    "embed_tokens": "embed",
    "self_attn": "attn",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "lm_head": "token_head",
}


def own_plan(*, sequence_parallel: bool) -> Plan:
    """The plan of an ``ActorCritic`` that sits at ``policy`` in its trainer."""
    llama = tp_plans.plan_for("llama", sequence_parallel=sequence_parallel)
    renamed = {".".join(NAMES.get(part, part) for part in path.split(".")): style for path, style in llama.items()}
    plan = Plan(renamed, name="actor and critic", sequence_parallel=sequence_parallel)
    ours = {
        # The argument is called x here, and the code counts heads itself: a rank must see its own number.
        "decoder.layers.*.attn": ParallelAttention(
            argument="x", head_count_attrs=("heads", "kv_heads"), kv_groups_attr="groups", kv_heads_attr="kv_heads"
        ),
        # One value a token, from the stream as it comes, whole or cut on the sequence.
        "value_head": RowwiseParallel(input_layouts=Replicate()),
    }
    removed = {"decoder": None} if "decoder" in plan else {}  # our decoder takes token ids only
    return plan.override({**ours, **removed}).with_prefix("policy")


class Attention(nn.Module):
    """Causal attention with rotary positions, some heads sharing keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.groups = HEADS, KV_HEADS, HEADS // KV_HEADS
        self.head_dim = HEAD_WIDTH
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, width]`` to the same."""
        q = self.q_proj(x).unflatten(-1, (self.heads, HEAD_WIDTH)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, HEAD_WIDTH)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, HEAD_WIDTH)).transpose(1, 2)
        k, v = (each.repeat_interleave(self.groups, dim=1) for each in (rotated(k), v))
        mixed = nn.functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """``[batch, heads, seq, head]``, each pair of features turned by its position (arXiv:2104.09864)."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_WIDTH, 2, device=x.device, dtype=x.dtype) / HEAD_WIDTH)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, width]`` to the same."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), FeedForward()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, width]`` to the same."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Embedding, layers and a last norm."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` to ``[batch, seq, width]``."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class ActorCritic(nn.Module):
    """A decoder with a head for tokens and one for values; no Hugging Face class, and no config."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.token_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.value_head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq]`` to logits ``[batch, seq, vocab]`` and values ``[batch, seq]``."""
        x = self.decoder(tokens)
        return self.token_head(x), self.value_head(x).squeeze(-1)


class Trainer(nn.Module):
    """What the trainer keeps beside its policy."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = ActorCritic()

    def split(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> "Trainer":
        """Split the policy over the mesh's one axis."""
        plan = own_plan(sequence_parallel=sequence_parallel)
        tp_plans.check(plan, self, tp=mesh.size()).raise_on_error()
        parallelize_module(self, mesh, plan.to_torch())
        return self

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross entropy of the next tokens, and the squared error of values that should be the tokens left."""
        logits, values = (each.full_tensor() if isinstance(each, DTensor) else each for each in self.policy(tokens))
        left = torch.arange(tokens.shape[1], 0, -1, device=tokens.device) / tokens.shape[1]
        imitation = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return imitation + (values - left).square().mean()

    def train_on(self, data: list[Tensor], *, lr: float) -> list[float]:
        """Take one step on each batch ``[batch, seq]`` of tokens; the loss of every step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=lr)
        losses = []
        for tokens in data:
            optimizer.zero_grad()
            loss = self.loss(tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


def main() -> None:
    """Train on one batch again and again, split over all ranks of the job."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same weights and tokens on every rank
    trainer = Trainer().to(device).split(mesh, sequence_parallel=True)
    tokens = torch.randint(0, VOCABULARY, (4, 17)).to(device)
    losses = trainer.train_on([tokens] * 20, lr=0.1)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps on {mesh.size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
