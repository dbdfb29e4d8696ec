"""What each sharding option changes: memory between passes, communication, dtypes, frozen parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime import FSDP2, MeshSpec, OptionError, describe_parallelism, parallelize, submesh
from fsdp_runtime.model import inspect_model
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.pairwise import alternating_first
from harness.parity import Case, compare, gradient_errors, mesh_for
from harness.ranks import RankPool, RanksFailed

VISION = "model.vision_tower"


def _model(architecture: str = "Qwen3ForCausalLM", **options: Any) -> nn.Module:
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    return parallelize(tiny_model(architecture, num_hidden_layers=4), mesh, fsdp=FSDP2(**options))


def _step(model: nn.Module) -> dict[str, int]:
    """Counts of one training step's collectives by kind."""
    with RecordCollectives() as communication:
        model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits.float().sum().backward()
    return dict(communication.counts())


def _steps_of(*options: dict[str, Any]) -> list[dict[str, int]]:
    return [_step(_model(**each)) for each in options]


def test_what_is_kept_after_forward_is_not_gathered_again(two_ranks: RankPool) -> None:
    default, keep, free = two_ranks.run(_steps_of, {}, {"reshard_after_forward": False}, {"reshard_last_block": True})[
        0
    ]
    # Four blocks and the root: forward gathers all five; backward those that were freed.
    assert default == {"all_gather": 5 + 3, "reduce_scatter": 5}
    assert keep == {"all_gather": 5, "reduce_scatter": 5}
    assert free == {"all_gather": 5 + 5, "reduce_scatter": 5}


def _gathered_when_first_block_runs(depth: int) -> tuple[int, dict[str, int]]:
    model = _model(prefetch_forward=depth, prefetch_backward=2)
    seen: list[int] = []
    with RecordCollectives() as communication:
        model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append(len(communication.calls)))
        model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits.sum().backward()
    return seen[0], dict(communication.counts())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefetching_gathers_earlier_and_no_more(two_ranks: RankPool, depth: int) -> None:
    gathered, step = two_ranks.run(_gathered_when_first_block_runs, depth)[0]
    assert gathered == 2 + depth  # the root, this block and those ahead
    assert step == {"all_gather": 5 + 3, "reduce_scatter": 5}


def _frozen_tower(frozen: str) -> dict[str, Any]:
    model = tiny_model("Gemma3ForConditionalGeneration")
    tower = model.get_submodule(VISION)
    tower.requires_grad_(False)
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    model = parallelize(model, mesh, fsdp=FSDP2(frozen_params=frozen))  # type: ignore[arg-type]
    report = describe_parallelism(model)
    return {
        "units": [unit for unit in report.fsdp_modules if unit.startswith(VISION)],
        "whole": all(name.startswith(VISION) for name in report.replicated) and bool(report.replicated),
        "step": _step(model),
        "gradients": all(p.grad is None for p in tower.parameters())
        and all(p.grad is not None for p in model.model.language_model.parameters()),
    }


@pytest.mark.parametrize(
    ("frozen", "units", "whole", "gathers"),
    [("layer", 1, False, 4 + 2), ("root", 0, False, 3 + 1), ("replicate", 0, True, 3 + 1)],
)
def test_a_frozen_tower_is_sharded_by_layer_at_the_root_or_not_at_all(
    two_ranks: RankPool, frozen: str, units: int, whole: bool, gathers: int
) -> None:
    found = two_ranks.run(_frozen_tower, frozen)[0]
    assert len(found["units"]) == units
    assert found["whole"] is whole
    assert found["gradients"]
    # Forward gathers the units, backward the first decoder block, and torch prefetches the tower's block there too.
    assert found["step"]["all_gather"] == gathers
    assert found["step"]["reduce_scatter"] == 3  # two blocks of the decoder and the root


