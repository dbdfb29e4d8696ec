"""Loading: every rank gets its own shards bit for bit, reads nothing else, and damaged files change nothing."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime import FSDP2, MeshSpec, OptionError, WeightsError, parallelize, unsharded
from fsdp_runtime.errors import CheckpointError, MismatchError
from fsdp_runtime.model import state
from fsdp_runtime.weights import hub_checkpoint, load_weights, meta_device, save_weights, stream_weights
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint
from harness.memory import LiveBytes
from harness.models import ARCHITECTURES, tiny_config, tiny_model
from harness.pairwise import pairwise_first
from harness.parity import mesh_for, own_part
from harness.ranks import RankPool

TWO = ({"tp": 2}, {"dp_shard": 2})
FOUR = ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})


def _reference(architecture: str, **options: Any) -> nn.Module:
    return tiny_model(architecture, dtype=torch.float32, **options)


def _checkpoint(tmp_path: Path, architecture: str = "Qwen3ForCausalLM", **options: Any) -> Path:
    _reference(architecture, **options).save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


def _single_file(tmp_path: Path, architecture: str = "Qwen3ForCausalLM", **options: Any) -> Path:
    _reference(architecture, **options).save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def _on_meta(architecture: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, architecture)(tiny_config(architecture, **options))
    return model


def _differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Names of tensors of which this rank holds anything but its part of the reference's."""
    wanted = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = sorted(wanted.keys() ^ found.keys())
    with torch.no_grad():
        for name, tensor in found.items():
            is_sharded = isinstance(tensor, DTensor)
            expected = own_part(wanted[name], tensor) if is_sharded else wanted[name]
            if not torch.equal(tensor.to_local() if is_sharded else tensor, expected):
                wrong.append(name)
    return wrong


def _load(architecture: str, axes: dict[str, int], path: Path, *, meta: bool, **options: Any) -> dict[str, Any]:
    model = _on_meta(architecture, **options) if meta else _reference(architecture, seed=9, **options)
    parallelize(model, mesh_for(axes))
    report = load_weights(model, path)
    return {
        "differences": _differences(model, _reference(architecture, **options)),
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "read": report.bytes_read,
        "shards": sum(_local(p).nbytes for p in model.parameters()),
    }


@pytest.mark.parametrize(
    ("architecture", "axes", "tied", "meta"),
    pairwise_first(ARCHITECTURES, [*TWO, *FOUR], [True, False], [True, False], limit=5),
    ids=str,
)
def test_every_rank_holds_its_shards_of_the_checkpoint(
    two_ranks: RankPool,
    four_ranks: RankPool,
    tmp_path: Path,
    architecture: str,
    axes: dict[str, int],
    tied: bool,
    meta: bool,
) -> None:
    path = _checkpoint(tmp_path, architecture, tied=tied)
    pool = two_ranks if axes in TWO else four_ranks
    results = pool.run(_load, architecture, axes, path, meta=meta, tied=tied)
    for result in results:
        assert result["differences"] == []
        assert result["tied"] is tied
        assert result["read"] == result["shards"]


def _load_while_replaced(path: Path, *, times: int) -> str:
    """The first rank finds other files than the second one, some times."""
    model = parallelize(_reference("Qwen3ForCausalLM", seed=9), mesh_for({"dp_shard": 2}))
    original, opened = HubCheckpoint.__init__, []

    def replaced(self: HubCheckpoint, given: Path) -> None:
        opened.append(given)
        is_old = dist.get_rank() == 0 and len(opened) <= times
        original(self, given / "old" if is_old else given / "new")

    HubCheckpoint.__init__ = replaced  # type: ignore[assignment,method-assign]
    try:
        load_weights(model, path)
    except WeightsError as error:
        dist.barrier()  # the ranks are still in step
        return str(error)
    finally:
        HubCheckpoint.__init__ = original  # type: ignore[method-assign]
    return str(_differences(model, _reference("Qwen3ForCausalLM", seed=1)))


