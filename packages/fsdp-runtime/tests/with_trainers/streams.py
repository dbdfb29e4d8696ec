"""Streaming data sets on a mesh against those of one process; run by ``nox -s trainers``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from fsdp_runtime import OptionError
from fsdp_runtime.trainers import MeshAccelerator, Trainer, on_mesh, streams
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import (
    BATCH,
    COMMON,
    Outcome,
    differences,
    dp_size,
    forget_accelerate,
    model_on,
    token_rows,
    tokenizer,
    train,
    write_checkpoint,
)
from harness.trl_trainers import alone, trainers

AXES = {"dp_shard": 2, "tp": 2}
Stream = datasets.IterableDataset


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    """Rows of files of several lengths."""
    for shard in shards:
        for index in range(4 + shard):
            yield {"number": 100 * shard + index}


def files(count: int) -> Stream:
    return Stream.from_generator(numbers, gen_kwargs={"shards": list(range(count))})


class OfTorch(torch.utils.data.IterableDataset[dict[str, int]]):
    """A stream of torch that knows its length."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return numbers([0, 1, 2])

    def __len__(self) -> int:
        return 15


#: Streams by name; files that the ranks of dp divide, and that they do not.
STREAMS: dict[str, Callable[[], Any]] = {
    "one file": lambda: files(1),
    "two files": lambda: files(2),
    "three files": lambda: files(3),
    "mapped": lambda: files(4).map(lambda row: {"number": row["number"] + 1}),
    "shuffled": lambda: files(4).shuffle(seed=3, buffer_size=5),
    "taken": lambda: files(3).skip(3).take(9),
    "interleaved": lambda: datasets.interleave_datasets([files(2), files(3)], probabilities=[0.3, 0.7], seed=5),
    "rows in memory": lambda: datasets.Dataset.from_dict({"number": list(range(14))}).to_iterable_dataset(3),
    "torch": OfTorch,
}
QUICK = ("three files", "shuffled")
#: Arguments of ``DataLoader`` and of ``DataLoaderConfiguration``.
LOADERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "whole batches": ({"drop_last": True}, {}),
    "split": ({}, {"split_batches": True}),
    "batches of the data set": (
        {"batch_size": None, "collate_fn": lambda row: {"number": torch.tensor([row["number"]])}},
        {},
    ),
}


def _read(stream: str, loader: str, axes: dict[str, int] | None, skip: int = 0) -> list[list[list[int]]]:
    """The batches of a rank in two epochs."""
    forget_accelerate()
    options, settings = LOADERS[loader]
    config = DataLoaderConfiguration(**settings)
    accelerator: Any = Accelerator(cpu=True, dataloader_config=config)
    size = 4
    if axes is not None:
        forget_accelerate()
        accelerator = MeshAccelerator(mesh_for(axes), dataloader_config=config)
        size = 4 if config.split_batches else 4 // dp_size(axes)
    batches = accelerator.prepare(DataLoader(STREAMS[stream](), **{"batch_size": size, **options}))
    epochs = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        own = accelerator.skip_first_batches(batches, skip) if skip else batches
        epochs.append([torch.as_tensor(batch["number"]).reshape(-1).tolist() for batch in own])
    return epochs


