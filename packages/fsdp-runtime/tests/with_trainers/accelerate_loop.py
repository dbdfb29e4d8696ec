"""A loop on ``MeshAccelerator`` against the same loop on accelerate in one process; run by ``nox -s trainers``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from fsdp_runtime import ModelError, OptionError, load_weights, meta_device, stream_weights
from fsdp_runtime.errors import MismatchError
from fsdp_runtime.trainers import MeshAccelerator
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import forget_accelerate, token_rows, write_checkpoint

Axes = dict[str, int]
MESHES: dict[str, tuple[Axes, dict[str, Any]]] = {
    "tp": ({"tp": 2}, {}),
    "fsdp": ({"dp_shard": 2}, {}),
    "replicas": ({"dp_replicate": 2}, {}),
    "fsdp x tp": ({"dp_shard": 2, "tp": 2}, {}),
    "fsdp x sp": ({"dp_shard": 2, "tp": 2}, {"sequence_parallel": True}),
    "cp": ({"cp": 2}, {}),
    "cp x tp": ({"cp": 2, "tp": 2}, {}),
    "fsdp x cp": ({"dp_shard": 2, "cp": 2}, {}),
}


@dataclass
class Outcome:
    """Losses, norms and learning rates by step, and the weights at the end."""

    figures: list[tuple[float, ...]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def accelerator_on(axes: Axes | None, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    forget_accelerate()
    settings.setdefault("dataloader_config", DataLoaderConfiguration(split_batches=True))
    if axes is None:
        return Accelerator(cpu=True, **settings)
    return MeshAccelerator(mesh_for(axes), parallelize_kwargs=options, **settings)


def parts(folder: Path, *, adapter: bool = False, rows: int = 16) -> tuple[nn.Module, Any, Any, Any]:
    """A model, its optimizer, a data loader and a schedule, as a script for one process makes them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    optimizer = torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], lr=1e-2, eps=1e-3)
    samples = [{name: torch.tensor(value) for name, value in row.items()} for row in token_rows(rows)]
    loader: Any = DataLoader(samples, batch_size=4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    return model, optimizer, loader, schedule


def loop(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any, *, start: int = 0) -> Outcome:
    """Train over the data once, from a micro-batch on; the loss is the mean over the labels of all ranks."""
    outcome = Outcome()
    for batch in accelerator.skip_first_batches(loader, start) if start else loader:
        with accelerator.accumulate(model):
            labels = accelerator.gather((batch["labels"][:, 1:] != -100).sum()).sum()
            loss = model(**batch, num_items_in_batch=labels).loss * accelerator.num_processes
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else loss * 0
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        outcome.figures.append((float(mean), float(norm), schedule.get_last_lr()[0]))
    outcome.weights = {
        name: tensor.detach().clone() for name, tensor in stream_weights(accelerator.unwrap_model(model))
    }
    return outcome


def trained(
    folder: Path, axes: Axes | None, options: dict[str, Any], *, settings: Any = (), **of_parts: Any
) -> Outcome:
    accelerator = accelerator_on(axes, options, **dict(settings))
    model, optimizer, loader, schedule = parts(folder, **of_parts)
    schedule, optimizer, model, loader = accelerator.prepare(schedule, optimizer, model, loader)
    return loop(accelerator, model, optimizer, loader, schedule)


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    ours, theirs = (torch.tensor(each.figures, dtype=torch.float64) for each in (found, expected))
    assert ours.shape == theirs.shape
    assert found.weights.keys() == expected.weights.keys()
    errors = {"figures": (ours - theirs).abs().max().item()}
    for name, weight in expected.weights.items():
        errors[name] = (found.weights[name] - weight).abs().max().item()
    return {name: error for name, error in errors.items() if not error < 2e-5}


def same_on_all(pool: RankPool, function: Callable[..., Outcome], *args: Any, **options: Any) -> Outcome:
    found = pool.run(function, *args, timeout=400, **options)
    for other in found[1:]:
        assert differences(other, found[0]) == {}
    return found[0]


def pool_of(axes: Axes, two_ranks: RankPool, four_ranks: RankPool) -> RankPool:
    return four_ranks if len(axes) > 1 else two_ranks


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_norms_rates_and_weights_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, mesh: str
) -> None:
    axes, options = MESHES[mesh]
    found = same_on_all(pool_of(axes, two_ranks, four_ranks), trained, folder, axes, options)
    assert differences(found, trained(folder, None, {})) == {}


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_accumulated_gradients_that_do_not_divide_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, axes: Axes
) -> None:
    settings = {"gradient_accumulation_steps": 3}.items()  # four micro-batches
    found = same_on_all(pool_of(axes, two_ranks, four_ranks), trained, folder, axes, {}, settings=list(settings))
    assert differences(found, trained(folder, None, {}, settings=settings)) == {}


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_adapters_train_as_in_one_process(two_ranks: RankPool, four_ranks: RankPool, folder: Path, axes: Axes) -> None:
    found = same_on_all(pool_of(axes, two_ranks, four_ranks), trained, folder, axes, {}, adapter=True)
    assert differences(found, trained(folder, None, {}, adapter=True)) == {}


