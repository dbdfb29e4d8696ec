"""Bytes that each rank sends and receives in weight transfers that NeMo RL published, beside its seconds.

    python packages/tp-plans/benchmarks/bench_transfer.py [--line-rate 50]

Nothing is sent: plans are made from shapes alone, a layer of each kind and pipeline stage at a time, and counted.  The
line-rate floor is the time that the busiest rank needs for its bytes at ``--line-rate`` GB/s, 400 Gbit/s a GPU by
default.  The last line is the time of one plan of a whole model, all layers and ranks at once.
Every engine is sent its own copy; with ``--relay`` engines pass on what they receive.
Published seconds: NVIDIA-NeMo/RL pull request 2808 (NCCL, H100) and ``docs/guides/checkpoint-engine-refit.md`` there,
whose 69.95 GiB on a rank are 45,395 tensors with experts cut over TP32 and all else in full: the last columns.
Assumed, as neither source says: one tensor-parallel rank per expert at the trainer; Qwen3-235B on 128 policy GPUs and
Qwen3-30B on 16; pipeline stages of equal size, with the first and the last shorter.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import tp_plans
from tp_plans import Replicate, Shard
from tp_plans.transfer import CheckpointTensor, EngineSize, StoredBlock, TransferLayout

GIB = 2**30
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """The shapes of a mixture: attention, dense layers, experts and vocabulary."""

    name: str
    hidden: int
    layers: int
    dense_layers: int
    attention: Mapping[str, tuple[int, ...]]
    dense_width: int
    experts: int
    expert_width: int
    shared_experts: int
    vocab: int
    heads: int
    kv_heads: int | None

    def layer(self, number: int) -> Shapes:
        """The tensors of one layer."""
        prefix = f"model.layers.{number}"
        shapes = {f"{prefix}.self_attn.{name}.weight": shape for name, shape in self.attention.items()}
        shapes |= {f"{prefix}.{n}_layernorm.weight": (self.hidden,) for n in ("input", "post_attention")}
        if number < self.dense_layers:
            return shapes | self._mlp(f"{prefix}.mlp", self.dense_width)
        shapes[f"{prefix}.mlp.gate.weight"] = (self.experts, self.hidden)
        if self.kv_heads is None:
            shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (self.experts,)
        if self.shared_experts:
            shapes |= self._mlp(f"{prefix}.mlp.shared_experts", self.shared_experts * self.expert_width)
        for expert in range(self.experts):
            shapes |= self._mlp(f"{prefix}.mlp.experts.{expert}", self.expert_width)
        return shapes

    def _mlp(self, prefix: str, width: int) -> Shapes:
        shapes: Shapes = {f"{prefix}.{name}_proj.weight": (width, self.hidden) for name in ("gate", "up")}
        return {**shapes, f"{prefix}.down_proj.weight": (self.hidden, width)}


def _grouped(hidden: int, heads: int, kv_heads: int, dim: int) -> Shapes:
    shapes: Shapes = {"q_proj": (heads * dim, hidden), "k_proj": (kv_heads * dim, hidden)}
    shapes |= {"v_proj": (kv_heads * dim, hidden), "o_proj": (hidden, heads * dim)}
    return shapes | {"q_norm": (dim,), "k_norm": (dim,)}


def _latent(hidden: int, heads: int) -> Shapes:
    return {
        "q_a_proj": (1536, hidden),
        "q_a_layernorm": (1536,),
        "q_b_proj": (heads * 192, 1536),
        "kv_a_proj_with_mqa": (576, hidden),
        "kv_a_layernorm": (512,),
        "kv_b_proj": (heads * 256, 512),
        "o_proj": (hidden, heads * 128),
    }


QWEN_30B = Model("Qwen3-30B-A3B", 2048, 48, 0, _grouped(2048, 32, 4, 128), 0, 128, 768, 0, 151936, 32, 4)
QWEN_235B = Model("Qwen3-235B-A22B", 4096, 94, 0, _grouped(4096, 64, 4, 128), 0, 128, 1536, 0, 151936, 64, 4)
DEEPSEEK = Model("DeepSeek-V3", 7168, 61, 3, _latent(7168, 128), 18432, 256, 2048, 1, 129280, 128, None)


@dataclass(frozen=True)
class Refit:
    """A published mapping: trainer ranks by axis, engine ranks and engines, and seconds."""

    model: Model
    trainer: str
    ranks: int
    tp: int
    pp: int
    ep: int
    engine_tp: int
    engines: int
    seconds: str

    @property
    def engine(self) -> str:
        """The engine's axes."""
        return f"TP{self.engine_tp} x {self.engines}"


