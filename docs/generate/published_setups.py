"""Compare dry runs with set-ups whose measured memory was published, for docs/published-setups.md.

``python docs/generate/published_setups.py`` runs them all (some ten minutes on two cores), keeps what they found in
docs/published-setups.json and rewrites the tables of the page from it; names of set-ups as arguments run only those.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

from torch import nn

from fsdp_runtime import MeshSpec
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from fsdp_runtime.dry_run.report.format import format_bytes, format_count
from fsdp_runtime.dry_run.sweep_types import format_mesh
from fsdp_runtime.steps.context.methods import Method

PAGE = Path(__file__).parents[1] / "published-setups.md"
FOUND = PAGE.with_suffix(".json")
GIB = 2**30
Found = Mapping[str, dict[str, Any]]  # by a set-up's name
PRETRAINING_TOKENS = 15.6e12  # of Llama 3.1 405B

#: Llama 3's sizes: table 3 of its report.
LLAMA = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
#: Sizes of mixtures, from the config files that were published with their weights: the config's class and fields.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
        | {"first_k_dense_replace": 3},
    ),
    "Qwen3-235B-A22B": (
        "Qwen3MoeConfig",
        {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
        | {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
        | {"num_experts": 128, "num_experts_per_tok": 8},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
        | {"num_experts": 128, "num_experts_per_tok": 8},
    ),
}
#: The size of a dense model with grouped queries, likewise.
MIXTURES["Qwen3-8B"] = (
    "Qwen3Config",
    {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
)
COMMON = {"num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 262144}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training run.

    Args:
        name: what the script's arguments call it.
        size: of Llama 3, or the name of a mixture.
        mesh: ranks; a pipeline's stages are counted into ``dp_shard``.
        seq_len: tokens of a sequence.
        micro_batch: sequences of a data-parallel rank.
        recomputes: the mode of checkpointing.
        loss: ``"logits"`` or ``"linear"``.
        published: GiB that the source measured, or ``None``.
        differs: what the source did otherwise.
        master_dtype: of parameters, gradients and AdamW's moments; ``None`` for that of computation.
        context_parallel: how attention spans the ranks of ``cp``.
    """

    name: str
    size: str
    mesh: MeshSpec
    seq_len: int = 8192
    micro_batch: int = 1
    recomputes: str = "block"
    loss: str = "linear"
    published: float | None = None
    differs: str = ""
    master_dtype: str | None = "fp32"
    context_parallel: Method = "allgather"


#: Table 4 of The Llama 3 Herd of Models, arXiv:2407.21783, its 16 pipeline stages counted into dp_shard.
LLAMA_3 = (
    Setup(
        name="405b-8192",
        size="405B",
        mesh=MeshSpec(dp_shard=1024, tp=8),
        recomputes="none",
        loss="logits",
        differs="8 x 1 x 16 x 64",
    ),
    Setup(
        name="405b-8192-block",
        size="405B",
        mesh=MeshSpec(dp_shard=1024, tp=8),
        loss="logits",
        differs="8 x 1 x 16 x 64",
    ),
    Setup(
        name="405b-16384-block",
        size="405B",
        mesh=MeshSpec(dp_shard=2048, tp=8),
        loss="logits",
        differs="8 x 1 x 16 x 128",
    ),
    Setup(
        name="405b-128k-block",
        size="405B",
        mesh=MeshSpec(dp_shard=128, cp=16, tp=8),
        seq_len=131072,
        loss="logits",
        differs="8 x 16 x 16 x 8",
    ),
)
#: Mixtures with expert parallelism; the last two beside what transformers' pull request 46126 measured.
EXPERTS = (
    Setup(name="deepseek-v3", size="DeepSeek-V3", mesh=MeshSpec(dp_shard=64, ep=64), seq_len=4096, loss="linear"),
    Setup(name="qwen3-235b", size="Qwen3-235B-A22B", mesh=MeshSpec(dp_shard=64, ep=64), seq_len=4096, loss="linear"),
    Setup(
        name="qwen3-30b-64k",
        size="Qwen3-30B-A3B",
        mesh=MeshSpec(dp_shard=16, ep=16),
        seq_len=65536,
        loss="linear",
        master_dtype=None,
        published=45e9 / GIB,
    ),
    Setup(
        name="qwen3-30b-64k-cp",
        size="Qwen3-30B-A3B",
        mesh=MeshSpec(cp=16, ep=16),
        seq_len=65536,
        loss="linear",
        master_dtype=None,
        published=45e9 / GIB,
    ),
)
#: Sequences over eight ranks, in each way of attention; the longest beside what TRL's pull request 6846 measured.
LONG = tuple(
    Setup(
        name=f"qwen3-8b-{tokens // 1024}k-{way}",
        size="Qwen3-8B",
        mesh=MeshSpec(cp=8),
        seq_len=tokens,
        loss="linear",
        published=56.2e9 / GIB if tokens == 2**20 else None,
        context_parallel=way,
    )
    for tokens in (2**13, 2**17, 2**20)
    for way in get_args(Method)
)
SETUPS = (*LLAMA_3, *EXPERTS, *LONG)


