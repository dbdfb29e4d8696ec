"""Megatron-FSDP's arguments, on a stand-in for its module: the real one imports on the CPU but needs CUDA to run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import BackendError, MeshSpec, ModelError, OptionError, nemo
from fsdp_runtime.model import inspect_model
from fsdp_runtime.steps.fsdp.megatron_fsdp import resolve_megatron_fsdp
from harness.models import tiny_model
from harness.ranks import RankPool


class Wrapped(nn.Module):
    """What the stand-in returns; it keeps the keywords."""

    def __init__(self, module: nn.Module, keywords: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.keywords = module, keywords


def fully_shard_model(
    module: nn.Module,
    device_mesh: Any = None,
    dp_shard_dim: Any = None,
    dp_outer_dim: Any = None,
    tp_dim: Any = None,
    fsdp_unit_modules: Any = None,
    zero_dp_strategy: Any = 3,
    init_model_with_meta_device: Any = False,
    mixed_precision_policy: Any = None,
    overlap_grad_reduce: Any = True,
    overlap_param_gather: Any = True,
    report_nan_in_param_grad: Any = False,
    average_in_collective: Any = False,
    disable_bucketing: Any = False,
    calculate_per_token_loss: Any = False,
    keep_fp8_transpose_cache: Any = False,
    nccl_ub: Any = False,
    fsdp_double_buffer: Any = False,
) -> Wrapped:
    """The keywords that this package passes to megatron-fsdp 0.6.1, and some that it does not."""
    return Wrapped(module, dict(locals()))


def _stand_in() -> SimpleNamespace:
    return SimpleNamespace(
        __version__="0.6.1",
        MixedPrecisionPolicy=lambda **dtypes: dtypes,
        fully_shard_model=fully_shard_model,
        fully_shard_optimizer=lambda optimizer: ("sharded", optimizer),
    )


def _install() -> None:
    sys.modules["megatron_fsdp"] = _stand_in()  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True


def _translated(mesh: dict[str, int], **options: Any) -> dict[str, Any]:
    before = torch.cuda.is_available
    built = MeshSpec(**mesh).build(device_type="cpu")
    model = tiny_model("LlamaForCausalLM")
    optimizer = torch.optim.AdamW(model.parameters())
    _install()
    try:
        wrapped, sharded = nemo.nvfsdp_strategy_parallelize(model, built, optimizer, **options)
    finally:
        torch.cuda.is_available = before
        del sys.modules["megatron_fsdp"]
    if wrapped is model:
        return {"wrapped": False}
    found = wrapped.keywords
    assert found.pop("module") is model
    assert found.pop("device_mesh") is built
    assert sharded == ("sharded", optimizer)
    found["fsdp_unit_modules"] = [cls.__name__ for cls in found["fsdp_unit_modules"]]
    return found


def test_nvfsdps_arguments_become_megatrons(two_ranks: RankPool) -> None:
    assert two_ranks.run(_translated, {"dp_shard": 2})[0] == {
        "dp_shard_dim": "dp",
        "dp_outer_dim": None,
        "tp_dim": "tp",
        "fsdp_unit_modules": ["LlamaDecoderLayer"],
        "zero_dp_strategy": "optim_grads_params",
        "init_model_with_meta_device": False,
        "mixed_precision_policy": {
            "main_params_dtype": None,
            "main_grads_dtype": None,
            "grad_comm_dtype": None,
        },
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "report_nan_in_param_grad": True,
        "average_in_collective": False,
        "disable_bucketing": False,
        "calculate_per_token_loss": False,
        "keep_fp8_transpose_cache": False,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
    }


def test_renamed_arguments_keep_their_meaning(two_ranks: RankPool) -> None:
    found = two_ranks.run(
        _translated,
        {"dp_shard": 2},
        preserve_fp32_weights=True,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
        keep_fp8_transpose_cache_when_using_custom_fsdp=True,
        init_nvfsdp_with_meta_device=True,
        nvfsdp_unit_modules=["transformers.models.llama.modeling_llama.LlamaMLP"],
        data_parallel_sharding_strategy="optim",
    )[0]
    assert set(found["mixed_precision_policy"].values()) == {torch.float32}
    assert found["report_nan_in_param_grad"] is False
    assert found["keep_fp8_transpose_cache"] is True
    assert found["init_model_with_meta_device"] is True
    assert found["fsdp_unit_modules"] == ["LlamaMLP"]
    assert found["zero_dp_strategy"] == "optim"


def test_ranks_of_cp_hold_shards_too(two_ranks: RankPool) -> None:
    assert two_ranks.run(_translated, {"cp": 2}, dp_mesh_name="dp_shard")[0]["dp_shard_dim"] == "dp_cp"


def test_where_one_rank_holds_everything_nothing_is_wrapped(two_ranks: RankPool) -> None:
    assert two_ranks.run(_translated, {"tp": 2})[0] == {"wrapped": False}


def _shard(model: nn.Module, *, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    mesh = mesh or MeshSpec().build(device_type="cpu")
    resolved = resolve_megatron_fsdp(model, mesh, inspect_model(model), dp_shard_dim="dp_shard", **options)
    return resolved.apply(model)


def test_without_the_extra_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(BackendError, match=r"pip install 'fsdp-runtime\[megatron-fsdp\]', or use parallelize"):
        _shard(tiny_model("LlamaForCausalLM"))


def test_without_cuda_fsdp2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", _stand_in())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="needs a CUDA device and there is none: use parallelize"):
        _shard(tiny_model("LlamaForCausalLM"))


def test_units_that_do_not_occur_and_unknown_keywords_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", _stand_in())
    mesh = MeshSpec().build(device_type="cpu")  # before torch is told that there is a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="no module is of class Block: the model's blocks are of class LlamaDecoderLa"):
        _shard(tiny_model("LlamaForCausalLM"), mesh=mesh, unit_modules=["Block"])
    with pytest.raises(OptionError, match=r"megatron-fsdp 0\.6\.1 takes no grad_reduce_in_fp32: it takes module, "):
        _shard(tiny_model("LlamaForCausalLM"), mesh=mesh, options={"grad_reduce_in_fp32": True})
