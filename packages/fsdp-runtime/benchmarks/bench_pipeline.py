"""A training step of a Llama in two pipeline stages on gloo ranks: this package and hand-written torch.

    python packages/fsdp-runtime/benchmarks/bench_pipeline.py [--rounds 8]

Both run torch's 1F1B and its interleaved schedule on the same weights and tokens, and take turns in one run.  The
hand-written stages are cut out of the model by its class and compute no mask.  Times are medians over rounds, of the
slowest rank on the clock and of the mean rank's processor; bytes are what one rank sends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))
from turns import take_turns

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.steps import Pipeline, forward_backward
from harness.collectives import RecordCollectives

RANKS, MICROBATCHES, BATCH, LENGTH, VOCAB = 2, 4, 1, 256, 8192


def config() -> Any:
    """A decoder whose step is long against the overhead of a call, and short enough to repeat."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / MICROBATCHES


def ours(folder: Path, ids: Tensor, schedule: str) -> Callable[[], float]:
    """This package."""
    from transformers import LlamaForCausalLM

    per_rank = 2 if schedule == "Interleaved1F1B" else 1
    layers = [8 // (RANKS * per_rank)] * (RANKS * per_rank)
    step = Pipeline(schedule, microbatches=MICROBATCHES, layers=layers)
    mesh = MeshSpec(pp=RANKS).build(device_type="cpu")
    model = parallelize(LlamaForCausalLM.from_pretrained(folder), mesh, logits="full", steps=(step,))
    batches = [{"input_ids": rows} for rows in ids.chunk(MICROBATCHES)]

    def run() -> float:
        model.zero_grad()
        losses = forward_backward(model, batches, lambda output, batch: _loss(output.logits, batch["input_ids"]))
        return float(losses.sum())

    return run


class Blocks(nn.Module):
    """A stage of a Llama, cut out by hand."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        size = len(model.model.layers) // stages
        self.embed_tokens = model.model.embed_tokens if stage == 0 else None
        self.layers = model.model.layers[stage * size : (stage + 1) * size]
        self.rotary_emb = model.model.rotary_emb
        self.norm, self.lm_head = (model.model.norm, model.lm_head) if stage == stages - 1 else (None, None)

    def forward(self, states: Tensor) -> Tensor:
        """The hidden states for the next stage, or logits."""
        states = states if self.embed_tokens is None else self.embed_tokens(states)
        positions = torch.arange(states.shape[1])[None]
        rotary = self.rotary_emb(states, positions)
        for layer in self.layers:
            states = layer(states, position_ids=positions, position_embeddings=rotary)
        return states if self.norm is None or self.lm_head is None else self.lm_head(self.norm(states))


def by_hand(folder: Path, ids: Tensor, schedule: str) -> Callable[[], float]:
    """Modules cut by hand in ``torch.distributed.pipelining``."""
    from transformers import LlamaForCausalLM

    kind, per_rank = (Schedule1F1B, 1) if schedule == "1F1B" else (ScheduleInterleaved1F1B, 2)
    model = LlamaForCausalLM.from_pretrained(folder)
    count = RANKS * per_rank
    modules = {index: Blocks(model, index, count) for index in range(dist.get_rank(), count, RANKS)}
    stages = [PipelineStage(module, index, count, torch.device("cpu")) for index, module in modules.items()]
    pipeline: Any = kind(  # type: ignore[arg-type]
        stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=_loss, scale_grads=False
    )

    def run() -> float:
        for module in modules.values():
            module.zero_grad()
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            pipeline.step(ids)
        else:
            pipeline.step(target=ids, losses=losses, return_outputs=False)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.broadcast(total, RANKS - 1)
        return float(total)

    return run


def rank(index: int, store: str, folder: str, rounds: int) -> None:
    """What each process does; rank 0 prints."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=RANKS)
    ids = torch.randint(0, VOCAB, (MICROBATCHES * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    runs = {
        f"{name}, {schedule}": build(Path(folder), ids, schedule)
        for schedule in ("1F1B", "Interleaved1F1B")
        for name, build in (("ours", ours), ("by hand", by_hand))
    }
    losses, sent = {}, {}
    for name, run in runs.items():
        run()  # finds the shapes of sent tensors
        with RecordCollectives() as communication:
            losses[name] = run()
        sends = [call.nbytes for call in communication.calls if call.kind == "send"]
        sent[name] = (len(sends), sum(sends))
    medians = take_turns({name: partial(run) for name, run in runs.items()}, rounds)
    if index == 0:
        for name, (clock, busy) in medians.items():
            count, nbytes = sent[name]
            print(
                f"{name:25} {clock * 1e3:6.0f} ms a step, {busy * 1e3:6.0f} ms of the processor, {count} sends of "
                f"{nbytes / 1e6:.2f} MB, loss {losses[name]:.6f}"
            )
        for schedule in ("1F1B", "Interleaved1F1B"):
            both = zip(medians[f"ours, {schedule}"], medians[f"by hand, {schedule}"], strict=True)
            clock, busy = (mine / theirs for mine, theirs in both)
            print(f"ours / by hand, {schedule}: {clock:.2f} on the clock, {busy:.2f} of the processor")
    dist.destroy_process_group()


def main() -> None:
    """Write the checkpoint, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config()).save_pretrained(folder)
        mp.spawn(rank, (f"{folder}/store", folder, arguments.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