def test_a_mixture_on_ep_trains_as_in_one_process(two_ranks: RankPool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture="Qwen3MoeForCausalLM", router_aux_loss_coef=0.0)
    found = same_on_all(two_ranks, trained, tmp_path, {"dp_shard": 2, "ep": 2}, {})
    assert differences(found, trained(tmp_path, None, {})) == {}


def test_batches_that_are_not_split_advance_the_schedule_by_the_ranks_of_dp(four_ranks: RankPool, folder: Path) -> None:
    settings = {"dataloader_config": DataLoaderConfiguration()}.items()
    found = same_on_all(four_ranks, trained, folder, {"dp_shard": 2, "tp": 2}, {}, settings=list(settings))
    rates = [rate for _, _, rate in found.figures]
    assert rates == pytest.approx([1e-2 * (1 - 0.9 * step / 8) for step in (2, 4)])  # two a step, as under DDP


def half_precision(folder: Path, axes: Axes | None) -> list[float]:
    accelerator = accelerator_on(axes, {}, mixed_precision="bf16")
    model, _, loader, _ = parts(folder)
    model, loader = accelerator.prepare(model, loader)
    with accelerator.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == torch.bfloat16
    losses = []
    for batch in loader:
        labels = accelerator.gather((batch["labels"][:, 1:] != -100).sum()).sum()
        with accelerator.no_sync(model):
            output = model(**batch, num_items_in_batch=labels)
        assert output.logits.dtype == torch.float32
        losses.append(float(accelerator.reduce(output.loss.detach(), "sum")))
    return losses


def test_bf16_computes_as_accelerate_does(four_ranks: RankPool, folder: Path) -> None:
    expected = half_precision(folder, None)
    for found in four_ranks.run(half_precision, folder, {"dp_shard": 2, "tp": 2}, timeout=300):
        assert found == pytest.approx(expected, rel=2e-2)