MAPPINGS = [
    Refit(QWEN_30B, "EP4 TP2 DP2", 16, 2, 1, 4, 4, 4, "0.54-0.67"),
    Refit(QWEN_30B, "EP4 TP2 PP2", 16, 2, 2, 4, 4, 4, "0.48-0.52"),
    Refit(QWEN_30B, "EP8 PP2", 16, 1, 2, 8, 2, 8, "0.51-0.55"),
    Refit(QWEN_30B, "EP8 PP2", 16, 1, 2, 8, 8, 2, "0.50-0.51"),
    Refit(QWEN_235B, "TP4 PP8 EP16", 128, 4, 8, 16, 8, 16, "4.56-4.85"),
    Refit(DEEPSEEK, "PP16 EP16", 256, 1, 16, 16, 32, 8, "7.65-9.94"),
    Refit(DEEPSEEK, "PP16 EP16", 256, 1, 16, 16, 32, 1, "9.25 NIXL, 14.21 NCCL"),
]
#: All of it is planned at once.
WHOLE = Refit(DEEPSEEK, "EP64 TP8 DP256", 2048, 8, 1, 64, 32, 8, "")


def stages(layers: int, pp: int) -> list[range]:
    """The layers of each stage: as many for all, the first and the last shorter."""
    most = -(-layers // pp)
    missing = most * pp - layers
    counts = [most] * pp
    counts[0] -= missing // 2
    counts[-1] -= missing - missing // 2
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def trainer_layout(shapes: Shapes, mapping: Refit) -> TransferLayout:
    """Megatron's layout of some tensors on the first stage: dense ones over ``tp``, whole experts over ``ep``."""
    own = range(mapping.ranks // mapping.pp)
    mesh = (len(own) // mapping.tp, mapping.tp)
    tensors = {name: CheckpointTensor(shape) for name, shape in shapes.items()}
    dense = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layouts = {name: [Replicate(), _dense_split(name, tensor)] for name, tensor in dense.items()}
    blocks: dict[str, list[StoredBlock]] = {}
    for name in tensors.keys() - dense.keys():
        expert = int(name.split(".experts.")[1].split(".")[0])
        box = tuple((0, size) for size in tensors[name].shape)
        replicas = own[expert * mapping.ep // mapping.model.experts :: mapping.ep]
        blocks[name] = [StoredBlock(rank, box, name, (0, 0), (0, 1)) for rank in replicas]
    experts = TransferLayout({name: tensors[name] for name in tensors if name in blocks}, blocks)
    return tp_plans.transfer.mesh_layout(dense, mesh, layouts).union(experts)


def _dense_split(name: str, tensor: CheckpointTensor) -> Replicate | Shard:
    if len(tensor.shape) == 1 or ".gate." in name or "_a_proj" in name:
        return Replicate()
    return Shard(1) if "o_proj" in name or "down_proj" in name else Shard(0)


def parts(mapping: Refit) -> Iterator[tuple[Shapes, dict[int, int]]]:
    """The tensors of one layer of each kind, and how many such layers each stage has; the vocabulary at either end."""
    model = mapping.model
    for is_dense in (True, False):
        same = [
            [n for n in layers if (n < model.dense_layers) is is_dense] for layers in stages(model.layers, mapping.pp)
        ]
        example = next((numbers[0] for numbers in same if numbers), None)
        if example is not None:
            yield model.layer(example), {stage: len(numbers) for stage, numbers in enumerate(same)}
    yield {"model.embed_tokens.weight": (model.vocab, model.hidden)}, {0: 1}
    yield {"lm_head.weight": (model.vocab, model.hidden), "model.norm.weight": (model.hidden,)}, {mapping.pp - 1: 1}


def counted(mapping: Refit, *, relay: bool = False) -> tuple[dict[int, int], dict[int, int], int, int, int]:
    """Bytes sent and received by rank, bytes of the checkpoint, of experts cut with all else in full, and tensors."""
    size = EngineSize(
        num_attention_heads=mapping.model.heads, num_key_value_heads=mapping.model.kv_heads, tp=mapping.engine_tp
    )
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    total = experts_cut = tensors = 0
    per_stage = mapping.ranks // mapping.pp
    for shapes, counts in parts(mapping):
        source = trainer_layout(shapes, mapping)
        engine = tp_plans.transfer.engine_layout(
            source.tensors, size, replicas=mapping.engines, first_rank=mapping.ranks
        )
        plan = tp_plans.transfer.plan_transfer(source, engine, relay=relay)
        layers = sum(counts.values())
        for rank in plan.ranks:
            received[rank] += layers * plan.bytes_received(rank)
            if rank >= mapping.ranks:
                sent[rank] += layers * plan.bytes_sent(rank)
                continue
            for stage, count in counts.items():
                sent[rank + stage * per_stage] += count * plan.bytes_sent(rank)
        tensors += layers * len(shapes)
        for name, shape in shapes.items():
            nbytes = 2 * layers * shape[0] * (shape[1] if len(shape) > 1 else 1)
            total += nbytes
            experts_cut += nbytes // mapping.engine_tp if ".experts." in name else nbytes
    return sent, received, total, experts_cut, tensors


def plan_whole(mapping: Refit) -> str:
    """Plan every tensor of a model at once; return the seconds of each stage."""
    model = mapping.model
    shapes = {"model.embed_tokens.weight": (model.vocab, model.hidden), "model.norm.weight": (model.hidden,)}
    shapes |= {"lm_head.weight": (model.vocab, model.hidden)}
    for number in range(model.layers):
        shapes |= model.layer(number)
    times = [time.perf_counter()]
    source = trainer_layout(shapes, mapping)
    size = EngineSize(num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, tp=mapping.engine_tp)
    engine = tp_plans.transfer.engine_layout(source.tensors, size, replicas=mapping.engines, first_rank=mapping.ranks)
    times.append(time.perf_counter())
    plan = tp_plans.transfer.plan_transfer(source, engine)
    times.append(time.perf_counter())
    most = max(max(plan.bytes_sent(rank), plan.bytes_received(rank)) for rank in plan.ranks)
    times.append(time.perf_counter())
    layouts, planned, counted = (after - before for before, after in pairwise(times))
    return (
        f"{model.name}, {len(shapes):,} tensors, {mapping.ranks:,} ranks ({mapping.trainer}) to {mapping.engine}: "
        f"layouts {layouts:.1f} s, plan_transfer {planned:.1f} s, bytes of every rank {counted:.1f} s, at most "
        f"{most / GIB:.2f} GiB"
    )


def main() -> None:
    """Print one row per mapping, and the time of one whole plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line-rate", type=float, default=50.0, help="GB/s of a rank, each way")
    parser.add_argument("--relay", action="store_true", help="engines pass on what they receive")
    options = parser.parse_args()
    rate = options.line_rate * 1e9
    columns = ["model", "trainer", "engine", "checkpoint GiB", "most received", "most sent", "floor s", "published s"]
    columns += ["experts cut", "tensors"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for mapping in MAPPINGS:
        begun = time.perf_counter()
        sent, received, total, experts_cut, tensors = counted(mapping, relay=options.relay)
        most_in, most_out = max(received.values()), max(nbytes for rank, nbytes in sent.items() if rank < mapping.ranks)
        row = [
            mapping.model.name,
            mapping.trainer,
            mapping.engine,
            f"{total / GIB:.2f}",
            f"{most_in / GIB:.2f}",
            f"{most_out / GIB:.2f}",
            f"{max(most_in, *sent.values()) / rate:.2f}",
            mapping.seconds,
            f"{experts_cut / GIB:.2f}",
            str(tensors),
        ]
        print(f"| {' | '.join(row)} |  planned in {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"\n{plan_whole(WHOLE)}")


if __name__ == "__main__":
    main()
