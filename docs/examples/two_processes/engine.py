"""The engine: one process with a whole copy of the model, which takes weights and answers requests."""

import os
from multiprocessing.connection import Listener

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_runtime.sync import unflatten_bucket

ADDRESS = ("localhost", int(os.environ["MASTER_PORT"]) + 1)
KEY = b"an example"


def small_model() -> LlamaForCausalLM:
    """Return a model that every process builds with the same values."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))


@torch.no_grad()
def main() -> None:
    """Serve one trainer until it says ``stop``."""
    with Listener(ADDRESS, authkey=KEY) as listener:
        dist.init_process_group("gloo")
        own = dist.get_rank()
        dist.new_group(range(own))  # every process takes part in making every group
        from_trainer = dist.new_group([0, own])
        model = small_model()
        parameters = dict(model.named_parameters())
        connection = listener.accept()
        while (message := connection.recv())[0] != "stop":
            kind, content = message
            if kind == "tokens":
                connection.send(model(torch.tensor(content)).logits.tolist())
                continue
            flat = torch.empty(sum(weight.nbytes for weight in content), dtype=torch.uint8)
            dist.broadcast(flat, group=from_trainer, group_src=0)
            for name, tensor in unflatten_bucket(content, flat):
                parameters[name].copy_(tensor)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