def test_ranks_load_one_checkpoint_though_it_is_replaced_meanwhile(two_ranks: RankPool, tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        _reference("Qwen3ForCausalLM", seed=seed).save_pretrained(tmp_path / name)
    assert two_ranks.run(_load_while_replaced, tmp_path, times=2) == ["[]"] * 2
    for message in two_ranks.run(_load_while_replaced, tmp_path, times=10**6):
        assert "is not the same checkpoint on every rank, 5 times: another job saves to it" in message


def test_copies_of_one_checkpoint_on_two_hosts_are_accepted_and_other_bytes_are_not() -> None:
    file = ("model.safetensors", 10, b"header")
    one, other = ((*file, (1, 2)),), ((*file, (3, 4)),)
    assert hub_checkpoint._are_one([("a", one), ("a", one), ("b", other)])
    assert not hub_checkpoint._are_one([("a", one), ("a", other)])
    assert not hub_checkpoint._are_one([("a", one), ("b", (("model.safetensors", 11, b"header", (1, 2)),))])


def _peak_of_load(path: Path) -> tuple[int, int]:
    """Peak live bytes while a materialised model is loaded, and those of the largest tensor."""
    model = parallelize(_reference("Qwen3ForCausalLM", seed=9), mesh_for({"dp_shard": 2}))
    with LiveBytes() as live:
        load_weights(model, path)
    return live.peak, max(p.numel() * p.element_size() for p in model.parameters())


#: Bytes of the numbers by which ranks agree before a load: gloo's threads let go of them in their own time.
AGREEMENT = 512


def test_a_load_holds_no_more_than_one_tensor_in_addition_to_the_model(two_ranks: RankPool, tmp_path: Path) -> None:
    for peak, largest in two_ranks.run(_peak_of_load, _checkpoint(tmp_path)):
        assert 0 < peak <= largest + AGREEMENT  # safetensors maps a whole tensor and touches the pages of its slice


def test_a_plain_model_loads_without_distributed(tmp_path: Path) -> None:
    model = _on_meta("Gemma3ForConditionalGeneration", tied=True)
    load_weights(model, _checkpoint(tmp_path, "Gemma3ForConditionalGeneration", tied=True))
    assert _differences(model, _reference("Gemma3ForConditionalGeneration", tied=True)) == []


def test_values_are_converted_to_the_parameters_dtype(tmp_path: Path) -> None:
    model = _on_meta("Qwen3ForCausalLM").to(torch.bfloat16)
    load_weights(model, _single_file(tmp_path))
    expected = _reference("Qwen3ForCausalLM").to(torch.bfloat16)
    assert _differences(model, expected) == []


@pytest.mark.parametrize("form", ["one file", "several"])
def test_a_hub_id_loads_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    repository, commit = tmp_path / "models--someone--tiny", "0" * 40
    snapshot = repository / "snapshots" / commit
    (_single_file if form == "one file" else _checkpoint)(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = _on_meta("Qwen3ForCausalLM")
    load_weights(model, "someone/tiny")
    assert _differences(model, _reference("Qwen3ForCausalLM")) == []


def _loaded_while_gathered(path: Path) -> list[str]:
    model = parallelize(_reference("Qwen3ForCausalLM", seed=9), mesh_for({"dp_shard": 2}))
    with unsharded(model):
        load_weights(model, path)
    return _differences(model, _reference("Qwen3ForCausalLM"))


def test_gathered_parameters_do_not_survive_a_load(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(_loaded_while_gathered, _checkpoint(tmp_path)) == [[], []]


def _offloaded(path: Path) -> list[str]:
    model = parallelize(
        _on_meta("Qwen3ForCausalLM"), mesh_for({"dp_shard": 2}), fsdp=FSDP2(offload_policy=CPUOffloadPolicy())
    )
    load_weights(model, path)
    return _differences(model, _reference("Qwen3ForCausalLM"))


def test_offloaded_shards_load(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(_offloaded, _checkpoint(tmp_path)) == [[], []]


# Bad input: every rank says the same, and nothing has changed.


def _refusal(axes: dict[str, int], path: Path, *, strict: bool = False) -> str:
    messages = []
    for model in (_on_meta("Qwen3ForCausalLM"), _reference("Qwen3ForCausalLM", seed=9)):
        parallelize(model, mesh_for(axes))
        before = [(p.is_meta, None if p.is_meta else p.detach().clone()) for p in model.parameters()]
        with pytest.raises(WeightsError) as refusal:
            load_weights(model, path, strict=strict)
        for (was_meta, value), parameter in zip(before, model.parameters(), strict=True):
            assert parameter.is_meta == was_meta
            if value is not None:
                assert torch.equal(_local(value), _local(parameter)), "a refused load changed a parameter"
        messages.append(f"{type(refusal.value).__name__}: {refusal.value}")
    assert messages[0] == messages[1]
    return messages[0]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def _break_tensors(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize("axes", TWO, ids=["tp", "fsdp"])
def test_missing_and_misshapen_tensors_are_all_named_in_one_error(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int]
) -> None:
    file = _single_file(tmp_path)
    _rewrite(file, _break_tensors)
    messages = two_ranks.run(_refusal, axes, tmp_path)
    assert messages[0] == messages[1]
    for part in (
        "MismatchError: the checkpoint does not fit the model in 4 tensors",
        "model.norm.weight: missing; the model has shape (64,)",
        f"lm_head.weight: shape (130, 64) in {file}, (131, 64) in the model",
        f"model.layers.0.mlp.up_proj.weight: shape (64, 96) in {file}, (96, 64) in the model",
        f"model.layers.1.mlp.up_proj.weight: F8_E4M3 in {file}",
    ):
        assert part in messages[0]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def _cut_into_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def _scramble(file: Path) -> None:
    file.write_bytes(b"\xff" * 1000)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [_truncate, _cut_into_the_header, _scramble, _empty])
def test_a_damaged_file_is_named(two_ranks: RankPool, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    file = _single_file(tmp_path)
    damage(file)
    for message in two_ranks.run(_refusal, {"dp_shard": 2}, tmp_path):
        assert message.startswith(f"CheckpointError: {file} ({file.stat().st_size} bytes) is truncated or corrupt")


def test_an_incomplete_checkpoint_names_the_file(two_ranks: RankPool, tmp_path: Path) -> None:
    lost = sorted(_checkpoint(tmp_path).glob("*.safetensors"))[1]
    lost.unlink()
    for message in two_ranks.run(_refusal, {"dp_shard": 2}, tmp_path):
        assert f"CheckpointError: {lost} is missing" in message


def test_an_index_of_other_files_is_refused(tmp_path: Path) -> None:
    index = _checkpoint(tmp_path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = content["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=r"lists 1 tensors .*model\.norm\.weight in model-00001"):
        load_weights(_on_meta("Qwen3ForCausalLM"), tmp_path)
    index.write_text("{")
    with pytest.raises(WeightsError, match="is not an index"):
        load_weights(_on_meta("Qwen3ForCausalLM"), tmp_path)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds neither model\.safetensors nor"):
        load_weights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(WeightsError, match="is not a directory"):
        load_weights(nn.Linear(2, 2), tmp_path / "nowhere" / "at" / "all")


def _refusal_where_one_rank_has_no_files(path: Path) -> str:
    model = parallelize(_on_meta("Qwen3ForCausalLM"), mesh_for({"dp_shard": 2}))
    with pytest.raises(WeightsError) as refusal:
        load_weights(model, path if dist.get_rank() == 0 else path / "elsewhere")
    assert all(parameter.is_meta for parameter in model.parameters())
    return f"{type(refusal.value).__name__}: {refusal.value}"


def test_a_read_error_on_one_rank_raises_on_all(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(_refusal_where_one_rank_has_no_files, _checkpoint(tmp_path))
    assert first.startswith("OtherRankError: rank 1: CheckpointError:")
    assert second.startswith("CheckpointError:")


def _add_stranger(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.stranger"] = torch.zeros(2)


def test_unexpected_tensors_are_logged_once_or_refused(
    two_ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _rewrite(_single_file(tmp_path), _add_stranger)
    model = _on_meta("Qwen3ForCausalLM")
    with caplog.at_level(logging.WARNING, logger="fsdp_runtime"):
        report = load_weights(model, tmp_path)
    assert report.unexpected == ("model.layers.7.stranger",)
    assert [record.message for record in caplog.records] == [
        "the checkpoint has 1 tensors that the model lacks: model.layers.7.stranger"
    ]
    for message in two_ranks.run(_refusal, {"tp": 2}, tmp_path, strict=True):
        assert "MismatchError" in message
        assert "model.layers.7.stranger; pass strict=False" in message


def _add_head(tensors: dict[str, torch.Tensor]) -> None:
    """Add a head of its own to a tied checkpoint, which differs from the embedding in the last element only."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1


def _add_equal_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


TWO_HEADS = r"model\.embed_tokens\.weight and lm_head\.weight: other values"


def test_a_tied_model_refuses_a_checkpoint_with_another_head(tmp_path: Path) -> None:
    file = _single_file(tmp_path, tied=True)
    _rewrite(file, _add_head)
    model = _reference("Qwen3ForCausalLM", seed=9, tied=True)
    with pytest.raises(MismatchError, match=rf"(?s)tie_word_embeddings=False.*{TWO_HEADS}"):
        load_weights(model, tmp_path)
    assert _differences(model, _reference("Qwen3ForCausalLM", seed=9, tied=True)) == []
    _rewrite(file, _add_equal_head)
    assert load_weights(model, tmp_path).unexpected == ()
    assert _differences(model, _reference("Qwen3ForCausalLM", tied=True)) == []


def _refusals_of_another_head(path: Path, equal: Path) -> list[str]:
    messages = []
    for axes in TWO:
        model = parallelize(_reference("Qwen3ForCausalLM", seed=9, tied=True), mesh_for(axes))
        with pytest.raises(MismatchError, match=TWO_HEADS) as refusal:
            load_weights(model, path)
        messages += [str(refusal.value), *_differences(model, _reference("Qwen3ForCausalLM", seed=9, tied=True))]
        load_weights(model, equal)
        messages += _differences(model, _reference("Qwen3ForCausalLM", tied=True))
    return messages


def test_every_rank_refuses_another_head_that_one_rank_reads(two_ranks: RankPool, tmp_path: Path) -> None:
    _rewrite(_single_file(tmp_path / "other", tied=True), _add_head)
    _rewrite(_single_file(tmp_path / "equal", tied=True), _add_equal_head)
    first, second = two_ranks.run(_refusals_of_another_head, tmp_path / "other", tmp_path / "equal")
    assert first == second
    assert len(first) == len(TWO)


def test_an_index_that_names_files_outside_its_directory_is_refused(tmp_path: Path) -> None:
    outside = _single_file(tmp_path / "outside")
    directory = _checkpoint(tmp_path / "checkpoint")
    index = directory / "model.safetensors.index.json"
    usual = json.loads(index.read_text())
    (directory / "link.safetensors").symlink_to(outside)
    for name in ("../outside/model.safetensors", str(outside), "link.safetensors", 5, None, ["x"], ""):
        content = {"weight_map": {**usual["weight_map"], "model.norm.weight": name}}
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"outside|is not the name of a file in its directory"):
            load_weights(_on_meta("Qwen3ForCausalLM"), directory)


def test_files_of_the_hubs_cache_are_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(_checkpoint(snapshot).iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / ".." / "blobs" / str(number))
    model = _on_meta("Qwen3ForCausalLM")
    load_weights(model, snapshot)
    assert _differences(model, _reference("Qwen3ForCausalLM")) == []


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(OptionError, match="path='' is empty"):
        load_weights(nn.Linear(2, 2), "")


def test_a_load_sets_the_mode_that_is_asked_for_and_no_other(tmp_path: Path) -> None:
    path = _single_file(tmp_path).parent
    model = _on_meta("Qwen3ForCausalLM").train()
    for training, expected in ((None, True), (False, False), (None, False), (True, True)):
        load_weights(model, path, training=training)
        assert {module.training for module in model.modules()} == {expected}


def test_a_model_that_is_loaded_in_inference_mode_trains(tmp_path: Path) -> None:
    model = _on_meta("Qwen3ForCausalLM")
    path = _checkpoint(tmp_path)
    with torch.inference_mode():
        load_weights(model, path)
    model(torch.arange(5)[None], use_cache=False).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None


def test_a_load_reads_the_models_tensors_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    original = state._named_tensors
    monkeypatch.setattr(state, "_named_tensors", lambda model: walks.append(model) or original(model))
    path = _checkpoint(tmp_path)
    load_weights(_on_meta("Qwen3ForCausalLM"), path)
    assert len(walks) == 1


def test_a_new_head_is_drawn_the_same_on_every_mesh(two_ranks: RankPool, tmp_path: Path) -> None:
    """A critic that starts from a language model; the checkpoint lacks its head and has another."""
    transformers.Qwen3ForCausalLM(_small_qwen3()).save_pretrained(tmp_path)
    expected = _critic_head(str(tmp_path), {})
    assert expected["score.weight"].std() > 0.01
    assert not expected["score.bias"].any()
    for mesh in ({"tp": 2}, {"dp_shard": 2}):
        for found in two_ranks.run(_critic_head, str(tmp_path), mesh):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(MismatchError, match=r"score\.weight: missing"):
        load_weights(transformers.Qwen3ForTokenClassification(_small_qwen3()), tmp_path)


def _loads_with_options_of_one_rank(path: str) -> list[str]:
    """Each would leave replicas that differ: other values of a new head, or dropout on one rank."""
    model = parallelize(transformers.Qwen3ForTokenClassification(_small_qwen3()), mesh_for({"dp_replicate": 2}))
    refusals = []
    for options in ({"new_modules": {"score": 0.02 + dist.get_rank()}}, {"training": dist.get_rank() == 0}):
        with pytest.raises(OptionError) as refusal:
            load_weights(model, path, **{"new_modules": {"score": 0.02}, **options})  # type: ignore[arg-type]
        refusals.append(str(refusal.value))
    return refusals


def test_options_that_would_make_replicas_differ_are_the_same_on_every_rank(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    transformers.Qwen3ForCausalLM(_small_qwen3()).save_pretrained(tmp_path)
    for refusals in two_ranks.run(_loads_with_options_of_one_rank, str(tmp_path)):
        assert refusals[0].startswith("new_modules is {'score': 0.02} on rank 0 and {'score': 1.02} on rank 1")
        assert refusals[1].startswith("training is True on rank 0 and False on rank 1")


def _small_qwen3() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Qwen3Config(vocab_size=32, num_key_value_heads=2, head_dim=8, num_labels=1, **sizes)


def _critic_head(path: str, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    with meta_device():
        model = transformers.Qwen3ForTokenClassification(_small_qwen3())
    if mesh:
        parallelize(model, MeshSpec(**mesh).build(device_type="cpu"))
    load_weights(model, path, new_modules={"score": 0.02})
    return {name: value for name, value in stream_weights(model) if name.startswith("score")}


def test_storages_can_be_freed_after_saving_and_loading(tmp_path: Path) -> None:
    """FSDP2 and ``offload`` resize them; ``Tensor.numpy`` would have fixed their size."""
    model = nn.Linear(2, 3)
    save_weights(model, tmp_path)
    load_weights(model, tmp_path)
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())


def _written_to_meanwhile(path: Path) -> str:
    """Another process writes to a file in place, once it has been opened."""
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh_for({"dp_shard": 2}))
    read = HubCheckpoint.read

    def overwrite_and_read(self: HubCheckpoint, name: str, box: Any = None) -> Tensor:
        if dist.get_rank() == 1:
            with self.tensors[name].file.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"abcd")
        return read(self, name, box)

    HubCheckpoint.read = overwrite_and_read  # type: ignore[method-assign]
    try:
        with pytest.raises(WeightsError) as refusal:
            load_weights(model, path)
    finally:
        HubCheckpoint.read = read  # type: ignore[method-assign]
    dist.barrier()
    return str(refusal.value)


def test_a_checkpoint_that_is_written_to_while_it_is_read_is_refused_on_every_rank(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    save_weights(tiny_model("LlamaForCausalLM"), tmp_path)
    for message in two_ranks.run(_written_to_meanwhile, tmp_path):
        assert "was written to while it was loaded" in message
