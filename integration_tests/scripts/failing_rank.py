"""A training step in which one rank fails while the others wait for it; started by torchrun in a test."""

from __future__ import annotations

import torch.distributed as dist

from fsdp_runtime import MeshSpec, parallelize
from harness.models import tiny_inputs, tiny_model


def main() -> None:
    """Fail on rank 1 in the second forward."""
    mesh = MeshSpec(dp_shard=-1, tp=2).build(device_type="cpu")
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh, sequence_parallel=True)
    inputs = tiny_inputs(model, batch=2, length=5)
    model(**inputs).logits.to_local().sum().backward()
    if dist.get_rank() == 1:
        raise ValueError("planted: the data of rank 1 is broken")
    model(**inputs)


if __name__ == "__main__":
    main()
