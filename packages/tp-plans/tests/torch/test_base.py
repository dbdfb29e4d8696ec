"""What every style shares: DTensor parameters outside forward, local tensors inside, whatever happens in between."""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from harness.layers import gradient_mismatches, parallelized, tp_mesh
from harness.models import jitter
from harness.ranks import RanksFailed
from tp_plans import (
    ColwiseParallel,
    NoParallel,
    Plan,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
)

VOCAB, HIDDEN, WIDTH = 31, 8, 13
TP = {
    "embed": VocabParallelEmbedding(),
    "norm": NoParallel(),
    "mlp": PrepareModuleInput(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(use_local_output=False),
}
SP = TP | {
    "embed": VocabParallelEmbedding(output_layouts=Shard(1), use_local_output=False),
    "norm": SequenceParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}
PLANS = pytest.mark.parametrize("rules", [TP, SP], ids=["TP", "SP"])


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, hidden_states):
        return self.down(self.up(hidden_states).tanh())


class Model(nn.Module):
    """Embedding, a residual block, a head; recomputes the block in backward when told."""

    def __init__(self, *, tied=False, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def block(self, hidden):
        return hidden + self.mlp(hidden_states=self.norm(hidden))

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden = checkpoint(self.block, hidden, use_reentrant=False) if self.recompute else self.block(hidden)
        return self.head(hidden)


def model(**options):
    torch.manual_seed(0)
    made = Model(**options).double()
    jitter(made)
    return made


IDS = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(5))
WEIGHTS = torch.randn((2, 5, VOCAB), dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def whole(logits):
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def step(module):
    logits = whole(module(IDS))
    (logits * WEIGHTS).sum().backward()
    return logits.detach()


def local_tensors(module):
    """The parameters in a plan that are no DTensors, which outside forward there must be none of."""
    return [
        f"{path}.{name}"
        for path, child in module.named_modules()
        for name, parameter in child._parameters.items()
        if parameter is not None and not (isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter))
    ]


def model_faults(rules, **options):
    reference = model(**options)
    candidate = parallelized(reference, rules)
    off = (step(candidate) - step(reference)).abs().max().item()
    return [
        *gradient_mismatches(reference, candidate),
        *([f"output off by {off}"] if off > 1e-12 else []),
        *local_tensors(candidate),
    ]


@PLANS
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"recompute": True}], ids=["plain", "tied", "recompute"])
def test_a_model_equals_the_whole_one(two_ranks, rules, options):
    assert two_ranks.run(model_faults, rules, **options) == [[], []]


def tie_after(rules):
    candidate = parallelized(model(tied=True), rules)
    names = [name for name, _ in candidate.named_parameters()]
    return candidate.head.weight is candidate.embed.weight, "head.weight" in names


@PLANS
def test_tied_weights_stay_one_parameter(two_ranks, rules):
    assert two_ranks.run(tie_after, rules) == [(True, False)] * 2


def untie():
    parallelized(model(tied=True), TP | {"head": RowwiseParallel()})


def test_tie_that_the_plan_would_break_is_refused(two_ranks):
    with pytest.raises(RanksFailed, match=r"LayoutError: .*tied"):
        two_ranks.run(untie)


def frozen_faults():
    reference = model()
    reference.mlp.requires_grad_(False)
    reference.embed.requires_grad_(False)
    candidate = parallelized(reference, SP)
    step(reference)
    step(candidate)
    trained = {name for name, parameter in candidate.named_parameters() if parameter.requires_grad}
    assert trained == {"norm.weight", "norm.bias", "head.weight"}
    return list(gradient_mismatches(reference, candidate))


def test_frozen_parameters_stay_frozen_and_the_rest_trains_alike(two_ranks):
    assert two_ranks.run(frozen_faults) == [[], []]


def without_gradient(rules):
    reference = model()
    candidate = parallelized(reference, rules)
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found.append((whole(candidate(IDS)) - reference(IDS)).abs().max().item())
    return max(found), local_tensors(candidate)


@PLANS
def test_inference_equals_one_process(two_ranks, rules):
    for off, local in two_ranks.run(without_gradient, rules):
        assert off < 1e-12
        assert local == []


