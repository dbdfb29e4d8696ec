"""Expert parallelism of every mixture against one process, and deliberate errors in it that are found and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from coverage.expert_parallel import MESHES, measure_experts, mixtures
from harness import mutants
from harness.parity import Case, RankReport, assert_parity, compare
from harness.ranks import RankPool

#: Rows that each stand for a form of mixture.
ROWS = [
    "deepseek_v3",  # dense blocks before, shared experts, a bias that only chooses
    "gemma4_text",  # experts beside an MLP, called by the block
    "inkling2_text",  # float32 parts, a plan whose router is stored split
    "llama4_text",  # every expert gets every token
    "longcat_flash",  # indices that stand for the identity, rows that belong to no expert
    "mixtral, batched",  # another implementation of the experts
    "nemotron_h",  # experts without a gate in some blocks
    "qwen3_5_moe_text",  # a shared expert behind a gate
]
#: All others with stacked experts; `nox -s slow` runs all rows on all meshes.
OTHERS = """
    afmoe, aria_text, axk1, axk2, bailing_hybrid, beam, cohere2_moe, deepseek_v2, deepseek_v32, deepseek_v4, dots1,
    dots3_note, dots3_note_text, ernie4_5_moe, exaone_moe, flex_olmo, flint, gemma4, glm4_moe, glm4_moe_lite,
    glm_moe_dsa, gpt_oss, granitemoe, granitemoe_swa, granitemoehybrid, granitemoeshared, hunyuan_v1_moe, hy_v3, hy_v4,
    inkling2_loop_text, inkling_text, jamba, kimi_linear, kolibri1, laguna, lara_mini, lfm2_moe, llama4, mellum,
    mimo_v2_flash, minimax, minimax_m2, minimax_m3_vl_text, mixtral, olmoe, phimoe, qwen2_moe, qwen3_5_moe, qwen3_moe,
    qwen3_next, qwen4_exp, qwen4_exp_text, sarvam_mla, sarvam_moe, solar_open
"""
VARIANTS = ["deepseek_v3, whole queries", "gemma4_text, keys as values", "qwen3_5_moe, vision"]
NAMES = [*ROWS, *(name.strip() for name in OTHERS.split(",")), *VARIANTS]


@pytest.mark.slow
def test_every_row_with_stacked_experts_is_listed() -> None:
    assert sorted(NAMES) == sorted(mixtures())


def _assert_equal(four_ranks: RankPool, name: str, meshes: Sequence[Mapping[str, int]]) -> None:
    for axes, *reports in zip(meshes, *four_ranks.run(measure_experts, name, meshes), strict=True):
        try:
            assert_parity(reports)
        except AssertionError as error:
            raise AssertionError(f"{dict(axes)}: {error}") from None


#: Rows whose code the others have too, or that other tests of experts run.
SLOW = ("deepseek_v3", "llama4_text", "longcat_flash", "mixtral, batched", "nemotron_h", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    ("number", "name"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[1] in SLOW else []) for each in enumerate(ROWS)],
)
def test_every_form_of_mixture_equals_one_process_on_one_of_the_meshes(
    four_ranks: RankPool, number: int, name: str
) -> None:
    _assert_equal(four_ranks, name, [MESHES[number % len(MESHES)]])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_mixture_equals_one_process_on_every_mesh(four_ranks: RankPool, name: str) -> None:
    _assert_equal(four_ranks, name, MESHES)


PLANTED = {
    mutants.detached_router: r"gradient of model\.layers\.1\.mlp\.gate\.weight",
    mutants.dropped_token: r"rank 0: output off by",
    mutants.token_counted_twice: r"gradient of model\.layers\.0\.mlp\.experts\.gate_up_proj",
    mutants.undivided_experts: r"gradient of model\.layers\.0\.mlp\.experts\.down_proj off by 1\.00e\+00",
    mutants.expert_without_gradient: r"rank 1: gradient of model\.layers\.1\.mlp\.experts\.down_proj off by inf",
}


def _planted() -> list[RankReport]:
    return [compare(Case("Qwen3MoeForCausalLM", {"dp_shard": 2, "tp": 2, "ep": 4}, mutant)) for mutant in PLANTED]


def test_planted_errors_are_found_and_named(four_ranks: RankPool) -> None:
    for (mutant, named), *reports in zip(PLANTED.items(), *four_ranks.run(_planted), strict=True):
        with pytest.raises(AssertionError, match=named):
            assert_parity(reports)
        assert mutant.__doc__
