"""The trainer: two tensor-parallel ranks that train, and send their weights to the engine after every step."""

from multiprocessing.connection import Client

import torch
import torch.distributed as dist
from engine import ADDRESS, KEY, small_model
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import adopt_mesh, parallelize
from fsdp_runtime.sync import send_weights


def main() -> None:
    """Train on random tokens for three steps."""
    dist.init_process_group("gloo")
    ranks = range(dist.get_world_size() - 1)  # all but the engine's, which is the last
    trainers = dist.new_group(ranks)
    to_engine = dist.new_group([0, len(ranks)])
    mesh = adopt_mesh(DeviceMesh.from_group(trainers, "cpu", mesh_dim_names=("tp",)))
    model = parallelize(small_model(), mesh, logits="full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))
    engine = Client(ADDRESS, authkey=KEY) if dist.get_rank() == 0 else None
    group = to_engine if engine is not None else None
    for step in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        send_weights(model, group, lambda bucket: engine.send(("weights", bucket)))
        with torch.no_grad():
            expected = model(tokens).logits
        if engine is not None:
            engine.send(("tokens", tokens.tolist()))
            difference = (torch.tensor(engine.recv()) - expected).abs().max()
            print(f"step {step}: loss {loss:.3f}, the engine's logits differ by {difference:.1e}", flush=True)
    if engine is not None:
        engine.send(("stop", None))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
