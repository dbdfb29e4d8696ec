"""Rows of ``--bench`` for a decoder block that multiplies in float8, beside the same block in bfloat16.

On a GPU both are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.gpu_check.bench_peers import Contender
from fsdp_runtime.steps import Float8
from fsdp_runtime.steps.float8 import Recipe

#: A block of Qwen3-8B.
BLOCK: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32}
#: A CPU tries the logic.
SMALL_BLOCK: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
#: Rows of the output that are compared.
COMPARED = 256


def float8_rows(
    device: torch.device, tokens: int, multiplied: float, contend: Callable[..., Any], scored: Callable[..., Any]
) -> Iterator[Any]:
    """Yield a row for each recipe; the error is the largest difference of the normalized output from bfloat16's.

    ``multiplied`` is the measured rate of products in bfloat16; ``contend`` and ``scored`` are methods of the bench.
    """
    sizes, recipes = SMALL_BLOCK if device.type == "cpu" else BLOCK, ("bfloat16", *get_args(Recipe))
    hidden = torch.randn(1, tokens, sizes["hidden_size"], device=device).bfloat16().requires_grad_()
    with torch.no_grad():
        exact = _block(sizes, "bfloat16", device=device, compiled=False)(inputs_embeds=hidden).last_hidden_state[
            0, :COMPARED
        ]

    def measure(contender: Contender) -> Any:
        model = contender.call()
        weights = [parameter for name, parameter in model.named_parameters() if "layers." in name]
        product = 2 * tokens * sum(weight.numel() for weight in weights) / multiplied * 1e3
        called = Contender(contender.name, lambda hidden, *_: model(inputs_embeds=hidden).last_hidden_state[0])
        return scored(called, [hidden, *weights], exact.double(), (product, 3 * product))

    block = partial(_block, sizes, device=device, compiled=device.type != "cpu")
    contenders = [Contender(recipe, partial(block, recipe)) for recipe in recipes]
    yield from contend("A block in float8", f"{tokens} x {sizes['hidden_size']}", contenders, measure)


def _block(sizes: dict[str, Any], recipe: Any, *, device: torch.device, compiled: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(**sizes, num_hidden_layers=1, num_key_value_heads=8, vocab_size=64, use_cache=False)
    with device:
        model = Qwen3Model(config).bfloat16()
    steps = () if recipe == "bfloat16" else (Float8(recipe, emulate=device.type == "cpu"),)
    mesh = MeshSpec(dp_shard=1).build(device_type=device.type)
    return parallelize(model, mesh, steps=steps, compile=compiled)