def run(setup: Setup) -> Estimate:
    """The dry run of a set-up: parameters, gradients and AdamW's moments in float32, computation in bfloat16."""
    dense = partial(llama, setup.size)
    return estimate(
        partial(mixture, setup.size) if setup.size in MIXTURES else dense,
        setup.mesh,
        seq_len=setup.seq_len,
        micro_batch=setup.micro_batch,
        sequence_parallel=setup.mesh.tp > 1,
        context_parallel=setup.context_parallel,
        activation_checkpointing=setup.recomputes,  # type: ignore[arg-type]
        fsdp=parse_fsdp(master_dtype=setup.master_dtype),
        logprobs=setup.loss,
    )


def llama(size: str) -> nn.Module:
    """Llama 3 of a size, from a config that is nothing but numbers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    model: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, **LLAMA[size]))
    return model


def mixture(name: str) -> nn.Module:
    """A mixture of its published size."""
    import transformers

    config_class, fields = MIXTURES[name]
    config = getattr(transformers, config_class)(**fields, max_position_embeddings=262144)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def main() -> int:
    """Run set-ups and print them, or write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(setup.name for setup in SETUPS)], help="default: all")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    chosen = [setup for setup in SETUPS if not options.names or setup.name in options.names]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, setup): setup for setup in chosen}
        for future in as_completed(running):
            setup, done = running[future], future.result()
            peak = done.memory.peak
            print(f"{setup.name}: {format_bytes(peak.total)} in {peak.phase}, {done.seconds:.0f} s", flush=True)
            _keep(setup, done)
    _rewrite(json.loads(FOUND.read_text())["setups"])
    return 0


def _keep(setup: Setup, done: Estimate) -> None:
    """Put what the tables need of an estimate into the file of results."""
    found = json.loads(FOUND.read_text())["setups"]
    found[setup.name] = {
        "peak": done.memory.peak.total,
        "phase": done.memory.peak.phase,
        "activations": done.memory.peak.nbytes.activations,
        "resident": done.memory.resident.total,
        "dispatched": sum(item.bytes_sent for item in done.traffic if item.kind == "all_to_all"),
        "sent": sum(item.bytes_sent for item in done.traffic),
        "flops_per_token": done.flops * done.settings.world_size / _tokens(setup),
    }
    everything = {**json.loads(FOUND.read_text()), "setups": found}
    FOUND.write_text(json.dumps(everything, indent=1) + "\n")


def _rewrite(found: Found) -> None:
    text = PAGE.read_text()
    for name, lines in {
        "llama": _llama_3(found),
        "experts": _experts(found),
        "long": _long(found),
    }.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if begin not in text:
            continue
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "\n".join(["", *lines, "", end]) + after
    PAGE.write_text(text)


def _llama_3(found: Found) -> list[str]:
    header = ["TP x CP x PP x DP", "mesh of the dry run", "tokens per rank", "recomputed", "between steps", "peak"]
    header += ["FLOP / token", "x 15.6T"]
    rows = []
    for setup in _those(found, LLAMA_3):
        done = found[setup.name]
        work = [format_count(done["flops_per_token"]), f"{done['flops_per_token'] * PRETRAINING_TOKENS:.2g}"]
        _, *described = _described(setup)
        rows.append([setup.differs, *described, format_bytes(done["resident"]), format_bytes(done["peak"]), *work])
    return _markdown(header, rows)


def _experts(found: Found) -> list[str]:
    header = ["model", "mesh", "tokens", "recomputed", "between steps", "peak", "published", "dispatch sends"]
    rows = []
    for setup in _those(found, EXPERTS):
        done = found[setup.name]
        published = "-" if setup.published is None else f"{setup.published:.1f} GiB"
        numbers = [format_bytes(done["resident"]), format_bytes(done["peak"]), published]
        rows.append([*_described(setup), *numbers, format_bytes(done["dispatched"])])
    return _markdown(header, rows)


def _long(found: Found) -> list[str]:
    header = ["way", "mesh", "tokens", "recomputed", "peak", "inputs of blocks in it", "without them", "published"]
    header += ["attention sends"]
    rows = []
    for setup in _those(found, LONG):
        done = found[setup.name]
        fields = MIXTURES[setup.size][1]
        inputs = fields["num_hidden_layers"] * fields["hidden_size"] * 2 * setup.seq_len // setup.mesh.cp
        inputs = min(inputs, done["activations"])  # they are freed block by block in backward
        published = "-" if setup.published is None else f"{setup.published:.1f} GiB"
        numbers = [format_bytes(each) for each in (done["peak"], inputs, done["peak"] - inputs)]
        _, *described = _described(setup)
        # FSDP2 sends the same in every way, and heads for sequence are the only all-to-alls.
        ulysses = found.get(setup.name.replace(setup.context_parallel, "ulysses"))
        sent = "-" if ulysses is None else format_bytes(done["sent"] - ulysses["sent"] + ulysses["dispatched"])
        rows.append([setup.context_parallel, *described, *numbers, published, sent])
    return _markdown(header, rows)


def _those(found: Found, setups: Iterable[Setup]) -> list[Setup]:
    """Those that were run."""
    return [setup for setup in setups if setup.name in found]


def _described(setup: Setup) -> list[str]:
    tokens = f"{setup.micro_batch} x {setup.seq_len:,}"
    return [setup.size, format_mesh({**setup.mesh.sizes, "ep": setup.mesh.ep}), tokens, setup.recomputes]


def _tokens(setup: Setup) -> int:
    return setup.seq_len * setup.micro_batch * setup.mesh.dp_shard * setup.mesh.dp_replicate


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose first four columns are words."""
    rule = ["---" if at < 4 else "---:" for at in range(len(header))]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


if __name__ == "__main__":
    sys.exit(main())
