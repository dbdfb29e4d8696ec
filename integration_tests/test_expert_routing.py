"""Routers under expert parallelism: ties, extremes, auxiliary losses, and balancing by a bias."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from coverage.shrink import VOCAB
from coverage.table import Entry, entries, tiny_model
from fsdp_runtime import parallelize, record_routes, submesh
from harness.float64 import compute_in_float64
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool

BATCH, LENGTH = 4, 7
#: Relative to the largest element; in float64 throughout.
BOUND = 1e-12
SHARED, OWN = {"dp_shard": 2, "tp": 2, "ep": 4}, {"dp_shard": 4, "ep": 4}
#: So large that the routers' gradients are mostly the auxiliary loss's.
COEFFICIENT = 30.0

#: One expert a token, whose weight is its score and not 1, so that the router learns.
ONE_CHOICE = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: each for path, each in model.named_modules() if path.endswith("mlp.gate")}


def _tied_scores(model: nn.Module) -> None:
    """Give all experts but the first the same score; ``topk`` decides among those of different ranks."""
    for router in _routers(model).values():
        router.weight.data[1:] = 0


def _one_expert_for_all(model: nn.Module) -> None:
    """Let every token choose one expert."""
    for router in _routers(model).values():
        router.e_score_correction_bias[1] = 100.0


def _unchanged(model: nn.Module) -> None:
    """Leave the routers as they are."""


def _ids() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def _loss(model: nn.Module, own: slice, ranks: int, coefficient: float) -> Tensor:
    """The loss of one data-parallel rank, whose mean over ranks is trained on."""
    options = {"output_router_logits": True} if coefficient else {}
    output = model(input_ids=_ids()[own], use_cache=False, **options)
    logits = output.logits.full_tensor() if hasattr(output.logits, "full_tensor") else output.logits
    weights = torch.randn(BATCH, *logits.shape[1:], dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
    loss = (logits * weights[own]).sum() * ranks
    return loss + coefficient * output.aux_loss if coefficient else loss


def _parts(ranks: int) -> list[slice]:
    share = BATCH // ranks
    return [slice(share * rank, share * (rank + 1)) for rank in range(ranks)]


def _expected(model: nn.Module, ranks: int, coefficient: float) -> dict[str, Tensor | None]:
    """The gradients of the mean over the ranks' own losses, in one process.

    An auxiliary loss is no mean over tokens: that of a whole batch is not the mean of its parts' losses.
    """
    model.zero_grad()
    for own in _parts(ranks):
        (_loss(model, own, ranks, coefficient) / ranks).backward()
    return {path: None if each.grad is None else each.grad.clone() for path, each in model.named_parameters()}


def _errors(
    entry: Entry, axes: dict[str, int], change: Callable[[nn.Module], None], coefficient: float
) -> tuple[dict[str, float], bool]:
    """Wrong gradients by name, and whether this rank's experts of the last block got no gradient but zeros."""
    mesh = mesh_for(axes)
    data = submesh(mesh, "dp")
    with compute_in_float64():
        reference = tiny_model(entry)
        change(reference)
        expected = _expected(reference, data.size(), coefficient)
        model = parallelize(copy.deepcopy(reference), mesh, activation_checkpointing="block")
        _loss(model, _parts(data.size())[data.get_local_rank()], data.size(), coefficient).backward()
    wrong = {path: error for path, error in gradient_errors(expected, model).items() if not error <= BOUND}
    stacks = [each.grad for path, each in model.named_parameters() if path.endswith("experts.down_proj")]
    return wrong, largest(stacks[-1].to_local()) == 0


