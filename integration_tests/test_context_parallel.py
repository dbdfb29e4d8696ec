"""Context parallelism against the single-process model: outputs, gradients and log-probabilities on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp_runtime.steps.context.masks as masks
import rl_logprobs
from coverage.measure import default_dtype
from coverage.packing import LENGTH as LENGTH_OF_ROWS
from coverage.packing import PACKED_BOUND, ROWS, measure_packing_on_ranks
from coverage.table import UNBUILDABLE, coverage_entries
from coverage.table import tiny_model as tiny_row
from fsdp_runtime import LayoutError, ModelError, parallelize, sequence_layout, submesh
from fsdp_runtime.steps import CheckInputs, ContextParallel
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.sharding import SequenceLayout
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.options import CONTIGUOUS
from harness.pairwise import alternating_first
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, mesh_for, own_part
from harness.ranks import RankPool

LENGTH = 16
ONE_KV_HEAD, TWO_KV_HEADS = ({"num_key_value_heads": heads} for heads in (1, 2))


def _shown_in_full(mask: SequenceMask, queries: tuple[int, int], keys: tuple[int, int]) -> int:
    """Tiles with something to see are taken to hide nothing, so that documents leak."""
    return masks.EVERYTHING if mask._shown[queries][keys] != masks.NOTHING else masks.NOTHING


def _seen_by_half(mask: SequenceMask, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """A window that ends one token too early, for queries that see another."""
    seen = _tile(mask, queries, keys)
    return seen & (seen.roll(-1, dims=-1) | torch.eye(*seen.shape[-2:], dtype=torch.bool))


_tile = SequenceMask.tile
FAULTS: dict[str, tuple[str, Any]] = {
    "a document leak": ("shows", _shown_in_full),
    "a wrong window": ("tile", _seen_by_half),
}


def _inputs(model: nn.Module, kind: str) -> dict[str, Tensor]:
    inputs = tiny_inputs(model, batch=4, length=LENGTH)
    inputs = {"input_ids": inputs["input_ids"].clamp(max=120)}  # no image tokens
    match kind:
        case "left" | "right":
            padding = torch.arange(4).unsqueeze(1) * 2
            mask = torch.arange(LENGTH).unsqueeze(0) >= padding
            inputs["attention_mask"] = (mask if kind == "left" else mask.flip(1)).long()
        case "shifted":
            inputs["position_ids"] = (torch.arange(LENGTH) + 5).expand(4, -1)
        case "packed":
            inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)]).expand(4, -1)
    return inputs


def _own_rows(mesh: DeviceMesh) -> slice:
    data = submesh(mesh, "dp")
    share = 4 // data.size()
    return slice(share * data.get_local_rank(), share * (data.get_local_rank() + 1))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _compare(
    architecture: str, axes: dict[str, int], kind: str = "", load_balancer: Any = "headtail", **options: Any
) -> dict[str, float]:
    """The largest error of the logits and of each gradient against one process."""
    changes = options.pop("model", {})
    reference = tiny_model(architecture, **changes)
    model = copy.deepcopy(reference)
    inputs = _inputs(reference, kind)
    expected = reference(**inputs, use_cache=False).logits
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    if "attention_mask" in inputs:
        weights = weights * inputs["attention_mask"].unsqueeze(-1)  # what padding positions compute is undefined
    (expected * weights).sum().backward()

    mesh = mesh_for(axes)
    method = options.pop("context_parallel", "allgather")
    parallelize(model, mesh, context_parallel=ContextParallel(method, load_balancer), **options)
    layout, own = sequence_layout(mesh, LENGTH, load_balancer=load_balancer), _own_rows(mesh)
    local = layout.shard_batch({name: value[own] for name, value in inputs.items()})
    if kind == "shifted":
        assert torch.equal(local["position_ids"][0], layout.positions + 5)
    else:
        local = {name: value for name, value in local.items() if name in inputs}  # the model fills in positions
    logits = _full(model(**local, use_cache=False).logits)
    weight = layout.shard(weights[own])
    # FSDP averages over the ranks of dp, which have different rows, and sums over those of cp.
    (logits * weight).sum().mul(submesh(mesh, "dp").size()).backward()
    errors = {"logits": ((logits - layout.shard(expected[own])) * (weight != 0)).abs().max().item() / OUTPUT_BOUND}
    for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
        wanted, found = one.grad, other.grad
        if wanted is None or found is None:
            assert wanted is found, name
            continue
        scale = wanted.abs().max().item() or 1.0
        if isinstance(found, DTensor):
            wanted, found = own_part(wanted, found), found.to_local()
        if wanted.numel():
            errors[name] = (found - wanted).abs().max().item() / scale / GRADIENT_BOUND
    return errors


def _assert_within_bounds(found: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(found):
        beyond = {name: error for name, error in errors.items() if not error <= 1 and "k_proj.bias" not in name}
        assert not beyond, f"rank {rank}"


@pytest.mark.parametrize(
    ("kind", "load_balancer"),
    alternating_first(["packed", "left", "right", "", "shifted"], ["headtail", None]),
)
def test_every_mask_and_load_balancer_matches_one_process(two_ranks: RankPool, load_balancer: Any, kind: str) -> None:
    _assert_within_bounds(two_ranks.run(_compare, "Qwen3ForCausalLM", {"cp": 2}, kind, load_balancer))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    alternating_first(["LlamaForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"], ["", "left"]),
)
def test_grouped_heads_sliding_windows_and_a_vision_language_models_text(
    two_ranks: RankPool, architecture: str, kind: str
) -> None:
    options = {"model": {"num_key_value_heads": 2}}
    _assert_within_bounds(two_ranks.run(_compare, architecture, {"cp": 2}, kind, **options))


@pytest.mark.parametrize(
    ("case", "kind"),
    alternating_first(
        [
            ({"cp": 4}, {}),
            ({"dp_replicate": 2, "cp": 2}, {"activation_checkpointing": "block"}),
            ({"cp": 2, "tp": 2}, {"sequence_parallel": True}),
        ],
        ["", "right"],
    )
    + [
        pytest.param((axes, {}), kind, marks=pytest.mark.slow)
        for axes in ({"cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2})
        for kind in ("", "right")
    ],
    ids=str,
)
def test_context_parallelism_composes_with_every_other_axis(four_ranks: RankPool, case: Any, kind: str) -> None:
    axes, options = case
    _assert_within_bounds(four_ranks.run(_compare, "Qwen3ForCausalLM", axes, kind, **options))


def _mixtures() -> list[dict[str, float]]:
    shapes = ({"cp": 2, "tp": 2, "ep": 4}, {"dp_shard": 2, "cp": 2, "ep": 2})
    return [_compare("Qwen3MoeForCausalLM", axes, "") for axes in shapes]


def test_experts_get_the_tokens_of_every_part_of_a_sequence(four_ranks: RankPool) -> None:
    for found in zip(*four_ranks.run(_mixtures), strict=True):
        _assert_within_bounds(list(found))


def _communication() -> dict[str, int]:
    # Without the comparison of the first forwards' inputs, which is one all-gather more.
    unchecked = (CheckInputs("never"),)
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh_for({"cp": 2}), plan=None, steps=unchecked)
    layout = sequence_layout(mesh_for({"cp": 2}), LENGTH)
    local = layout.shard_batch(_inputs(model, ""))
    del local["position_ids"]
    with RecordCollectives() as communication:
        model(**local).logits.sum().backward()
    return dict(communication.counts())


def test_a_layer_takes_one_gather_forward_and_one_scatter_backward(two_ranks: RankPool) -> None:
    # Two layers; beside them FSDP2 gathers the root and both blocks, the first one twice, and scatters all three.
    assert two_ranks.run(_communication)[0] == {"all_gather": 2 + 4, "reduce_scatter": 2 + 3}


#: Cases of the ways that do not gather, on two and on four ranks: architecture, mesh, kind of row, balancer, options.
OVER_TWO: list[tuple[str, dict[str, int], str, Any, dict[str, Any]]] = [
    ("Qwen3ForCausalLM", {"cp": 2}, "left", "headtail", {"context_parallel": "ring"}),
    ("Qwen3ForCausalLM", {"cp": 2}, "packed", None, {"context_parallel": "ulysses", "model": ONE_KV_HEAD}),
    ("Gemma3ForCausalLM", {"cp": 2}, "packed", None, {"context_parallel": "ring", "activation_checkpointing": "block"}),
    ("Gemma3ForCausalLM", {"cp": 2}, "right", "headtail", {"context_parallel": "ulysses"}),
]
OVER_FOUR: list[tuple[str, dict[str, int], str, Any, dict[str, Any]]] = [
    ("Qwen3ForCausalLM", {"cp": 4}, "packed", "headtail", {"context_parallel": "ring", "model": TWO_KV_HEADS}),
    ("Qwen3ForCausalLM", {"cp": 4}, "", None, {"context_parallel": "ulysses", "model": TWO_KV_HEADS}),
    ("Qwen3ForCausalLM", {"cp": 2, "tp": 2}, "", "headtail", {"context_parallel": "ring", "sequence_parallel": True}),
    (
        "Qwen3ForCausalLM",
        {"cp": 2, "tp": 2},
        "packed",
        None,
        {"context_parallel": "ulysses", "sequence_parallel": True},
    ),
    ("Qwen3MoeForCausalLM", {"dp_shard": 2, "cp": 2, "ep": 2}, "shifted", "headtail", {"context_parallel": "ring"}),
    (
        "Qwen3MoeForCausalLM",
        {"dp_shard": 2, "cp": 2, "ep": 2},
        "",
        None,
        {"context_parallel": "ulysses", "activation_checkpointing": "block"},
    ),
]
#: A ring over the world, heads for sequence next to tensor parallelism, and a ring next to experts; all are slow.
SOME_AND_ALL = [[OVER_FOUR[0], *OVER_FOUR[3:5]], pytest.param(OVER_FOUR, marks=pytest.mark.slow)]


def _compare_all(cases: list[Any]) -> list[dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "TILE", 3)  # several tiles in a chunk
        return [_compare(*positional, **options) for *positional, options in cases]


def test_heads_for_sequence_and_rings_match_one_process(two_ranks: RankPool) -> None:
    for found in zip(*two_ranks.run(_compare_all, OVER_TWO), strict=True):
        _assert_within_bounds(list(found))


@pytest.mark.parametrize("cases", SOME_AND_ALL, ids=["some", "all"])
def test_heads_for_sequence_and_rings_compose_with_every_other_axis(four_ranks: RankPool, cases: list[Any]) -> None:
    for found in zip(*four_ranks.run(_compare_all, cases), strict=True):
        _assert_within_bounds(list(found))


#: Packed rows to 1e-12: windows, chunks, sinks, soft caps, latent attention, next to mixers that are no attention.
PACKED_WAYS = [("ulysses", "granite_swa"), ("ring", "gemma3_text")]
MORE_PACKED_WAYS = [
    ("ulysses", "llama4_text"),
    ("ring", "deepseek_v3"),
    ("ring", "llama4_text"),
    ("ring", "qwen3_next"),
    ("ulysses", "vaultgemma"),
]


def _packed_ways(cases: list[tuple[str, str]], fault: str = "") -> dict[str, float]:
    """The largest error of each case on this rank, with a fault planted in masks or without."""
    found = {}
    for way, name in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masks, "TILE", 4)
            if fault:
                patch.setattr(SequenceMask, *FAULTS[fault])
            found[f"{name}, {way}"] = max(measure_packing_on_ranks(name, {"cp": 2}, context_parallel=way).values())
    return found


def _all_packed_ways() -> list[dict[str, float]]:
    planted = [_packed_ways([("ring", "gemma3_text")], fault) for fault in FAULTS]
    return [_packed_ways(PACKED_WAYS), *planted]


def test_packed_rows_are_exact_in_every_way_and_planted_faults_are_found(two_ranks: RankPool) -> None:
    rights, *planted = zip(*two_ranks.run(_all_packed_ways), strict=True)
    for right in rights:
        assert {case: error for case, error in right.items() if not error <= PACKED_BOUND} == {}
    for fault, found in zip(FAULTS, planted, strict=True):
        assert max(max(each.values()) for each in found) > 1e-6, fault


def _logprobs() -> float:
    """Log-probabilities of the next tokens, with targets shifted in the whole sequence and cut like the inputs."""
    mesh = mesh_for({"cp": 2, "tp": 2})
    reference = tiny_model("Qwen3ForCausalLM")
    ids = _inputs(reference, "")["input_ids"]
    targets = rl_logprobs.next_token_targets(ids)
    expected = rl_logprobs.token_logprobs(reference(input_ids=ids, use_cache=False).logits, targets)
    model = parallelize(copy.deepcopy(reference), mesh, sequence_parallel=True)
    layout, group = sequence_layout(mesh, LENGTH), mesh.get_group("cp")
    logits = model(**layout.shard_batch({"input_ids": ids})).logits
    own = rl_logprobs.token_logprobs(logits, layout.shard(targets))
    assert torch.equal(layout.shard(targets), rl_logprobs.sequence_shard(targets, layout.permutation, group))
    gathered = rl_logprobs.gather_sequence(own, layout.permutation, group)
    return (gathered - expected).abs().max().item()


def test_logprobs_of_a_sharded_sequence_equal_those_of_the_full_sequence(four_ranks: RankPool) -> None:
    assert max(four_ranks.run(_logprobs)) < OUTPUT_BOUND


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_both_packages_use_the_same_permutation(ranks: int) -> None:
    layout = SequenceLayout(48, ranks, 0)
    expected = torch.arange(48) if ranks == 1 else rl_logprobs.headtail_permutation(48, ranks)
    assert torch.equal(layout.permutation, expected)


#: Rows whose token mixers are not all attention by ``scaled_dot_product_attention``.
MIXERS = {"packed": ["glm_moe_dsa", "inkling2_text"]}
MORE_MIXERS = {
    "packed": ["deepseek_v4", "jamba", "llama4_text", "qwen3_next", "vaultgemma"],
    "one document": ["doge", "minimax", "granite_swa", "kimi_linear", "lfm2_moe", "qwen4_exp_text"],
}


@pytest.mark.slow
def test_packed_rows_are_exact_in_more_ways(two_ranks: RankPool) -> None:
    for right in two_ranks.run(_packed_ways, MORE_PACKED_WAYS):
        assert {case: error for case, error in right.items() if not error <= PACKED_BOUND} == {}


def _mixer_errors(names: list[str], kind: str) -> dict[str, dict[str, float]]:
    """Errors beyond the bound of packed rows, or of rows of one document, on this rank."""
    rows = ROWS if kind == "packed" else ((LENGTH_OF_ROWS,),) * 2
    found = {name: measure_packing_on_ranks(name, {"cp": 2}, rows=rows) for name in names}
    return {n: beyond for n, e in found.items() if (beyond := {k: v for k, v in e.items() if not v <= PACKED_BOUND})}


@pytest.mark.parametrize(
    ("kind", "names"),
    [*MIXERS.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_MIXERS.items())],
)
def test_every_kind_of_token_mixer_spans_the_full_sequence(two_ranks: RankPool, kind: str, names: list[str]) -> None:
    assert two_ranks.run(_mixer_errors, names, kind) == [{}, {}]


#: Rows whose attention does not use ``transformers.AttentionInterface``: by its mask, a bias, a mask of keys only.
OWN_ATTENTION = ["falcon", "gpt_neo", "openai-gpt"]
ALL_OWN_ATTENTION = [*OWN_ATTENTION, "gpt_neox_japanese", "mpt", "bloom", "codegen", "gptj", "xglm"]
#: Every way where a mask could be of another kind, as options.
WAYS_OF_OWN_ATTENTION: list[dict[str, Any]] = [
    {"rows": ROWS},
    {**CONTIGUOUS, "rows": ((LENGTH_OF_ROWS,),) * 2},
    {"rows": ((LENGTH_OF_ROWS,),) * 2},
    {**CONTIGUOUS, "rows": ROWS},
    {"context_parallel": "ulysses"},
    {"context_parallel": "ring"},
]


def _own_attention_errors(names: list[str], ways: list[dict[str, Any]]) -> dict[str, float]:
    """The errors beyond the bound of each row and way, on this rank."""
    errors = {f"{n}, {way}": measure_packing_on_ranks(n, {"cp": 2}, plan=None, **way) for n in names for way in ways}
    return {case: max(each.values()) for case, each in errors.items() if not max(each.values()) <= PACKED_BOUND}


def test_attention_of_the_models_own_code_gets_masks_of_the_full_sequence(two_ranks: RankPool) -> None:
    assert two_ranks.run(_own_attention_errors, OWN_ATTENTION, WAYS_OF_OWN_ATTENTION[:1]) == [{}, {}]


@pytest.mark.slow
def test_all_attention_of_models_own_code_gets_masks_in_every_way(two_ranks: RankPool) -> None:
    assert two_ranks.run(_own_attention_errors, ALL_OWN_ATTENTION, WAYS_OF_OWN_ATTENTION, timeout=600) == [{}, {}]


def _padded_errors(names: list[str]) -> dict[str, float]:
    """The largest error of the logits of tokens that are no padding, on this rank, without models that are refused."""
    mesh, found = mesh_for({"cp": 2}), {}
    ids = torch.randint(3, 131, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids).index_fill(1, torch.arange(3), 0)
    mask[1] = mask[1].flip(0)
    layout = sequence_layout(mesh, LENGTH)
    for name in names:
        entry = coverage_entries()[name]
        model = tiny_row(entry)
        with torch.no_grad(), default_dtype(torch.float64 if entry.default_float64 else torch.float32):
            expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            if not bool(expected[mask.bool()].isfinite().all()):  # eager attention without any key to see
                continue
            try:
                parallelize(model, mesh, plan=None)
                local = {"input_ids": layout.shard(ids), "attention_mask": layout.shard(mask)}
                logits = model(**local, use_cache=False).logits
            except (ModelError, LayoutError):  # not over cp, or not without position ids
                continue
        real = layout.shard(mask).bool()
        found[name] = (logits - layout.shard(expected))[real].abs().max().item()
    return found


#: Three whose mixers get the mask by name, one by its place, and a model that pads token ids with it.
PADDED = ["jamba", "qwen3_next", "openai-gpt", "zaya", "qwen4_exp_text"]


def test_padding_reaches_mixers_on_full_sequences(two_ranks: RankPool) -> None:
    for errors in two_ranks.run(_padded_errors, PADDED):
        assert errors.keys() == set(PADDED)
        assert max(errors.values()) < OUTPUT_BOUND


@pytest.mark.slow
def test_padding_is_the_same_over_the_ranks_for_every_architecture(two_ranks: RankPool) -> None:
    names = [name for name in coverage_entries() if name not in UNBUILDABLE and "classifier" not in name]
    for errors in two_ranks.run(_padded_errors, names, timeout=600):
        assert len(errors) > len(names) / 2
        assert {name: error for name, error in errors.items() if not error < OUTPUT_BOUND} == {}
