"""Without row-wise layers the ranks compute, bit for bit, what one process computes; with them they do not."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from harness.models import tiny_inputs, tiny_model
from harness.parity import Case, assert_parity, compare, mesh_for
from tp_plans import plan_for


def parallelize(model, mesh, **options):
    return parallelize_module(model, mesh["tp"], plan_for(model, **options).to_torch())


def largest_difference(architecture, options, length):
    """Of the logits, in float32, from those of the whole model."""
    model = tiny_model(architecture, dtype=torch.float32)
    inputs = tiny_inputs(model, batch=2, length=length)
    with torch.no_grad():
        expected = copy.deepcopy(model)(**inputs, use_cache=False).logits
        found = parallelize(model, mesh_for({"tp": 2}), **options)(**inputs, use_cache=False).logits
    return (found.full_tensor() if isinstance(found, DTensor) else found).sub(expected).abs().max().item()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_are_those_of_one_process_bit_for_bit(two_ranks, architecture, sequence_parallel):
    options = {"rowwise": False, "sequence_parallel": sequence_parallel}
    assert two_ranks.run(largest_difference, architecture, options, 9) == [0.0, 0.0]


def test_logits_with_row_wise_layers_differ_in_their_last_bits(two_ranks):
    """The test above can fail."""
    assert min(two_ranks.run(largest_difference, "LlamaForCausalLM", {}, 9)) > 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_complete(two_ranks, sequence_parallel):
    options = {"rowwise": False, "sequence_parallel": sequence_parallel}
    case = Case("Qwen3ForCausalLM", {"tp": 2}, parallelize, options, {"tied": True})
    assert_parity(two_ranks.run(compare, case))
