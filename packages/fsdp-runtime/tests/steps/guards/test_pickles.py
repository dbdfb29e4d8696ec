"""Pickles and ``save_pretrained`` of parallelized models: one typed error on every rank; copies still work."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import ModelError, offload, onload, parallelize
from fsdp_runtime.weights import load_weights, save_weights
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

MESHES = ({"tp": 2}, {"dp_shard": 2})


def _assert_refused(model: nn.Module, directory: Path) -> None:
    for attempt in (
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save({"model": model}, io.BytesIO()),
        lambda: pickle.dumps(model.model.layers[0]),
    ):
        with pytest.raises(ModelError, match=r"cannot be pickled.*save_weights\(model, directory\).*state_dict"):
            attempt()
    for part in (model, model.model):
        with pytest.raises(ModelError, match=r"save_pretrained.*save_weights\(model, directory\)"):
            part.save_pretrained(directory)
    assert not directory.exists()


def _pickles(directory: Path) -> None:
    for axes in MESHES:
        model = parallelize(tiny_model("LlamaForCausalLM", dtype=torch.float32), mesh_for(axes))
        _assert_refused(model, directory / "none")
        torch.save(model.state_dict(), io.BytesIO())
        dist.barrier()  # the ranks are in step
        offload(model, device="cpu")
        with pytest.raises(ModelError, match="offloaded"):
            pickle.dumps(model)
        onload(model)
        _assert_refused(model, directory / "none")
        plain = tiny_model("LlamaForCausalLM", dtype=torch.float32, seed=9)
        full = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        if dist.get_rank() == 0:
            model.save_pretrained(directory / "full", state_dict=full)  # as trainers do that gather by themselves
            load_weights(tiny_model("LlamaForCausalLM", dtype=torch.float32), directory / "full")
        dist.barrier()
        save_weights(model, directory / "ours")


def _copies() -> None:
    model = parallelize(tiny_model("LlamaForCausalLM", dtype=torch.float32), mesh_for({"tp": 2}))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    again = copy.deepcopy(twin)
    inputs = tiny_inputs(model, batch=2, length=5)
    for each, is_zero in ((model, False), (twin, True), (again, True)):
        logits = each(**inputs, use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        assert (not logits.any()) == is_zero
        _assert_refused(each, Path("never-written"))
    assert all(rule.__self__ is module for module in twin.modules() if (rule := module.__dict__.get("__reduce_ex__")))


def test_every_rank_refuses_to_pickle_a_parallelized_model(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_pickles, tmp_path)


def test_deep_copies_are_models_of_their_own_and_refuse_too(two_ranks: RankPool) -> None:
    two_ranks.run(_copies)


def test_a_plain_model_can_be_pickled(tmp_path: Path) -> None:
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh_for({}))
    pickle.loads(pickle.dumps(model))
    model.save_pretrained(tmp_path)
