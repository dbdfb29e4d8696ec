"""Adapters of a model on meta: initialised independently of the mesh, or read from peft's folder."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import (
    ModelError,
    OptionError,
    init_adapters,
    load_adapter,
    load_weights,
    meta_device,
    parallelize,
    save_adapter,
    stream_weights,
)
from fsdp_runtime.errors import CheckpointError, MismatchError, WeightsError
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint
from harness.models import tiny_config, tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

#: The module, whose name in its package is that of its function.
adapters: Any = importlib.import_module("fsdp_runtime.weights.load_adapter")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MESHES = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})
#: The number of a mesh, and ``init_lora_weights``: both axes at once, and each other way of drawing on one.
DEFAULT = {(0, False), (1, "gaussian"), (2, True)}


def _with_alpha(alpha: int) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["0"], lora_alpha=alpha)
    model: Any = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(alpha)
    return model


def test_a_save_that_stops_leaves_no_weights_beside_the_config_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a killed process does; the tensors of both adapters have the same names and shapes."""
    replace = Path.replace
    for count in range(3):
        folder, left = tmp_path / str(count), [2]
        save_adapter(_with_alpha(4), folder)
        left[0] = count

        def stops(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", stops)
        with nullcontext() if count == 2 else pytest.raises(KeyboardInterrupt):
            save_adapter(_with_alpha(8), folder)
        monkeypatch.setattr(Path, "replace", replace)
        if (folder / "adapter_model.safetensors").exists():
            saved = load_file(folder / "adapter_model.safetensors").values()
            config = json.loads((folder / "adapter_config.json").read_text())
            assert {value for each in saved for value in each.flatten().tolist()} == {config["lora_alpha"]}
        else:
            assert count < 2


def _on_meta(**options: Any) -> Any:
    import transformers

    with meta_device():
        base = transformers.Qwen3ForCausalLM(tiny_config("Qwen3ForCausalLM"))
        return peft.get_peft_model(base, peft.LoraConfig(**{"r": 3, "target_modules": LINEAR, **options})).eval()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _adapters(model: Any) -> dict[str, Tensor]:
    return {name: _full(p.detach()).clone() for name, p in model.named_parameters() if "lora_" in name}


def _initialised(folder: Path, axes: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, Tensor]:
    model = parallelize(_on_meta(**options), mesh_for(axes))
    init_adapters(model, seed=3)
    before = _adapters(model)
    load_weights(model, folder)
    after = _adapters(model)
    assert not any(tensor.is_meta for tensor in model.parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)
    return after


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("Qwen3ForCausalLM", dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("axes", "how"),
    [
        pytest.param(axes, how, marks=[] if (number, how) in DEFAULT else [pytest.mark.slow])
        for number, axes in enumerate(MESHES)
        for how in (True, False, "gaussian")
        if how is True or len(axes) == 1
    ],
    ids=str,
)
def test_initial_values_are_the_same_on_every_mesh(
    two_ranks: RankPool, four_ranks: RankPool, base: Path, axes: dict[str, int], how: bool | str
) -> None:
    options = {"init_lora_weights": how}
    pool = four_ranks if len(axes) > 1 else two_ranks
    alone = _on_meta(**options)
    init_adapters(alone, seed=3)
    expected = _adapters(alone)
    for found in pool.run(_initialised, base, axes, options):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_initial_values_have_the_distribution_that_peft_draws() -> None:
    model = _on_meta(r=8)
    init_adapters(model)
    for name, value in _adapters(model).items():
        if "lora_B" in name:
            assert not value.any()
        else:
            bound = 1 / math.sqrt(value.shape[1])  # kaiming_uniform_ with a = sqrt(5)
            assert value.abs().max() <= bound
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    values = _adapters(model)
    assert len({round(float(value.sum()), 6) for name, value in values.items() if "lora_A" in name}) == len(values) // 2


def test_another_seed_gives_other_values() -> None:
    drawn = []
    for seed in (0, 0, 1):
        model = _on_meta()
        init_adapters(model, seed=seed)
        drawn.append(next(iter(_adapters(model).values())))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def _saved_by_peft(base: Path, folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped: Any = peft.get_peft_model(model, peft.LoraConfig(**{"r": 3, "target_modules": LINEAR, **options})).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    wrapped.save_pretrained(folder)
    return wrapped


def _loaded(base: Path, folder: Path, axes: Mapping[str, int], again: Path) -> tuple[dict[str, Tensor], Tensor]:
    model = parallelize(_on_meta(), mesh_for(axes))
    load_adapter(model, folder)
    load_weights(model, base)
    with torch.no_grad():
        logits = _full(model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits)
    save_adapter(model, again)
    return _adapters(model), logits


@pytest.mark.parametrize(
    "axes", [MESHES[-1], *(pytest.param(axes, marks=pytest.mark.slow) for axes in MESHES[:-1])], ids=str
)
def test_a_folder_of_peft_loads_into_a_sharded_model(
    two_ranks: RankPool, four_ranks: RankPool, base: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    reference = _saved_by_peft(base, tmp_path / "peft")
    with torch.no_grad():
        expected = reference(**tiny_inputs(reference, batch=2, length=5), use_cache=False).logits
    pool = four_ranks if len(axes) > 1 else two_ranks
    for adapters, logits in pool.run(_loaded, base, tmp_path / "peft", axes, tmp_path / "again"):
        assert all(torch.equal(value, adapters[name]) for name, value in _adapters(reference).items())
        assert torch.allclose(logits, expected, atol=1e-5)
    first, second = (load_file(tmp_path / run / "adapter_model.safetensors") for run in ("peft", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_folder_that_does_not_fit_is_refused_with_every_difference(base: Path, tmp_path: Path) -> None:
    _saved_by_peft(base, tmp_path, r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = _on_meta(target_modules=["q_proj", "o_proj"])
    with pytest.raises(MismatchError) as caught:
        load_adapter(model, tmp_path)
    for words in ("lora_alpha=16 was saved, the model has 8", "v_proj", "o_proj", "missing", "shape (4, 64) was saved"):
        assert words in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_damaged_folders_are_refused(base: Path, tmp_path: Path) -> None:
    _saved_by_peft(base, tmp_path)
    model = _on_meta()
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a config of peft"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        load_adapter(model, tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        load_adapter(model, tmp_path)


def _truncate(file: Path) -> None:
    os.truncate(file, 200)


def _overwrite(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


def _loaded_while_written_to(folder: Path, harm: Callable[[Path], None]) -> str:
    """Return the error where another process changes the file once it has been opened."""
    model = parallelize(_on_meta(), mesh_for({"dp_shard": 2}))
    materialize = adapters._materialize

    def harmed(*arguments: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            harm(folder / "adapter_model.safetensors")
        dist.barrier()
        materialize(*arguments)

    adapters._materialize = harmed
    try:
        with pytest.raises(WeightsError) as refusal:
            load_adapter(model, folder)
    finally:
        adapters._materialize = materialize
    dist.barrier()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("harm", "told"), [(_truncate, "truncated or corrupt"), (_overwrite, "was written to while it was loaded")]
)
def test_a_file_that_is_written_to_while_it_is_read_is_refused_on_every_rank(
    two_ranks: RankPool, base: Path, tmp_path: Path, harm: Callable[[Path], None], told: str
) -> None:
    _saved_by_peft(base, tmp_path)
    assert all(told in message for message in two_ranks.run(_loaded_while_written_to, tmp_path, harm))


def _loaded_while_replaced(folder: Path, times: int) -> dict[str, Tensor] | str:
    """The first rank opens an older file than the second one, some times."""
    model = parallelize(_on_meta(), mesh_for({"dp_shard": 2}))
    original, opened = HubCheckpoint.__init__, []

    def replaced(self: HubCheckpoint, given: Path) -> None:
        opened.append(given)
        is_old = dist.get_rank() == 0 and len(opened) <= times
        original(self, given.parent / "old" / given.name if is_old else given)

    HubCheckpoint.__init__ = replaced  # type: ignore[assignment,method-assign]
    try:
        load_adapter(model, folder)
    except WeightsError as error:
        dist.barrier()
        return str(error)
    finally:
        HubCheckpoint.__init__ = original  # type: ignore[method-assign]
    return _adapters(model)


def test_ranks_load_one_adapter_though_it_is_replaced_meanwhile(
    two_ranks: RankPool, base: Path, tmp_path: Path
) -> None:
    reference = _adapters(_saved_by_peft(base, tmp_path))
    (tmp_path / "old").mkdir()
    older = {name: value + 1 for name, value in load_file(tmp_path / "adapter_model.safetensors").items()}
    save_file(older, tmp_path / "old" / "adapter_model.safetensors")
    for found in two_ranks.run(_loaded_while_replaced, tmp_path, 1):
        assert all(torch.equal(value, found[name]) for name, value in reference.items())
    for message in two_ranks.run(_loaded_while_replaced, tmp_path, 99):
        assert "is not the same checkpoint on every rank" in message


def test_what_has_no_such_adapter_is_refused(base: Path) -> None:
    with pytest.raises(OptionError, match="no adapter 'other'"):
        init_adapters(_on_meta(), adapter="other")
    with pytest.raises(OptionError, match="no adapter 'default'"):
        init_adapters(tiny_model("Qwen3ForCausalLM"))
    model = _on_meta()
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(OptionError, match="pissa"):
        init_adapters(model)
    with pytest.raises(ModelError, match="call init_adapters or load_adapter first"):
        load_weights(_on_meta(), base)


class _WithValues(nn.Module):
    """A language model, and a value head that the adapter trains in full."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.values = nn.Sequential(nn.Linear(policy.config.hidden_size, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found = self.policy(ids, output_hidden_states=True, use_cache=False)
        values: Tensor = self.values(found.hidden_states[-1])
        return values


def _with_values(seed: int) -> Any:
    model = _WithValues(tiny_model("Qwen3ForCausalLM", dtype=torch.float32))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["values"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or ".values." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return adapted


def _save_values(folder: Path) -> tuple[list[str], set[str]]:
    """Return what is loaded otherwise than it was saved, and the names of the value head in the weights."""
    single = _with_values(0)
    save_adapter(parallelize(_with_values(0), mesh_for({"dp_shard": 2}), plan=None), folder)
    model = parallelize(_with_values(1), mesh_for({"tp": 2}), sequence_parallel=True)
    load_adapter(model, folder)
    trained = {name: value for name, value in single.named_parameters() if value.requires_grad}
    own = dict(model.named_parameters())
    ids = torch.randint(3, 20, (2, 5), generator=torch.Generator().manual_seed(0))
    same = torch.allclose(model(ids), single(ids), atol=1e-4)  # float32
    wrong = [name for name, value in trained.items() if not torch.equal(_full(own[name].detach()), value)]
    streamed = {name: value for name, value in stream_weights(model) if name.startswith("values")}
    copies = single.base_model.model.values.modules_to_save["default"].state_dict()
    exported = all(torch.equal(streamed[f"values.{name}"], value) for name, value in copies.items())
    return [*wrong, *([] if same else ["values"]), *([] if exported else ["export"])], {*streamed}


def test_modules_that_an_adapter_trains_in_full_are_saved_loaded_and_exported(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    names = {f"values.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    for found in two_ranks.run(_save_values, tmp_path):
        assert found == ([], names)
    single = _with_values(0)
    theirs = peft.get_peft_model_state_dict(single)
    ours = load_file(tmp_path / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    factors_alone = peft.LoraConfig(r=2, target_modules=["q_proj"])
    other = peft.get_peft_model(_WithValues(tiny_model("Qwen3ForCausalLM")), factors_alone)
    with pytest.raises(MismatchError, match=r"values\.0\.weight: saved, and the model lacks it"):
        load_adapter(other, tmp_path)
