"""The runs of docs/published-setups.md: what each row of docs/published-setups.json stands for, built and run.

``python docs/generate/published_rows.py --all`` runs every row and rewrites the page's table; names as arguments run
only those.  A row names its model, mesh, step and what was measured.  ``run`` takes what a row leaves out from the
defaults of its source at that date, in ``SOURCES``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from published_losses import published_loss
from several_adapters import with_several
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_runtime import MeshSpec
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.build_model import WithAdapters
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from fsdp_runtime.dry_run.step_time import HARDWARE, step_time

ROWS = Path(__file__).parents[1] / "published-setups.json"
PAGE = ROWS.with_suffix(".md")
SIZES = Path(__file__).with_name("model_sizes.json")

#: Defaults of each source, as keywords of ``estimate`` and of ``parse_fsdp``; ``loss`` and ``adapters`` are explained
#: at their functions.
SOURCES: Mapping[str, Mapping[str, Any]] = {
    "torchtitan": {
        "master_dtype": "fp32",
        "logprobs": "torchtitan",
        "allocator": "expandable_segments:True",
        "compile": True,
    },
    "prime-rl rl": {
        "master_dtype": "fp32",
        "logprobs": "chunked-vocabulary:2048",
        "activation_checkpointing": "block",
        "compile": True,
        "micro_batches": 2,
        "allocator": "expandable_segments:True",
    },
    # Adapters are chosen by values, which graphs cannot have: a block that is checkpointed inside of torch.compile then
    # runs as it is (torch.utils.checkpoint disables the compiler).  The benchmark has no run of the orchestrator, so
    # none of its optimizers is made, and none clears gradients.
    "prime-rl rl lora": {
        "master_dtype": "fp32",
        "frozen_dtype": "fp32",
        "logprobs": "chunked-vocabulary:2048",
        "activation_checkpointing": "block",
        "micro_batches": 2,
        "optimizer": "none",
        "allocator": "expandable_segments:True",
    },
    "prime-rl sft": {
        "master_dtype": "fp32",
        "logprobs": "held logits",
        "activation_checkpointing": "block",
        "compile": True,
        "micro_batches": 2,
        "allocator": "expandable_segments:True",
    },
    "trl": {
        "master_dtype": "fp32",  # accelerate's FSDP2 with mixed precision
        "logprobs": "chunked-float32:256",
        "activation_checkpointing": "block",
    },
    "automodel": {
        "master_dtype": None,
        "logprobs": "cross-entropy",
        "activation_checkpointing": "block",
        "reshard_after_forward": False,
        "optimizer": "adamw_single",
    },
    "megatron-fsdp": {
        "master_dtype": "fp32",
        "logprobs": "torchtitan",
        "activation_checkpointing": "block",
        "optimizer": "adamw_fused",
    },
}

#: Memory of a device: the allocator releases what it caches before it takes more than that.
DEVICE_MEMORY: Mapping[str, str] = {
    "A6000": "47GiB",
    "H100 96GB": "94GiB",
    "H100": "79GiB",
    "H200": "139GiB",
    "GB200": "184GiB",
    "B200": "178GiB",
}


def rows() -> dict[str, dict[str, Any]]:
    """Return the rows by name."""
    found: dict[str, dict[str, Any]] = json.loads(ROWS.read_text())["rows"]
    return found


def run(row: Mapping[str, Any]) -> Estimate:
    """Return the dry run of a row."""
    memory = next((size for name, size in DEVICE_MEMORY.items() if name in row["hardware"]), None)
    keywords: dict[str, Any] = {"device_memory": memory, **SOURCES[row["code"]], **row["step"]}
    mesh = MeshSpec(**row["mesh"])
    every_second = keywords.get("activation_checkpointing") == "every second matmul"
    if every_second:
        keywords["activation_checkpointing"] = "none"
    build = partial(
        build_model,
        row["model"],
        every_second_matmul=every_second,
        adapters=keywords.pop("adapters", 0),
        mlp_tokens=keywords.pop("mlp_tokens", 0),
    )
    name = keywords["logprobs"]
    keywords["logprobs"] = (
        held_logits(keywords.get("micro_batches", 1)) if name == "held logits" else published_loss(name)
    )
    if mesh.tp > 1:
        keywords.setdefault("sequence_parallel", True)
    fsdp = {
        name: keywords.pop(name) for name in ("master_dtype", "offload", "reshard_after_forward") if name in keywords
    }
    return estimate(build, mesh, fsdp=parse_fsdp(**fsdp), **keywords)


def build_model(name: str, *, every_second_matmul: bool = False, adapters: int = 0, mlp_tokens: int = 0) -> nn.Module:
    """A model of its published sizes, with low-rank adapters or MLPs of some tokens at a time if asked for."""
    import transformers

    sizes = json.loads(SIZES.read_text())[name]
    config = getattr(transformers, sizes["config"])(**sizes["fields"])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    if adapters == 1:
        return WithAdapters(lambda: model, rank=16)()
    if adapters:
        with_several(model, rank=16, adapters=adapters)
    if mlp_tokens:
        for block in model.model.layers:  # type: ignore[union-attr]
            block.mlp.forward = partial(_some_tokens_at_a_time, block.mlp.forward, mlp_tokens)
    if every_second_matmul:
        for block in model.model.layers:  # type: ignore[union-attr]
            block.__class__ = _recomputing(type(block))
    return model


def held_logits(micro_batches: int) -> Any:
    """Return prime-rl's loss of supervised training: float32 logits that its loop holds until the next ones."""
    held: list[Tensor] = []

    def loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        if micro_batches > 1 and not held:
            rows = model.lm_head.out_features  # type: ignore[union-attr]
            held.append(torch.empty(*inputs["input_ids"].shape, rows))
        logits = model(**inputs).logits.float().contiguous()
        held[:] = [logits]
        found = cross_entropy(logits.flatten(0, 1), inputs["input_ids"].flatten(), reduction="none")
        return found.mean()

    return loss


