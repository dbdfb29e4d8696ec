"""Draw the guide's picture of a schedule: run pipeline stages on CPU ranks, and record the times of their actions.

Run ``torchrun --nproc-per-node 2 docs/generate/pipeline_trace.py``; rank 0 writes ``docs/guides/pipeline-trace.svg``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from transformers import AutoModelForCausalLM, LlamaConfig

import fsdp_runtime
from fsdp_runtime.steps import Pipeline, forward_backward

PICTURE = Path(__file__).parents[1] / "guides" / "pipeline-trace.svg"
BATCHES, LENGTH = 6, 256
ACTIONS = {"forward_one_chunk": ("F", "#4c78a8"), "backward_one_chunk": ("B", "#f58518")}
WIDTH, ROW, LEFT = 860, 44, 70

#: An action, its micro-batch, its start and its end in seconds.
Span = tuple[str, int, float, float]


def main() -> None:
    """Train twice, and draw the second step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 4096}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8))
    mesh = fsdp_runtime.MeshSpec(pp=2).build(device_type="cpu")
    fsdp_runtime.parallelize(model, mesh, steps=(Pipeline("1F1B", microbatches=BATCHES),))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 4096, (1, LENGTH), generator=generator) for _ in range(BATCHES)]
    batches = [{"input_ids": ids, "labels": ids} for ids in rows]
    forward_backward(model, batches)
    spans: list[Span] = []
    for name, (letter, _) in ACTIONS.items():
        setattr(PipelineStage, name, _timed(getattr(PipelineStage, name), letter, spans))
    dist.barrier()
    forward_backward(model, batches)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, spans)
    if dist.get_rank() == 0:
        PICTURE.write_text(_picture(by_rank), encoding="utf-8")
    dist.destroy_process_group()


def _timed(call: Callable[..., Any], letter: str, spans: list[Span]) -> Callable[..., Any]:
    def timed(stage: PipelineStage, batch: int, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()  # of the machine, the same on every rank
        result = call(stage, batch, *args, **kwargs)
        spans.append((letter, batch, start, time.monotonic()))
        return result

    return timed


def _picture(by_rank: list[list[Span]]) -> str:
    first = min(start for spans in by_rank for _, _, start, _ in spans)
    last = max(end for spans in by_rank for *_, end in spans)
    scale = (WIDTH - LEFT - 10) / (last - first)
    colors = dict(ACTIONS.values())
    height = ROW * len(by_rank) + 56
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12"><title>A trace of 1F1B</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for rank, spans in enumerate(by_rank):
        top = 10 + ROW * rank
        idle = 1 - sum(end - start for *_, start, end in spans) / (last - first)
        lines.append(f'<text x="6" y="{top + 16}">stage {rank}</text>')
        lines.append(f'<text x="6" y="{top + 30}" fill="#666666" font-size="10">waits {idle:.0%}</text>')
        for letter, batch, start, end in spans:
            x, width = LEFT + (start - first) * scale, max((end - start) * scale, 1)
            middle, label = x + width / 2, f"{letter}{batch}"
            lines.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 12}" fill="{colors[letter]}" '
                'stroke="#ffffff"/>'
            )
            lines.append(f'<text x="{middle:.1f}" y="{top + 20}" fill="#ffffff" text-anchor="middle">{label}</text>')
    below = 10 + ROW * len(by_rank)
    lines.append(
        f'<text x="{LEFT}" y="{below + 14}">F forward, B backward, by micro-batch; white: waiting for the other stage, '
        "sends included</text>"
    )
    lines.append(f'<text x="{LEFT}" y="{below + 32}">{1000 * (last - first):.0f} ms from left to right</text></svg>')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
