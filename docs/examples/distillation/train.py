"""On-policy distillation: the student on TP x FSDP2 samples, a larger teacher on a mesh of its own scores.

Six ranks: 0 to 3 hold the student (``dp_shard=2, tp=2``), 4 and 5 the teacher (``tp=2``).  Once, the teacher's head
goes to the student's ranks, which keep the rows of their ``tp`` shard.  In every step tokens go to the teacher and its
hidden states come back; the logits of neither are held.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_runtime
import rl_logprobs

STUDENT, TEACHER = torch.arange(4).view(2, 2), torch.tensor([4, 5])
VOCABULARY, ROWS, PROMPT, LENGTH = 101, 8, 4, 12
STUDENT_WIDTH, TEACHER_WIDTH = 32, 64
BETAS = {0.0: "forward KL", 0.5: "Jensen-Shannon", 1.0: "reverse KL"}


def model(width: int, seed: int, peaked: float) -> LlamaForCausalLM:
    """A small Llama; ``peaked`` scales its head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    found = LlamaForCausalLM(config)
    with torch.no_grad():
        found.lm_head.weight.mul_(peaked)
    return found


class Student:
    """What the student's ranks do."""

    def __init__(self, mesh: DeviceMesh, beta: float, lr: float) -> None:
        self.mesh, self.beta = fsdp_runtime.adopt_mesh(mesh), beta
        self.model = fsdp_runtime.parallelize(model(STUDENT_WIDTH, 1, 1.0), self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.data = fsdp_runtime.submesh(self.mesh, "dp")
        self.teacher_head = torch.empty(0)

    def keep_head(self, weight: torch.Tensor) -> None:
        """Keep the rows of the teacher's head that this rank's part of the vocabulary needs."""
        self.teacher_head = distribute_tensor(weight, self.mesh["tp"], [Shard(0)])

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor, step: int) -> torch.Tensor:
        """Complete this data-parallel rank's prompts."""
        tokens = prompts.chunk(self.data.size())[self.data.get_local_rank()]
        while tokens.shape[1] < LENGTH:
            logits = self.model(tokens, use_cache=False).logits[:, -1:]
            seed = (step * LENGTH + tokens.shape[1]) * self.data.size() + self.data.get_local_rank()
            tokens = torch.cat([tokens, rl_logprobs.sample_tokens(logits, seed=seed)], 1)
        return tokens

    def update(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Take one step towards the teacher, and return the mean divergence of this rank's completions."""
        mask = torch.zeros_like(tokens)
        mask[:, PROMPT - 1 : -1] = 1  # position i predicts token i + 1
        teacher = rl_logprobs.LinearLogits(states, self.teacher_head)

        def divergence(hidden: torch.Tensor, head: Any) -> torch.Tensor:
            student = rl_logprobs.LinearLogits.of(hidden, head)
            return rl_logprobs.token_divergence(student, teacher, beta=self.beta, mask=mask)

        values = fsdp_runtime.forward_with_lm_head(self.model, divergence, tokens, use_cache=False)
        loss = values.sum() / mask.sum()
        loss.backward()
        rl_logprobs.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Teacher:
    """What the teacher's ranks do."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.model = fsdp_runtime.parallelize(model(TEACHER_WIDTH, 2, 20.0), fsdp_runtime.adopt_mesh(mesh))

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the head would get."""
        return fsdp_runtime.forward_with_lm_head(self.model, lambda hidden, _: hidden, tokens, use_cache=False)

    def head(self) -> torch.Tensor:
        """Return the full weight of the head."""
        return self.model.lm_head.weight.detach().full_tensor()


def run(beta: float, steps: int, lr: float) -> list[float]:
    """Distil, and return the mean divergence of each step."""
    rank = dist.get_rank()
    student_mesh = DeviceMesh("cpu", STUDENT, mesh_dim_names=("dp_shard", "tp"))  # every rank takes part in both
    teacher_mesh = DeviceMesh("cpu", TEACHER, mesh_dim_names=("tp",))
    is_student = rank in STUDENT
    student = Student(student_mesh, beta, lr) if is_student else None
    teacher = Teacher(teacher_mesh) if rank in TEACHER else None
    # A larger program sends shards to shards: the weight-sync guide.
    head = teacher.head() if teacher else torch.empty(VOCABULARY, TEACHER_WIDTH)
    dist.broadcast(head, src=int(TEACHER[0]))
    if student:
        student.keep_head(head)
    del head
    prompts = torch.randint(VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    curve = []
    for step in range(steps):
        own = student.sample(prompts, step) if student else torch.empty(ROWS // 2, LENGTH, dtype=torch.int64)
        parts = []
        for source in STUDENT[:, 0].tolist():  # one rank of each data-parallel part
            part = own.clone()
            dist.broadcast(part, src=source)
            parts.append(part)
        states = teacher.states(torch.cat(parts)) if teacher else torch.empty(ROWS, LENGTH, TEACHER_WIDTH)
        dist.broadcast(states, src=int(TEACHER[0]))
        loss = torch.zeros(())
        if student:
            rows = states.chunk(student.data.size())[student.data.get_local_rank()]
            loss = student.update(own, rows)
        dist.all_reduce(loss)  # the mean over the student's four ranks
        curve.append(loss.item() / STUDENT.numel())
        if rank == 0:
            print(f"{BETAS.get(beta, beta)}: step {step}: {curve[-1]:.4f}", flush=True)
    return curve


def draw(curves: dict[float, Sequence[float]], path: Path) -> None:
    """Write the divergences as SVG, each relative to its first value."""
    colours = ("#2471a3", "#1e8449", "#c0392b")
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 260" font-family="sans-serif" font-size="12">',
        '<text x="40" y="20">divergence, relative to the first step (0 to 1.25)</text>',
        '<rect x="40" y="30" width="360" height="160" fill="none" stroke="#999"/>',
        '<text x="400" y="205" text-anchor="end">step</text>',
    ]
    for row, ((beta, values), colour) in enumerate(zip(curves.items(), colours, strict=False)):
        step = 360 / max(1, len(values) - 1)
        points = " ".join(f"{40 + i * step:.1f},{190 - 128 * v / values[0]:.1f}" for i, v in enumerate(values))
        label = f"{BETAS.get(beta, beta)}: {values[0]:.2f} to {values[-1]:.2f} nats a token"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<rect x="40" y="{213 + 16 * row}" width="18" height="3" fill="{colour}"/>')
        parts.append(f'<text x="64" y="{218 + 16 * row}">{label}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))


def main() -> None:
    """Distil with each divergence and draw the curves."""
    parser = ArgumentParser(description="On-policy distillation from hidden states, student and teacher on two meshes.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--beta", type=float, nargs="*", default=list(BETAS))
    parser.add_argument("--output", type=Path, default=Path("divergence.svg"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curves = {beta: run(beta, options.steps, options.lr) for beta in options.beta}
    if dist.get_rank() == 0:
        draw(curves, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
