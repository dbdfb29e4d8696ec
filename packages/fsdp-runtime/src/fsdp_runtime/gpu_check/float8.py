"""Time, memory and error of a decoder block that multiplies in float8, beside the same block in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.errors import BackendError, ModelError, OptionError
from fsdp_runtime.gpu_check.bench import SMALL, Bench
from fsdp_runtime.gpu_check.bench_peers import Contender
from fsdp_runtime.gpu_check.check_result import CheckResult, judged
from fsdp_runtime.gpu_check.machine import World
from fsdp_runtime.steps import Float8
from fsdp_runtime.steps.float8 import Recipe

#: A block of Qwen3-8B and its tokens.
BLOCK: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32}
TOKENS = 8192
#: A CPU tries the logic.
SMALL_BLOCK: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
SMALL_TOKENS = 64
#: Rows of the normalized output that are compared, and the largest difference from bfloat16's.
COMPARED, ERROR = 256, 0.5
#: The least speed of the fastest recipe; both blocks are compiled on a GPU.
SPEED = 1.25


def check_float8(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield milliseconds of both passes, peak memory and error of each recipe beside bfloat16."""
    on_cpu = device.type == "cpu"
    sizes, tokens = (SMALL_BLOCK, SMALL_TOKENS) if on_cpu else (BLOCK, TOKENS)
    block = partial(_block, sizes, device=device)
    hidden = torch.randn(1, tokens, sizes["hidden_size"], device=device).bfloat16().requires_grad_()
    bench, plain_ms = Bench(device, SMALL), 0.0
    with torch.no_grad():
        exact = _run(block("bfloat16", compiled=False), hidden)[:COMPARED].double()
    for recipe in ("bfloat16", *get_args(Recipe)):
        what = f"{recipe}, a block of {sizes['hidden_size']} features, {tokens} tokens"
        try:
            model = block(recipe, compiled=not on_cpu)
        except (BackendError, ModelError, OptionError) as error:
            yield CheckResult("Float8", what, str(error), state="not run")
            continue
        weights = [parameter for name, parameter in model.named_parameters() if "layers." in name]
        row = bench.scored(Contender(recipe, partial(_run, model)), [hidden, *weights], exact, (0.0, 0.0))
        both_ms, difference, peak = row.both_ms or 0.0, row.error or 0.0, row.peak_mib or 0.0
        plain_ms = plain_ms or both_ms
        speed, least = plain_ms / both_ms, SPEED if recipe == "tensorwise" and not on_cpu else 0.0
        figure = f"{both_ms:.2f} ms, {speed:.2f} of bfloat16's speed, {peak:.0f} MiB, error {difference:.2g}"
        bound = f"error {ERROR}" + (f", speed {least}" if least else "")
        yield judged("Float8", what, figure, bound, difference <= ERROR and speed >= least)


def _run(model: Any, hidden: Tensor, *_: Tensor) -> Tensor:
    output: Tensor = model(inputs_embeds=hidden).last_hidden_state[0]
    return output


def _block(sizes: dict[str, Any], recipe: Any, *, device: torch.device, compiled: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(**sizes, num_hidden_layers=1, num_key_value_heads=8, vocab_size=64, use_cache=False)
    with device:
        model = Qwen3Model(config).bfloat16()
    steps = () if recipe == "bfloat16" else (Float8(recipe, emulate=device.type == "cpu"),)
    mesh = MeshSpec(dp_shard=1).build(device_type=device.type)
    return parallelize(model, mesh, steps=steps, compile=compiled)
