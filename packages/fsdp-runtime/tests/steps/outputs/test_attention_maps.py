"""Attention maps are refused over ``tp`` and ``cp``."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_runtime import LayoutError, MeshSpec, parallelize
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from harness.models import tiny_inputs, tiny_model


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("by_config", [False, True])
def test_attention_maps_are_refused(axis: str, by_config: bool) -> None:
    with fake_world(MeshSpec(**{axis: 2}), rank=0) as mesh:
        model: Any = tiny_model("LlamaForCausalLM", num_hidden_layers=1)
        model.set_attn_implementation("eager")
        model.config.output_attentions = by_config
        parallelize(model, mesh)
        asked = {} if by_config else {"output_attentions": True}
        with pytest.raises(LayoutError, match=f"a rank of {axis} computes a part of each attention map"):
            model(**tiny_inputs(model, batch=2, length=4), use_cache=False, **asked)