def frozen_tower(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Freeze the vision tower, on the reference too, which has the same seed."""
    model.get_submodule(VISION).requires_grad_(False)
    return parallelize(model, mesh, **options)


@pytest.mark.parametrize(
    "frozen", ["layer", *(pytest.param(each, marks=pytest.mark.slow) for each in ("root", "replicate"))]
)
def test_frozen_towers_change_no_other_gradient(four_ranks: RankPool, frozen: str) -> None:
    options = {"fsdp": FSDP2(frozen_params=frozen), "sequence_parallel": True}  # type: ignore[arg-type]
    case = Case("Gemma3ForConditionalGeneration", {"dp_shard": 2, "tp": 2}, frozen_tower, options)
    for report in four_ranks.run(compare, case):
        errors = {name: error for name, error in report.gradient_errors.items() if VISION not in name}
        assert max(errors.values()) < 1e-4
        assert report.output_error < 1e-5


class _Tempered(nn.Module):
    """A policy with a learned temperature, one element, that meets logits sharded on the vocabulary."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.policy: Any = tiny_model("Qwen3ForCausalLM")
        self.temperature = nn.Parameter(torch.full(shape, 1.5, dtype=torch.float64))
        self.policy.get_input_embeddings().requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.policy(tokens, use_cache=False).logits / self.temperature
        full: Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return full.log_softmax(-1)[..., 5]


def _what_stays_whole(axes: dict[str, int], shape: tuple[int, ...]) -> list[str]:
    model, plain, mesh = _Tempered(shape), _Tempered(shape), mesh_for(axes)
    parallelize(model, mesh, fsdp=FSDP2(frozen_params="replicate"))
    tokens = tiny_inputs(plain.policy, batch=2, length=5)["input_ids"]
    own = tokens[submesh(mesh, "dp").get_local_rank()][None] if "dp_shard" in axes else tokens
    for trained in (False, True):
        for each, rows in ((model, own), (plain, tokens)):
            each.zero_grad()
            each.policy.get_input_embeddings().requires_grad_(trained)
            each(rows).mean().backward()
        errors = gradient_errors({name: each.grad for name, each in plain.named_parameters()}, model)
        if wrong := [name for name, error in errors.items() if not error <= 1e-6]:
            return wrong
    return ["temperature"] if isinstance(model.temperature.grad, DTensor) else []


@pytest.mark.parametrize(("axes", "shape"), [({"dp_shard": 2}, ()), ({"tp": 2}, ()), ({"tp": 2}, (1,))])
def test_scalars_and_parameters_that_are_trained_later_have_gradients_of_all_ranks(
    two_ranks: RankPool, axes: dict[str, int], shape: tuple[int, ...]
) -> None:
    assert two_ranks.run(_what_stays_whole, axes, shape) == [[], []]


def test_one_element_under_fsdp_and_tp_has_the_gradient_of_all_ranks(four_ranks: RankPool) -> None:
    assert four_ranks.run(_what_stays_whole, {"dp_shard": 2, "tp": 2}, (1,)) == [[]] * 4


def _frozen_in_another_dtype() -> None:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    model.model.layers[0].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = FSDP2(frozen_params="replicate", mp_policy=policy)
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"), fsdp=options)


def test_frozen_parameters_left_whole_in_another_dtype_are_refused(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"OptionError.*layers\.0\.self_attn\.q_proj\.weight in torch\.float32"):
        two_ranks.run(_frozen_in_another_dtype)


def _master_weights() -> dict[str, Any]:
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    model = tiny_model("LlamaForCausalLM", dtype=torch.bfloat16, tied=True)
    model.model.layers[0].mlp.requires_grad_(False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    options = FSDP2(mp_policy=policy, master_dtype="fp32")
    parallelize(model, mesh, fsdp=options)
    computed: list[torch.dtype] = []
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, output: computed.append(output.dtype))
    logits = model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits
    logits.sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer.step()
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "parameters": {str(p.dtype) for p in trained},
        "frozen": {str(p.dtype) for p in model.parameters() if not p.requires_grad},
        "gradients": {str(p.grad.dtype) for p in trained},
        "computes": {str(dtype) for dtype in computed},
        "outputs": str(logits.dtype),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "steps of one millionth arrive": any(
            not torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True)
        ),
    }


def test_master_weights_and_reductions_are_float32_under_bfloat16_compute(two_ranks: RankPool) -> None:
    assert two_ranks.run(_master_weights)[0] == {
        "parameters": {"torch.float32"},
        "frozen": {"torch.bfloat16"},
        "gradients": {"torch.float32"},
        "computes": {"torch.bfloat16"},
        "outputs": "torch.float32",
        "tied": True,
        "steps of one millionth arrive": True,
    }


def _gradient(model: nn.Module, rows: slice) -> torch.Tensor:
    inputs = {name: value[rows] for name, value in tiny_inputs(model, batch=4, length=5).items()}
    model(**inputs, use_cache=False).logits.sum().backward()
    gradient = model.model.norm.weight.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _scales(mesh: dict[str, int], factor: float | None) -> float:
    whole = _gradient(tiny_model("LlamaForCausalLM"), slice(0, 4))
    built = MeshSpec(**mesh).build(device_type="cpu")
    options = FSDP2(gradient_divide_factor=factor)
    model = parallelize(tiny_model("LlamaForCausalLM"), built, fsdp=options)
    rank = torch.distributed.get_rank()
    share = 4 // torch.distributed.get_world_size()
    own = _gradient(model, slice(rank * share, (rank + 1) * share))
    scale = own.norm() / whole.norm()
    torch.testing.assert_close(own, whole * scale)
    return scale.item()


