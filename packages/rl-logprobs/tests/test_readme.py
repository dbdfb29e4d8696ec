"""What the README shows runs as it stands there, on two ranks that share the vocabulary and the sequence."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness import pages

README = Path(__file__).parents[1] / "README.md"
BATCH, LENGTH, VOCAB, FEATURES = 2, 8, 131, 16


def values_of_a_trainer():
    """The names that the README takes for granted."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def logits():
        full = torch.randn(BATCH, LENGTH, VOCAB)
        return distribute_tensor(full, mesh, [Shard(2)]).requires_grad_()

    head = torch.nn.Linear(FEATURES, VOCAB, bias=False)
    head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    norm = torch.nn.Parameter(distribute_tensor(torch.ones(FEATURES), mesh, [Replicate()]))
    model = SimpleNamespace(lm_head=head, parameters=lambda: [head.weight, norm])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return {
        "logits": logits(),
        "teacher_logits": logits(),
        "reference_logits": logits(),
        "reference_logprobs": torch.zeros(BATCH, LENGTH),
        "hidden": torch.randn(BATCH, LENGTH, FEATURES),
        "teacher_hidden": torch.randn(BATCH, LENGTH, 2 * FEATURES),
        "teacher_weight": torch.randn(VOCAB, 2 * FEATURES),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "input_ids": ids,
        "token_ids": ids,
        "targets": ids,
        "mask": torch.ones_like(ids),
        "response_mask": torch.ones_like(ids),
        "packed_ids": ids.view(-1),
        "cu_seqlens": torch.tensor([0, 5, BATCH * LENGTH]),
        "step": 0,
        "seq_len": BATCH * LENGTH,
        "cp_size": 2,
        "cp_group": dist.group.WORLD,
    }


def run_all():
    names = values_of_a_trainer()
    for block in pages.blocks(README, "python"):
        if "cp_group" in block.text:  # what a rank of a context-parallel axis has of the packed sequence
            names["logits"] = torch.randn(names["seq_len"] // 2, VOCAB)
        assert pages.run([block], names) == []
    return tuple(names["logprobs"].shape), float(names["norm"])


def test_every_block_of_the_readme_runs(two_ranks):
    (shape, norm), (_, other) = two_ranks.run(run_all)
    assert shape == (BATCH * LENGTH,)
    assert norm == other == torch.tensor(VOCAB * FEATURES + FEATURES).sqrt().item()