def anomalies(rules):
    """The errors of anomaly mode for a step, and for one whose gradients are not numbers."""
    found = []
    for scale in (1.0, float("nan")):
        module = parallelized(model(), rules)
        with torch.autograd.set_detect_anomaly(True):
            try:
                (whole(module(IDS)) * scale).sum().backward()
            except RuntimeError as error:
                found.append(str(error))
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection|Error detected")
@PLANS
def test_anomaly_mode_names_the_function_whose_gradient_is_no_number(two_ranks, rules):
    for found in two_ranks.run(anomalies, rules):
        assert len(found) == 1
        assert "returned nan values" in found[0]


WITHOUT_OURS = """
import torch
import torch.distributed.tensor.experimental
from torch.distributed.tensor import DTensor
propagator = DTensor._op_dispatcher.sharding_propagator
print(torch.ops.aten._is_any_true.default in {*propagator.op_strategy_funcs, *propagator.op_to_rules})
"""


def test_torch_has_no_sharding_strategy_for_anomaly_mode():
    """If it fails, remove ``_anomaly_compat``."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_OURS], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def copied_step(rules):
    """A copy with other weights must train itself, and leave the model that it was copied from alone."""
    reference = model()
    original = parallelized(reference, rules)
    copied = copy.deepcopy(original)
    with torch.no_grad():
        for module in (reference, copied):
            for parameter in module.parameters():
                parameter.mul_(1.25)
    off = (step(copied) - step(reference)).abs().max().item()
    touched = [name for name, parameter in original.named_parameters() if parameter.grad is not None]
    found = [*gradient_mismatches(reference, copied), *touched, *local_tensors(copied), *local_tensors(original)]
    return off, found


@PLANS
def test_a_deepcopy_computes_with_its_own_parameters_forward_and_backward(two_ranks, rules):
    for off, found in two_ranks.run(copied_step, rules):
        assert off < 1e-12
        assert found == []


class Failing(nn.Linear):
    """Raises what it holds, once."""

    error = None

    def forward(self, activation):
        if (error := self.error) is not None:
            self.error = None
            raise error
        return super().forward(activation)


def after_failure(kind):
    module = model()
    module.mlp.down.__class__ = Failing
    candidate = parallelized(module, TP)
    down, hook = candidate.mlp.down, None
    match kind:
        case "forward":
            down.error = RuntimeError("on purpose")
        case "interrupt":
            down.error = KeyboardInterrupt()
        case "later hook":
            hook = down.register_forward_hook(fail)
        case "later pre-hook":
            hook = down.register_forward_pre_hook(fail)
        case "earlier pre-hook":
            hook = down.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(KeyboardInterrupt if kind == "interrupt" else RuntimeError):
        candidate(IDS)
    left = local_tensors(candidate)
    if hook is not None:
        hook.remove()
    off = (step(candidate) - step(model())).abs().max().item()
    return left, off < 1e-12, local_tensors(candidate)


def fail(*arguments):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("kind", ["forward", "interrupt", "later hook", "later pre-hook", "earlier pre-hook"])
def test_a_failing_forward_leaves_the_dtensor_parameters_in_place(two_ranks, kind):
    assert two_ranks.run(after_failure, kind) == [([], True, [])] * 2


def apply_twice():
    candidate = parallelized(model(), TP)
    parallelize_module(candidate, tp_mesh(), Plan(TP).to_torch())


def apply_overlapping():
    parallelized(model(), {"mlp.up": ColwiseParallel(), "mlp.*": ColwiseParallel(multiple_of=2)})


@pytest.mark.parametrize("function", [apply_twice, apply_overlapping])
def test_a_second_style_on_a_module_is_refused(two_ranks, function):
    with pytest.raises(RanksFailed, match=r"AlreadyParallelizedError: this \w+ already carries \w+Parallel"):
        two_ranks.run(function)


def apply_to_patched():
    module = model()
    module.mlp.up.forward = module.mlp.up.forward
    parallelized(module, TP)


def test_a_module_whose_forward_is_patched_is_refused(two_ranks):
    with pytest.raises(RanksFailed, match="AlreadyParallelizedError: this Linear carries another forward"):
        two_ranks.run(apply_to_patched)


def class_after():
    up = parallelized(model(), TP).mlp.up
    return isinstance(up, nn.Linear), str(type(up)) == str(nn.Linear)


def test_a_module_keeps_its_type_and_the_name_of_its_class(two_ranks):
    assert two_ranks.run(class_after) == [(True, True)] * 2


class TakesMask(nn.Module):
    """A whole model that one rule is for; generation and trainers read the names of its arguments."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, hidden, attention_mask=None):
        return hidden * self.scale