@pytest.mark.parametrize(
    ("mesh", "divided"),
    alternating_first([{"dp_shard": 2}, {"dp_replicate": 2}], [(None, 0.5), (1.0, 1.0), (7.0, 1 / 7)]),
    ids=str,
)
def test_gradients_are_divided_as_asked(
    two_ranks: RankPool, mesh: dict[str, int], divided: tuple[float | None, float]
) -> None:
    factor, scale = divided
    assert two_ranks.run(_scales, mesh, factor) == pytest.approx([scale, scale], rel=1e-5)


class _SharesABlock(nn.Module):
    """The same layer twice, as Zamba's attention; a parameter of one block also in another, as a tied adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        self.layers[2][1].weight = self.layers[0][1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _shared_between_blocks() -> tuple[tuple[str, ...], bool, float]:
    torch.manual_seed(0)
    model, reference = _SharesABlock(), _SharesABlock()
    reference.load_state_dict(model.state_dict())
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"), plan=None)
    x = torch.ones(2, 4)
    for each in (model, reference):
        each(x).sum().backward()
    wanted = reference.layers[0][1].weight.grad
    error = (model.layers[0][1].weight.grad.full_tensor() - wanted).abs().max().item()
    return describe_parallelism(model).fsdp_modules, model.layers[2][1].weight is model.layers[0][1].weight, error


def test_blocks_that_share_a_parameter_stay_tied_in_the_root(two_ranks: RankPool) -> None:
    units, tied, error = two_ranks.run(_shared_between_blocks)[0]
    assert units == ("", "layers.1")
    assert tied
    assert error < 1e-6


def _nested_lists() -> tuple[str, ...]:
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]) for _ in range(2)])
    assert inspect_model(model).decoder[-1] == "stages.1.1"
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"), plan=None)
    return tuple(path for path, module in model.named_modules() if isinstance(module, FSDPModule))


def test_members_of_nested_lists_are_units(two_ranks: RankPool) -> None:
    assert two_ranks.run(_nested_lists)[0] == ("", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen_params": "whole"}, "frozen_params='whole': write one of 'layer', 'root', 'replicate'"),
        ({"prefetch_forward": -1}, "prefetch_forward=-1: give a number of blocks, 0 or more"),
        ({"prefetch_backward": 0}, "prefetch_backward=0: give a number of blocks, 1 or more"),
        ({"prefetch_forward": True}, "prefetch_forward=True: give a number of blocks, 0 or more"),
        ({"gradient_divide_factor": 0.0}, "gradient_divide_factor=0.0: give a positive number"),
        ({"gradient_divide_factor": "2"}, "gradient_divide_factor='2': give a positive number"),
        ({"mp_policy": "bf16"}, r"mp_policy='bf16' is of type str: give MixedPrecisionPolicy\("),
        ({"mp_policy": MixedPrecisionPolicy(torch.int8)}, "param_dtype of mp_policy=torch.int8: give a floating dtype"),
        ({"offload_policy": True}, r"offload_policy=True is of type bool: give CPUOffloadPolicy\(\) or None"),
        (
            {"master_dtype": torch.int8},
            "master_dtype=torch.int8: give a floating dtype, as torch.float32, or one of bf16",
        ),
        ({"master_dtype": "float31"}, "master_dtype='float31': give a floating dtype"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward='no': write True or False"),
        ({"reshard_last_block": 1}, "reshard_last_block=1: write True or False"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FSDP2(**options)


@pytest.mark.parametrize("keyword", ["sequence_parallel", "packed_sequences"])
def test_switches_that_are_words_are_refused(keyword: str) -> None:
    with pytest.raises(OptionError, match=f"{keyword}='no': write True or False"):
        parallelize(tiny_model("LlamaForCausalLM"), MeshSpec().build(device_type="cpu"), **{keyword: "no"})  # type: ignore[arg-type]


def test_master_weights_without_a_dtype_to_compute_in_are_refused() -> None:
    options = FSDP2(master_dtype=torch.float32)
    with pytest.raises(OptionError, match=r"without a dtype to compute in: give mp_policy=MixedPrecisionPolicy\("):
        parallelize(tiny_model("LlamaForCausalLM"), MeshSpec().build(device_type="cpu"), fsdp=options)