def resumed(folder: Path, output: str, before: Axes, after: Axes | None = None) -> tuple[Outcome, Outcome]:
    """Train over the data; and again from the state that was saved after two of four steps, on another mesh."""
    naming = ProjectConfiguration(project_dir=output, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = accelerator_on(before, project_config=naming)
    prepared = accelerator.prepare(*parts(folder, rows=8))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    loop(accelerator, *prepared)
    counter.count = 7
    accelerator.save_state()
    accelerator.save_state()  # the first is removed
    model, optimizer, _, schedule = prepared
    loader = accelerator.prepare(parts(folder)[2])
    whole = loop(accelerator, model, optimizer, loader, schedule, start=2)

    accelerator = accelerator_on(after or before, project_config=naming)
    model, optimizer, loader, schedule = accelerator.prepare(*parts(folder))
    fresh = Counter()
    accelerator.register_for_checkpointing(fresh)
    accelerator.load_state()
    assert fresh.count == 7
    accelerator.wait_for_everyone()
    assert os.listdir(Path(output, "checkpoints")) == ["checkpoint_1"]
    return whole, loop(accelerator, model, optimizer, loader, schedule, start=2)


class Counter:
    """An object to be saved with the rest."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_loop_resumes_bit_for_bit(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for whole, again in four_ranks.run(resumed, folder, str(tmp_path), {"dp_shard": 2, "tp": 2}, timeout=400):
        assert again.figures == whole.figures
        assert all(torch.equal(again.weights[name], weight) for name, weight in whole.weights.items())


def test_a_loop_resumes_on_another_mesh(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    meshes = {"dp_shard": 2, "tp": 2}, {"dp_shard": 4}
    for whole, again in four_ranks.run(resumed, folder, str(tmp_path), *meshes, timeout=400):
        assert differences(again, whole) == {}


def saved(folder: Path, output: Path, adapter: bool) -> dict[str, Tensor]:
    accelerator = accelerator_on({"dp_shard": 2, "tp": 2})
    model = accelerator.prepare(parts(folder, adapter=adapter)[0])
    assert accelerator.prepare(model) is model
    accelerator.save_model(model, str(output / "model"), max_shard_size="5GB")
    state: dict[str, Tensor] = accelerator.get_state_dict(model)
    if not adapter and accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(output / "state", state_dict=state)
    accelerator.wait_for_everyone()
    return state


def test_saved_models_are_those_that_were_loaded(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    first, *others = four_ranks.run(saved, folder, tmp_path, False, timeout=300)
    assert others == [{}, {}, {}]
    for found in (
        first,
        *(AutoModelForCausalLM.from_pretrained(tmp_path / each).state_dict() for each in ("model", "state")),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_saved_adapter_is_one_that_peft_reads(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    four_ranks.run(saved, folder, tmp_path, True, timeout=300)
    base = AutoModelForCausalLM.from_pretrained(folder)
    found = peft.PeftModel.from_pretrained(base, tmp_path / "model").state_dict()
    expected = parts(folder, adapter=True)[0].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def from_meta(folder: Path) -> Outcome:
    accelerator = accelerator_on({"dp_shard": 2, "tp": 2})
    whole, _, loader, _ = parts(folder)
    with meta_device():
        model: Any = AutoModelForCausalLM.from_config(whole.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    loader, model, optimizer, schedule = accelerator.prepare(loader, model, optimizer, schedule)
    load_weights(model, folder)
    return loop(accelerator, model, optimizer, loader, schedule)


def test_a_model_on_meta_is_loaded_after_prepare(four_ranks: RankPool, folder: Path) -> None:
    assert differences(same_on_all(four_ranks, from_meta, folder), trained(folder, None, {})) == {}


def shared_out(_: None = None) -> tuple[Any, ...]:
    accelerator = accelerator_on({"dp_shard": 2, "tp": 2})
    rank = torch.distributed.get_rank()
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as own:
        mine = list(own)
    loader = accelerator.prepare(DataLoader(range(6), batch_size=4))  # the last batch is filled up
    seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist()
    if rank == 3:
        accelerator.set_trigger()
    return (
        (
            accelerator.num_processes,
            accelerator.process_index,
            accelerator.is_main_process,
            accelerator.is_last_process,
        ),
        mine,
        seen,
        (accelerator.check_trigger(), accelerator.check_trigger()),
        accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), "max").item(),
    )


def test_work_is_shared_out_over_dp(four_ranks: RankPool) -> None:
    found = four_ranks.run(shared_out, timeout=200)
    assert [each[0] for each in found] == [
        (2, 0, True, False),
        (2, 0, False, False),
        (2, 1, False, False),
        (2, 1, False, True),
    ]
    assert [each[1] for each in found] == [["a", "b"], ["a", "b"], ["c", "c"], ["c", "c"]]
    assert all(each[2:] == (list(range(6)), (True, False), 2.0) for each in found)


def refused_settings(_: None = None) -> list[str]:
    mesh = mesh_for({"dp_shard": 2})
    settings: list[dict[str, Any]] = [
        {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        {"deepspeed_plugin": DeepSpeedPlugin.__new__(DeepSpeedPlugin)},
        {"dynamo_backend": "inductor"},
        {"mixed_precision": "fp16"},
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
    ]
    said = []
    for each in settings:
        forget_accelerate()
        with pytest.raises(OptionError) as error:
            MeshAccelerator(mesh, **each)
        said.append(str(error.value))
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    try:
        with pytest.raises(OptionError) as error:
            MeshAccelerator(mesh)
    finally:
        del os.environ["ACCELERATE_USE_FSDP"]
    return [*said, str(error.value)]


def test_settings_for_another_kind_of_parallelism_are_refused(two_ranks: RankPool) -> None:
    names = (
        "fsdp_plugin",
        "deepspeed_plugin",
        "dynamo_backend",
        "mixed_precision",
        "dispatch_batches",
        "ACCELERATE_USE_FSDP",
    )
    for found in two_ranks.run(refused_settings, timeout=100):
        assert [name in text for name, text in zip(names, found, strict=True)] == [True] * len(names)


def mistakes(folder: Path) -> list[str]:
    """Provoke each; afterwards the same objects train."""
    accelerator = accelerator_on({"dp_shard": 2, "tp": 2}, gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = parts(folder)
    said = []

    def provoke(error: type[Exception], act: Callable[[], Any]) -> None:
        with pytest.raises(error) as raised:
            act()
        said.append(str(raised.value))

    provoke(ModelError, lambda: accelerator.prepare(optimizer))
    provoke(OptionError, lambda: accelerator.prepare(model, optimizer, device_placement=[True]))
    provoke(OptionError, accelerator.save_state)
    provoke(OptionError, lambda: accelerator.join_uneven_inputs([model]))
    provoke(OptionError, lambda: accelerator.reduce(torch.ones(1), "min"))
    accelerator.even_batches = False
    provoke(OptionError, lambda: accelerator.prepare(loader))
    accelerator.even_batches = True
    stepped, late, _, _ = parts(folder)
    stepped(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
    late.step()
    provoke(ModelError, lambda: accelerator.prepare(stepped, late))
    provoke(ModelError, lambda: accelerator.prepare(model, nn.Linear(2, 2)))
    assert not any(isinstance(own, DTensor) for own in model.parameters())
    assert not accelerator._models
    assert not accelerator._optimizers
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    again = accelerator.prepare(*prepared, device_placement=[True, True, True, True])
    assert all(one is other for one, other in zip(prepared, again, strict=True))
    batch = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        provoke(OptionError, lambda: accelerator.save_state("nowhere"))
    return said


def test_mistakes_are_refused_before_anything_changes(four_ranks: RankPool, folder: Path) -> None:
    for found in four_ranks.run(mistakes, folder, timeout=300):
        assert len(found) == 9


def of_another_shape(folder: Path, output: str) -> None:
    accelerator = accelerator_on({"dp_shard": 2})
    accelerator.prepare(*parts(folder)[:2])
    accelerator.save_state(output)
    accelerator = accelerator_on({"dp_shard": 2})
    accelerator.prepare(*parts(folder))
    with pytest.raises(MismatchError, match="1 schedulers are prepared, and 0 were saved"):
        accelerator.load_state(output)
    accelerator.prepare(parts(folder)[0])
    with pytest.raises(MismatchError, match=r"2 models are prepared, and .* has the states of 1"):
        accelerator.load_state(output)


def test_a_state_with_fewer_schedulers_or_models_is_refused(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    two_ranks.run(of_another_shape, folder, str(tmp_path / "state"), timeout=200)