MIXTRAL, QWEN, DEEPSEEK = (entries()[name] for name in ("mixtral", "qwen3_moe", "deepseek_v3"))
#: Name to model, mesh, what is done to its routers, and the coefficient of the auxiliary loss.
CASES: dict[str, tuple[Entry, dict[str, int], Callable[[nn.Module], None], float]] = {
    "auxiliary loss": (MIXTRAL, SHARED, _unchanged, COEFFICIENT),
    "auxiliary loss, no axis tp": (QWEN, OWN, _unchanged, COEFFICIENT),
    "ties": (QWEN, SHARED, _tied_scores, COEFFICIENT),
    "one expert": (Entry("", "deepseek_v3", "DeepseekV3ForCausalLM", ONE_CHOICE), SHARED, _one_expert_for_all, 0.0),
}


#: A loss of another architecture, on a mesh of other axes.
OTHER = "auxiliary loss, no axis tp"


def _all_errors(names: list[str]) -> dict[str, tuple[dict[str, float], bool]]:
    return {name: _errors(*CASES[name]) for name in names}


@pytest.mark.parametrize(
    "names",
    [[name for name in CASES if name != OTHER], pytest.param([OTHER], marks=pytest.mark.slow)],
    ids=["all axes", "other axes"],
)
def test_expert_gradients_equal_one_process_with_auxiliary_losses_and_ties(
    four_ranks: RankPool, names: list[str]
) -> None:
    ranks = four_ranks.run(_all_errors, names)
    assert [{name: wrong for name, (wrong, _) in found.items() if wrong} for found in ranks] == [{}] * 4
    if "one expert" in names:
        # A gradient of None would be an error above: ranks whose experts got no token have zeros.
        assert sum(found["one expert"][1] for found in ranks) == 3


def test_an_auxiliary_loss_of_all_tokens_is_not_the_mean_of_the_ranks_losses() -> None:
    model = tiny_model(MIXTRAL)
    parts, whole, without = (_expected(model, *case) for case in ((2, COEFFICIENT), (1, COEFFICIENT), (2, 0.0)))
    for router in _routers(model):
        for other in (whole, without):  # so the comparisons with ``parts`` can fail
            difference = largest(parts[f"{router}.weight"] - other[f"{router}.weight"])
            assert difference > 1e-3 * largest(parts[f"{router}.weight"])


def _balance(router: nn.Module, counts: Tensor) -> None:
    """Move the bias of experts with too few tokens up, and of those with too many down (arXiv:2408.15664)."""
    counts = counts.to(router.e_score_correction_bias.dtype)
    router.e_score_correction_bias += 0.05 * (counts.mean() - counts).sign()


def _counts(router: nn.Module, routes: Tensor) -> Tensor:
    return routes.flatten().long().bincount(minlength=len(router.e_score_correction_bias))


def _balanced() -> tuple[list[str], bool]:
    """Biases that differ from one process's after some updates, and whether this rank's own counts would do."""
    mesh = mesh_for(SHARED)
    data = submesh(mesh, "dp")
    wrong, own_would_do = [], True
    reference = tiny_model(DEEPSEEK)
    model = parallelize(copy.deepcopy(reference), mesh)
    for step in range(3):
        with record_routes(reference) as expected, torch.no_grad():
            reference(input_ids=_ids(), use_cache=False)
        with record_routes(model) as routes, torch.no_grad():
            model(input_ids=_ids()[_parts(data.size())[data.get_local_rank()]], use_cache=False)
        for path, router in _routers(reference).items():
            if path not in expected:
                continue
            candidate: Any = model.get_submodule(path)
            counts = _counts(candidate, routes[path])
            own_would_do &= torch.equal(counts * data.size(), _counts(router, expected[path]))
            dist.all_reduce(counts, group=data.get_group())
            _balance(router, _counts(router, expected[path]))
            _balance(candidate, counts)
            if not torch.equal(candidate.e_score_correction_bias, router.e_score_correction_bias):
                wrong.append(f"step {step}: {path}")
    return wrong, own_would_do


def test_a_bias_updated_from_the_summed_counts_of_recorded_routes_is_one_processs(four_ranks: RankPool) -> None:
    assert four_ranks.run(_balanced) == [([], False)] * 4
