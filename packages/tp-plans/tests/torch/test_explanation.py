"""What an explanation says is sent is what the ranks send, counted."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from harness.models import ARCHITECTURES, tiny_inputs, tiny_model
from harness.pairwise import alternating_first
from harness.parity import mesh_for
from tp_plans import (
    ColwiseParallel,
    ParameterStyle,
    Plan,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
    explain,
    plan_for,
)

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
}
#: Operators of the same libraries that send nothing.
LOCAL = ("wait_tensor", "_wrap_tensor_autograd")


class Counted(TorchDispatchMode):
    """Counts collectives by kind; torch's ``CommDebugMode`` also tracks modules, which transformers' hooks upset."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that the DTensor takes itself apart, and its collectives come here
        namespace, _, name = func._overloadpacket._qualified_op_name.partition("::")
        if namespace in ("_c10d_functional", "c10d") and name not in LOCAL:
            self.counts[KINDS[name]] += 1
        return func(*args, **(kwargs or {}))


def of_passes(model, inputs):
    """The collectives of one forward and one backward pass."""
    with Counted() as forward:
        logits = model(**inputs, use_cache=False).logits
    with Counted() as backward:
        logits.backward(torch.ones_like(logits))
    return dict(forward.counts), dict(backward.counts)


def of_architecture(architecture, sequence_parallel, rowwise, **options):
    model = tiny_model(architecture, **options)
    inputs = tiny_inputs(model, batch=2, length=8)
    plan = plan_for(model, sequence_parallel=sequence_parallel, rowwise=rowwise)
    told = explain(plan, model, tp=2)
    model = parallelize_module(model, mesh_for({"tp": 2})["tp"], plan.to_torch())
    local = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    wrong = [each.path for each in told.parameters if each.layout and local[each.path] != each.local_shape]
    first = torch.distributed.get_rank() == 0
    return of_passes(model, inputs), (told.collectives("forward"), told.collectives("backward")), wrong if first else []


@pytest.mark.parametrize(("architecture", "sequence_parallel"), alternating_first(ARCHITECTURES, [True, False]))
def test_the_collectives_and_local_shapes_told_are_those_of_the_run(two_ranks, architecture, sequence_parallel):
    for measured, told, wrong in two_ranks.run(of_architecture, architecture, sequence_parallel, True):
        assert measured == told
        assert wrong == []


def test_heads_that_ranks_share_are_fetched_as_told(two_ranks):
    for measured, told, wrong in two_ranks.run(of_architecture, "LlamaForCausalLM", False, True, num_key_value_heads=1):
        assert measured == told
        assert told[0]["all_to_all"] == 2 * 4  # keys and values, weight and bias, in two blocks
        assert wrong == []


def as_on_a_cpu(counts):
    """torch moves the cut from dim to dim by an all-to-all; on a CPU, by a gather of which it keeps a part."""
    gathers = counts.get("all_gather", 0) + counts.get("all_to_all", 0)
    return {kind: n for kind, n in {**counts, "all_gather": gathers, "all_to_all": 0}.items() if n}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_explain_counts_collectives_of_plans_without_row_wise_layers(two_ranks, sequence_parallel):
    for measured, told, wrong in two_ranks.run(of_architecture, "LlamaForCausalLM", sequence_parallel, False):
        assert measured == tuple(map(as_on_a_cpu, told))
        assert wrong == []


class Fused(nn.Module):
    """A fused MLP with a gate that every rank needs whole, and one that lies split."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(16, 48, bias=False)
        self.down = nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, hidden):
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return self.down(gate * up) * self.scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.norm = nn.RMSNorm(16)
        self.mlp = Fused()

    def forward(self, ids):
        return self.mlp(self.norm(self.embed(ids)))


def rules(stream):
    cut = stream != Replicate()
    return {
        "embed": VocabParallelEmbedding(output_layouts=stream, use_local_output=not cut),
        **({"norm": SequenceParallel(), "mlp": PrepareModuleInput(argument="hidden")} if cut else {}),
        "mlp.gate_up": ColwiseParallel(fused_sizes=(1, 1)),
        "mlp.down": RowwiseParallel(),
        "mlp.scale": ParameterStyle(gathered=True),
    }


def of_fused(stream):
    plan = Plan(rules(stream), sequence_parallel=stream != Replicate())
    model = Model()
    told = explain(plan, model, tp=2)
    model = parallelize_module(model, mesh_for({"tp": 2})["tp"], plan.to_torch())
    with Counted() as forward:
        output = model(torch.arange(10).view(2, 5))
    with Counted() as backward:
        output.sum().backward()
    return (dict(forward.counts), dict(backward.counts)), (told.collectives("forward"), told.collectives("backward"))


@pytest.mark.parametrize("stream", [Replicate(), Shard(1)])
def test_fused_weights_and_bare_parameters_are_told_rightly(two_ranks, stream):
    for measured, told in two_ranks.run(of_fused, stream):
        assert measured == told
