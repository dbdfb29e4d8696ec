"""A parallelized block under ``torch.compile``: one graph, the same numbers."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from harness.layers import gradient_faults, parallelized
from harness.models import tiny_model
from tp_plans import plan_for


def compiled_faults(sequence_parallel):
    """A whole Qwen3 with each block compiled as one graph, against the single-process model."""
    torch.compiler.reset()
    reference = tiny_model("Qwen3ForCausalLM")
    plan = plan_for(reference, sequence_parallel=sequence_parallel)
    eager = parallelized(reference, plan)
    compiled = copy.deepcopy(eager)
    for block in compiled.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    ids = torch.randint(3, 130, (2, 7), generator=torch.Generator().manual_seed(1))
    outputs = []
    for model in (reference, compiled):
        logits = model(ids, use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        logits.square().sum().backward()
        outputs.append(logits.detach())
    off = (outputs[0] - outputs[1]).abs().max().item()
    left = [name for name, parameter in compiled.named_parameters() if not isinstance(parameter, DTensor)]
    return off < 1e-5, list(gradient_faults(reference, compiled, bound=1e-4)), left


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_compiled_block_is_one_graph_and_right(two_ranks, sequence_parallel):
    assert two_ranks.run(compiled_faults, sequence_parallel) == [(True, [], [])] * 2
