"""What the README shows runs as it stands there, section after section, on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import pages
from harness.models import tiny_model
from harness.ranks import RankPool

README = Path(__file__).parents[1] / "README.md"


def _run(checkpoint: str, compiler: bool) -> dict[str, Any]:
    names: dict[str, Any] = {"path": checkpoint}
    with torch._dynamo.config.patch(disable=not compiler):
        faults = pages.run(pages.blocks(README, "python"), names)
    gradients = [parameter.grad for parameter in names["model"].parameters()]
    return {
        "faults": faults,
        "gradients": all(gradient is not None for gradient in gradients),
        "freed": names["freed"].total,
        "logits": tuple(names["logits"].shape),
        "targets": tuple(names["targets"].shape),
        "data_parallel": names["data_parallel"].size(),
        "resumed": (names["state"].step, names["state"].rng_restored),
        "received": list(names["received"]) == [weight.name for weight in names["described"]],
        "merged": names["merged"].keys() == names["received"].keys(),
    }


# Most of the time goes to compiling the blocks anew for each section; test_parallelize compiles them once.
@pytest.mark.parametrize("compiler", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_the_sections_run_one_after_another(four_ranks: RankPool, tmp_path: Path, compiler: bool) -> None:
    tiny_model("Qwen3ForCausalLM", num_hidden_layers=1).float().save_pretrained(tmp_path)
    for found in four_ranks.run(_run, str(tmp_path), compiler):
        assert found == {
            "faults": [],
            "gradients": True,
            "freed": 0,  # on the CPU, as the README says
            "logits": (2, 16, 131),
            "targets": (2, 16),
            "data_parallel": 2,
            "resumed": (1, True),
            "received": True,
            "merged": True,
        }