def _some_tokens_at_a_time(forward: Any, tokens: int, hidden: Tensor) -> Tensor:
    """An MLP in tiles of the sequence, as TRL's guide patches it."""
    return torch.cat([forward(part) for part in hidden.split(tokens, dim=1)], dim=1)


@cache
def _recomputing(block: type[nn.Module]) -> type[nn.Module]:
    """A block that keeps attention's results and every second matrix product: torchtitan's selective checkpointing."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run_block = partial(block.forward, self)
        return checkpoint(run_block, *args, use_reentrant=False, context_fn=_every_second_matmul, **kwargs)

    return type("EverySecondProduct", (block,), {"forward": forward})


def _every_second_matmul() -> Any:
    products = {"forward": 0, "recompute": 0}
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            products["recompute" if context.is_recompute else "forward"] += 1
        odd = products["recompute" if context.is_recompute else "forward"] % 2 == 1
        kept = operator is attention or (operator is torch.ops.aten.mm.default and odd)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main() -> int:
    """Run rows (all, or those named), keep what they gave, and rewrite the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of rows; default: none, which only rewrites the page")
    parser.add_argument("--all", action="store_true", help="run every row, some ten seconds each")
    options = parser.parse_args()
    found, done = rows(), dict[str, Estimate]()
    for name in found if options.all else options.names:
        key = json.dumps([found[name][part] for part in ("code", "model", "mesh", "step", "hardware")])
        if key not in done:
            done[key] = run(found[name])
        result = kept(done[key], found[name]["hardware"])
        print(name, result, f"{done[key].seconds:.0f} s", flush=True)
        everything = json.loads(ROWS.read_text())  # another process may have written meanwhile
        everything["rows"][name]["found"] = result
        ROWS.write_text(json.dumps(everything, indent=1) + "\n")
    found = rows()
    rewrite(found)
    return 0


def kept(estimated: Estimate, hardware: str) -> dict[str, Any]:
    """Return what the page needs of an estimate; expected tokens a second where the hardware's rates are known."""
    memory = estimated.memory
    found = {"peak": memory.peak.total, "phase": memory.peak.phase, "reserved": memory.reserved}
    device = next((name for name in HARDWARE if name in hardware), None)
    return found if device is None else {**found, "tokens_per_s": round(step_time(estimated, device).tokens_per_second)}


def ratio(row: Mapping[str, Any]) -> float | None:
    """Return the estimate over what was measured, ``None`` if the row was not run or has no memory."""
    if "found" not in row or row["published"] is None:
        return None
    estimated = row["found"]["reserved" if row["measured"] == "reserved" else "peak"] or row["found"]["peak"]
    return float(estimated / 2**30 / row["published"])


def speed(row: Mapping[str, Any]) -> str:
    """Return published and expected tokens a second and GPU with their ratio, as cells."""
    measured, expected = row.get("tokens_per_s_per_gpu"), row["found"].get("tokens_per_s")
    if measured is None or expected is None:
        return f"{'-' if measured is None else f'{measured:,.0f}'} | - | -"
    return f"{measured:,.0f} | {expected:,.0f} | {expected / measured:.0%}"


def rewrite(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the table and the distribution of errors into the page."""
    before, _, rest = PAGE.read_text().partition("<!-- rows -->\n")
    _, _, after = rest.partition("<!-- end of rows -->")
    PAGE.write_text(before + table(found) + after)


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table and the distribution of errors, with the comments around them."""
    lines = ["| run | published | dry run | ratio | tokens/s | expected | ratio |", f"| --- |{' ---: |' * 6}"]
    ratios = []
    for name, row in found.items():
        if (share := ratio(row)) is None:
            continue
        ratios.append(share)
        published = row["published"]
        memory = f"{published:.1f} GiB | {published * share:.1f} GiB | {share:.0%}"
        lines.append(f"| {name} | {memory} | {speed(row)} |")
    errors = sorted(abs(share - 1) for share in ratios)
    within = [sum(error <= bound for error in errors) for bound in (0.05, 0.12, 0.25)]
    waiting = sum(row["published"] is not None and "found" not in row for row in found.values())
    summary = (
        f"{len(errors)} runs: median error {median(errors):.1%}; {within[0]} within 5 %, {within[1]} within 12 %, "
        f"{within[2]} within 25 %. {waiting} rows with memory have not been run yet."
    )
    return "\n".join(["<!-- rows -->", "", summary, "", *lines, "", "<!-- end of rows -->"])


if __name__ == "__main__":
    sys.exit(main())