def names_of_arguments():
    return list(inspect.signature(parallelized(TakesMask(), {"": NoParallel()}).forward).parameters)


def test_a_module_keeps_the_names_of_its_arguments(two_ranks):
    assert two_ranks.run(names_of_arguments) == [["hidden", "attention_mask"]] * 2


class Sharing(nn.Module):
    """Two blocks that hold the same layer, as models that repeat their weights do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(HIDDEN, WIDTH)}) for _ in range(2))
        self.blocks[1]["up"] = self.blocks[0]["up"]

    def forward(self, ids):
        return self.blocks[0]["up"](ids) + self.blocks[1]["up"](2 * ids)


def sharing_faults():
    torch.manual_seed(0)
    reference = Sharing().double()
    candidate = parallelized(reference, {"blocks.*.up": ColwiseParallel(use_local_output=False)})
    value = torch.ones(3, HIDDEN, dtype=torch.float64)
    reference(value).sum().backward()
    candidate(value).full_tensor().sum().backward()
    return list(gradient_mismatches(reference, candidate))


def test_a_module_at_two_places_of_one_rule_is_split_once(two_ranks):
    assert two_ranks.run(sharing_faults) == [[], []]


def differing_ranks():
    torch.manual_seed(torch.distributed.get_rank())
    linear = nn.Linear(4, 4, bias=False)
    theirs = linear.weight.detach().clone()
    full = parallelized(linear, {"": ColwiseParallel()}).weight.full_tensor().detach()
    return torch.equal(full, theirs)


def test_every_rank_takes_the_first_ranks_values(two_ranks):
    assert two_ranks.run(differing_ranks) == [True, False]


def meta_shapes():
    with torch.device("meta"):
        candidate = parallelized(Model(tied=True), SP)
    parameters = dict(candidate.named_parameters())
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in parameters.values())
    candidate.to_empty(device="cpu")
    kept = candidate.head.weight is candidate.embed.weight
    return kept, {name: list(parameter.to_local().shape) for name, parameter in parameters.items()}


def test_a_model_on_the_meta_device_is_split_without_values(two_ranks):
    for rank, (kept, shapes) in enumerate(two_ranks.run(meta_shapes)):
        assert kept
        assert shapes["embed.weight"] == [[16, HIDDEN], [15, HIDDEN]][rank]
        assert shapes["mlp.up.bias"] == [[7], [6]][rank]
        assert shapes["mlp.down.weight"] == [[HIDDEN, 7], [HIDDEN, 6]][rank]
        assert shapes["norm.weight"] == [HIDDEN]


def state_names():
    reference = model(tied=True)
    candidate = parallelized(reference, TP)
    full = {name: value.full_tensor() for name, value in candidate.state_dict().items()}
    return all(torch.equal(value, full[name]) for name, value in reference.state_dict().items()), list(full)


def test_the_state_dict_keeps_its_names_and_full_values(two_ranks):
    for equal, names in two_ranks.run(state_names):
        assert equal
        assert names == list(model(tied=True).state_dict())


def foreign_mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"]
    batch = distribute_tensor(torch.ones(4, HIDDEN), other)
    parallelized(nn.Linear(HIDDEN, WIDTH), {"": ColwiseParallel()})(batch)


def test_a_dtensor_on_another_mesh_is_refused(two_ranks):
    with pytest.raises(RanksFailed, match=r"LayoutError: a DTensor on the mesh .*plain tensor"):
        two_ranks.run(foreign_mesh)
