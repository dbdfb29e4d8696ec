"""The README's code runs as it stands there, on two ranks."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from harness import pages
from harness.models import tiny_model

README = Path(__file__).parents[2] / "README.md"
BLOCKS = pages.blocks(README, "python")


def eight_heads():
    return tiny_model("LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=8)


def run_all(blocks):
    namespace = {"model": eight_heads()}
    pages.run(blocks[:1], namespace)
    logits = namespace["model"](torch.tensor([[3, 4, 5]]), use_cache=False).logits
    namespace["model"] = eight_heads()  # the other sections look at a model that nothing was applied to
    return isinstance(logits, DTensor), list(logits.shape), pages.run(blocks[1:], namespace)


def test_every_block_of_the_readme_runs(two_ranks, capsys):
    assert len(BLOCKS) == 7
    assert two_ranks.run(run_all, BLOCKS) == [(True, [1, 3, 131], [])] * 2


@pytest.mark.parametrize(
    "name",
    [
        *("plan_for", "check", "override", "with_prefix", "to_torch"),
        *("explain", "suggest", "rowwise=False", "legal_tp"),
    ],
)
def test_the_readme_names_what_a_user_needs(name):
    assert name in README.read_text()