def _joined(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def _of_all(by_rank: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """The batches of all ranks of dp."""
    return [[_joined(parts) for parts in zip(*epochs, strict=True)] for epochs in zip(*by_rank, strict=True)]


def _check_read(pool: RankPool, stream: str, loader: str, axes: dict[str, int], skip: int = 0) -> None:
    by_rank = pool.run(_read, stream, loader, axes, skip, timeout=60)
    if "tp" in axes:
        assert by_rank[::2] == by_rank[1::2]
        by_rank = by_rank[::2]
    found, expected = _of_all(by_rank), _read(stream, loader, None, skip)
    if loader == "batches of the data set" and dp_size(axes) > 1:  # a batch a rank
        expected = [[_joined(rows[i : i + 2]) for i in range(0, len(rows), 2)] for rows in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for batch, rows in zip(ours, theirs, strict=True):
            assert batch[: len(rows)] == rows  # the last one is filled up


@pytest.mark.parametrize("stream", QUICK)
def test_batches_of_a_stream_are_those_of_one_process(two_ranks: RankPool, stream: str) -> None:
    _check_read(two_ranks, stream, "plain", {"dp_shard": 2})


#: What may be done to a stream, by a number that is drawn.
CHANGES: tuple[Callable[[Stream, int], Stream], ...] = (
    lambda stream, seed: stream.map(lambda row: {"number": row["number"] * 2 + seed}),
    lambda stream, seed: stream.map(
        lambda rows: {"number": [n + 1 for n in rows["number"]]}, batched=True, batch_size=3
    ),
    lambda stream, seed: stream.filter(lambda row: row["number"] % 3 != seed % 3),
    lambda stream, seed: stream.shuffle(seed=seed, buffer_size=1 + seed % 7),
    lambda stream, seed: stream.take(5 + seed % 9),
    lambda stream, seed: stream.skip(seed % 4),
    lambda stream, seed: stream.repeat(2),
    lambda stream, seed: datasets.concatenate_datasets([stream, files(1 + seed % 3)]),
    lambda stream, seed: datasets.interleave_datasets([stream, files(2)], probabilities=[0.6, 0.4], seed=seed),
    lambda stream, seed: stream.with_format("torch"),
)


def drawn(seed: int) -> Stream:
    """A stream of some files with three changes."""
    draw = random.Random(seed)
    stream = files(draw.randint(1, 5))
    for change in draw.choices(CHANGES, k=3):
        stream = change(stream, draw.randrange(100))
    return stream


STREAMS |= {f"drawn {seed}": partial(drawn, seed) for seed in range(24)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_batches_of_drawn_streams_are_those_of_one_process(two_ranks: RankPool, seed: int) -> None:
    loader = ("plain", "split", "whole batches")[seed % 3]
    _check_read(two_ranks, f"drawn {seed}", loader, ({"dp_shard": 2}, {"tp": 2})[seed % 2], skip=seed % 4)


def test_workers_of_every_rank_read_the_same_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.dist, "get_rank", lambda: 1)
    for worker in range(2):  # ranks of tests may have no worker processes
        info = SimpleNamespace(id=worker, num_workers=2, seed=0)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
        monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)
        expected = [row["number"] for row in files(4)]
        parts = [streams.StreamPart(files(4), 2, num_processes=2, process_index=rank) for rank in range(2)]
        found = [[row["number"] for row in part] for part in parts]
        batches = [_joined(own[i : i + 2] for own in found) for i in range(0, len(found[0]), 2)]
        assert _joined(batches)[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_replicate": 2}, AXES], ids=str)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("stream", [name for name in STREAMS if not name.startswith("drawn")])
def test_batches_of_every_stream_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, stream: str, loader: str, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    _check_read(pool, stream, loader, axes)
    if loader != "batches of the data set":
        _check_read(pool, stream, loader, axes, skip=2)


def token_files() -> Stream:
    """Rows of tokens in three files, seven, six and three of them."""
    rows = token_rows()
    shards = [rows[:7], rows[7:13], rows[13:]]
    return Stream.from_generator(lambda shards: (row for rows in shards for row in rows), gen_kwargs={"shards": shards})


def _accuracy(prediction: Any) -> dict[str, float]:
    scored = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[scored].mean()), "scored": int(scored.sum())}


def build(model: Any, mesh: Any, dp: int, *, output: str, until: int = 0, held_out: int = 12, **options: Any) -> Any:
    """A trainer on streams, on a mesh or transformers' own; it stops after the step ``until``."""
    accumulation = options.get("gradient_accumulation_steps", 1)
    given = {
        **COMMON,
        "output_dir": output,
        "per_device_train_batch_size": BATCH // dp // accumulation,
        "per_device_eval_batch_size": BATCH // dp,
        "max_steps": 6,  # more than an epoch
        **options,
    }
    common = {
        "model": model,
        "args": transformers.TrainingArguments(**given),
        "train_dataset": token_files().shuffle(seed=1, buffer_size=6),
        "eval_dataset": token_files().take(held_out),
        "processing_class": tokenizer(),
        "data_collator": transformers.default_data_collator,
        "compute_metrics": _accuracy,
    }
    trainer = transformers.Trainer(**common) if mesh is None else Trainer(**common, mesh=mesh)
    if until:
        trainer.add_callback(_Stop(until))
    return trainer


class _Stop(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def _trained(folder: Path, output: Path, axes: dict[str, int] | None, **options: Any) -> Outcome:
    return train(partial(build, output=str(output), **options), folder, axes, evaluate=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "split": {
        "accelerator_config": {"split_batches": True},
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
    },
}


@pytest.mark.parametrize(
    "variant", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in list(VARIANTS)[1:])]
)
def test_a_trainer_on_streams_is_that_of_one_process(
    four_ranks: RankPool, folder: Path, tmp_path: Path, variant: str
) -> None:
    options = VARIANTS[variant]
    found = four_ranks.run(_trained, folder, tmp_path / "mesh", AXES, timeout=100, **options)[0]
    expected = _trained(folder, tmp_path / "alone", None, **options)
    assert differences(found, expected) == {}
    for name in ("eval_loss", "eval_accuracy", "eval_scored"):
        assert found.evaluation[name] == pytest.approx(expected.evaluation[name], rel=1e-5), name


def _evaluated(folder: Path, output: Path, axes: dict[str, int] | None) -> dict[str, float]:
    forget_accelerate()
    model, mesh = model_on(folder, axes)
    found: dict[str, float] = build(model, mesh, dp_size(axes), output=str(output), held_out=10).evaluate()
    return found


