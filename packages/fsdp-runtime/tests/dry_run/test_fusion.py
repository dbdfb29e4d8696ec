"""Compiled blocks: the dry run keeps the tensors that torch's own partitioner keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from fsdp_runtime.dry_run import estimate

LENGTH = 512


def config_of(kind: str, blocks: int) -> Any:
    return getattr(transformers, f"{kind}Config")(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        use_cache=False,
        eos_token_id=None,
    )


def kept_by_torch(kind: str, blocks: int) -> int:
    """Return the bytes that blocks keep for backward after AOTAutograd has partitioned their graphs for Inductor."""
    torch.compiler.reset()
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, blocks), dtype=torch.bfloat16)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    for block in model.model.layers:
        block.compile(backend=backend)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.int64))
    return sum(storage.nbytes() for address, storage in saved.items() if address not in parameters)


def kept_by_dry_run(kind: str, blocks: int) -> int:
    options: dict[str, Any] = {"seq_len": LENGTH, "exact": True, "optimizer": "none", "allocator": None}
    memory = estimate(config_of(kind, blocks), {"dp_shard": 1}, compile=True, **options).memory
    return memory.after_forward.activations


@pytest.mark.parametrize("kind", ["Qwen3", pytest.param("Gemma3Text", marks=pytest.mark.slow)])
def test_a_compiled_block_keeps_the_bytes_that_torch_partitions(kind: str) -> None:
    by_torch, by_dry_run = (kept(kind, 2) - kept(kind, 1) for kept in (kept_by_torch, kept_by_dry_run))
    assert by_dry_run == pytest.approx(by_torch, rel=0.03)
