"""Parallelized blocks under ``torch.compile``: one graph for all of them, the same numbers."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from harness.layers import gradient_mismatches, parallelized
from harness.models import tiny_model
from tp_plans import plan_for


def compiled_faults(blocks, sequence_parallel, backend):
    """A whole Qwen3 with its blocks compiled as full graphs, against the single-process model."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    reference = tiny_model("Qwen3ForCausalLM", num_hidden_layers=blocks)
    compiled = parallelized(reference, plan_for(reference, sequence_parallel=sequence_parallel))
    for block in compiled.model.layers:
        block.compile(backend=backend, fullgraph=True)
    ids = torch.randint(3, 130, (2, 7), generator=torch.Generator().manual_seed(1))
    outputs = []
    for model in (reference, compiled):
        logits = model(ids, use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        logits.square().sum().backward()
        outputs.append(logits.detach())
    off = (outputs[0] - outputs[1]).abs().max().item()
    left = [name for name, parameter in compiled.named_parameters() if not isinstance(parameter, DTensor)]
    graphs = counters["stats"]["unique_graphs"]
    return off < 1e-5, list(gradient_mismatches(reference, compiled, bound=1e-4)), left, graphs


# Seven tokens on two ranks: the last rank's part is the shorter one, and has the strides of any other nevertheless
# (test_embedding).  With the backend "eager" the second block would have a graph of its own, and none after it.
# That several blocks share one graph under tensor parallelism is also tested in test_together.
# Slow: test_parallelize of fsdp_runtime compiles such blocks on a mesh with tp, and test_together all styles.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "sequence_parallel", "backend"),
    [
        (3, False, "aot_eager"),
        (2, True, "aot_eager"),
        (1, True, "eager"),
    ],
    ids=["TP", "SP", "SP, graphs alone"],
)
def test_compiled_blocks_share_one_graph_and_are_right(two_ranks, blocks, sequence_parallel, backend):
    assert two_ranks.run(compiled_faults, blocks, sequence_parallel, backend) == [(True, [], [], 1)] * 2