def test_rows_that_fill_up_the_last_batch_of_a_stream_are_not_counted(
    two_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    found = two_ranks.run(_evaluated, folder, tmp_path / "mesh", {"dp_shard": 2}, timeout=100)[0]
    expected = _evaluated(folder, tmp_path / "alone", None)
    assert found["eval_scored"] == expected["eval_scored"]
    assert found["eval_accuracy"] == pytest.approx(expected["eval_accuracy"], rel=1e-5)


def _resumed(folder: Path, output: Path, axes: dict[str, int] | None, ignore: bool) -> Outcome:
    saving = {"save_strategy": "steps", "save_steps": 2, "ignore_data_skip": ignore}
    train(partial(build, output=str(output), until=2, **saving), folder, axes)
    return train(partial(build, output=str(output), **saving), folder, axes, resume=True)


@pytest.mark.parametrize("ignore", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stream_that_is_resumed_in_the_middle_is_that_of_one_process(
    two_ranks: RankPool, folder: Path, tmp_path: Path, ignore: bool
) -> None:
    found = two_ranks.run(_resumed, folder, tmp_path / "mesh", {"dp_shard": 2}, ignore, timeout=100)[0]
    expected = _resumed(folder, tmp_path / "alone", None, ignore)
    assert differences(found, expected) == {}
    if not ignore:
        assert differences(found, _trained(folder, tmp_path / "whole", None)) == {}


def _of_trl(name: str, folder: Path, output: Path, axes: dict[str, int] | None) -> Outcome:
    """A trainer of TRL on a stream of two files, of which one is longer."""
    cls, config, data, settings, others, _ = trainers()[name]

    def set_up(model: Any, mesh: Any, dp: int) -> Any:
        rows = data().to_list()
        shards = [rows[:11], rows[11:]]
        stream = Stream.from_generator(
            lambda shards: (row for rows in shards for row in rows), gen_kwargs={"shards": shards}
        )
        given = {**COMMON, "output_dir": str(output), "per_device_train_batch_size": BATCH // dp, "max_steps": 3}
        given |= {"gradient_checkpointing": False, "disable_dropout": True, **settings}
        given = {key: value for key, value in given.items() if key in config.__dataclass_fields__}
        arguments = {
            "model": model,
            "args": config(**given),
            "train_dataset": stream,
            "processing_class": tokenizer(),
            **others,
        }
        return alone(cls, arguments) if mesh is None else on_mesh(cls)(**arguments, mesh=mesh)

    return train(set_up, folder, axes)


@pytest.mark.parametrize(
    "name", ["SFT", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DPO", "KTO", "Reward", "GRPO"))]
)
def test_a_trainer_of_trl_on_a_stream_is_that_of_one_process(
    two_ranks: RankPool, folder: Path, tmp_path: Path, name: str
) -> None:
    if name == "Reward":
        folder = write_checkpoint(tmp_path / "scoring", architecture="Qwen3ForSequenceClassification", num_labels=1)
    found = two_ranks.run(_of_trl, name, folder, tmp_path / "mesh", {"dp_shard": 2}, timeout=200)[0]
    expected = _of_trl(name, folder, tmp_path / "alone", None)
    assert differences(found, expected) == {}


def _refused(_: None = None) -> list[str]:
    forget_accelerate()
    accelerator = MeshAccelerator(mesh_for({"tp": 2}))
    rank = torch.distributed.get_rank()
    said = []
    for stream in (
        files(4).shuffle(buffer_size=3),
        files(4).shuffle(seed=rank).map(lambda row: row).take(5),
        datasets.interleave_datasets([files(2), files(2)], probabilities=[0.5, 0.5]),
        files(4).shard(num_shards=2, index=rank),
        split_dataset_by_node(files(4), rank, 2),
    ):
        with pytest.raises(OptionError) as error:
            accelerator.prepare(DataLoader(stream, batch_size=2))
        said.append(str(error.value))
    return said


def test_streams_that_differ_between_ranks_are_refused(two_ranks: RankPool) -> None:
    for *orders, parts, split in two_ranks.run(_refused, timeout=60):
        assert all("seed" in said for said in orders)
        assert "files" in parts
        assert "split_dataset_by_node" in split


def _filled(_: None = None) -> list[str]:
    forget_accelerate()
    accelerator = MeshAccelerator(mesh_for({"dp_shard": 2}))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.logger, "warning", lambda text, *values: said.append(text % values))
        loader = accelerator.prepare(DataLoader(files(3), batch_size=4))
        for _ in range(2):
            list(loader)
    return said


def test_a_last_batch_that_is_filled_up_is_warned_of_once(two_ranks: RankPool) -> None:
    (said,), others = two_ranks.run(_filled, timeout=60)
    assert "7 of its 8 samples" in said
    assert others == []
