"""Two meshes in a world of six ranks, each adopted and used by its own ranks alone; started by test_two_meshes.py."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp_runtime
from harness.models import tiny_inputs, tiny_model

#: The axes of the first mesh, ranks 0 to 3; the second has ranks 4 and 5, or is rank 4 alone.
FIRST = {"shards": ("dp_shard", "tp"), "replicas": ("dp_replicate", "dp_shard"), "cp": ("dp_shard", "cp")}


def train(mesh: DeviceMesh, folder: Path) -> None:
    """Take a step that is compared with one process, save, and load what was saved."""
    adopted = fsdp_runtime.adopt_mesh(mesh)
    for axis in ("dp", "dp_shard_cp", "dp_cp"):
        flat = fsdp_runtime.submesh(adopted, axis)
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total, group=flat.get_group())
        assert total == sum(flat.mesh.tolist()), (axis, flat, total)
    model = tiny_model("Qwen3ForCausalLM")
    inputs = tiny_inputs(model, batch=2, length=8)
    model(**inputs, use_cache=False).logits.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    fsdp_runtime.parallelize(model, adopted, logits="full")
    inputs = {name: value + fsdp_runtime.submesh(adopted, "cp").get_local_rank() for name, value in inputs.items()}
    model(**inputs, use_cache=False).logits.square().sum().backward()
    if fsdp_runtime.submesh(adopted, "cp").size() == 1:  # every rank of cp has part of the tokens
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9)
    fsdp_runtime.save_weights(model, folder / "weights")
    fsdp_runtime.load_weights(model, folder / "weights")
    state = fsdp_runtime.save_training_state(folder / "state", model, torch.optim.SGD(model.parameters()), step=1)
    fsdp_runtime.load_training_state(state, model, torch.optim.SGD(model.parameters()))


def main(axes: str, second: str, folder: str) -> None:
    """Train on both meshes at the same time, and meet only at the end."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    meshes = (
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=FIRST[axes]),
        DeviceMesh("cpu", [4, 5] if second == "two" else [4], mesh_dim_names=("tp",)),
    )
    if rank == 1:  # a rank that is in more groups than others is no reason to wait
        dist.new_group([1], use_local_synchronization=True)
    for index, mesh in enumerate(meshes):
        if mesh.get_coordinate() is not None:
            train(mesh, Path(folder) / str(index))
    dist.barrier()
    (Path(folder) / f"rank {rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
