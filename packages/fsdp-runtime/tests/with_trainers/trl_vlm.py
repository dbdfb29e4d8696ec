"""TRL's trainers with images on a mesh against those of one process; run by ``nox -s trainers``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from PIL import Image
from transformers import BatchFeature, ProcessorMixin

from fsdp_runtime import OptionError
from fsdp_runtime.trainers import on_mesh
from harness.models import IMAGE_TOKEN, VOCAB
from harness.ranks import RankPool
from harness.trainers import (
    BATCH,
    COMMON,
    compare,
    differences,
    dp_size,
    forget_accelerate,
    model_on,
    tokenizer,
    write_checkpoint,
)
from harness.trl_trainers import alone, sample_apart

MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})
PATCH, PLACE = 4, "<image> t9 "


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gemma"), architecture="Gemma3ForConditionalGeneration")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of images of any size, whose class says ``accepts_loss_kwargs = False``."""
    return write_checkpoint(tmp_path_factory.mktemp("qwen"), architecture="Qwen2_5_VLForConditionalGeneration")


class Processor(ProcessorMixin):
    """Words, and images: of 8 by 8 pixels as Gemma 3 takes them, or as patches of any number, as Qwen2.5-VL does."""

    def __init__(self, tokenizer: Any, *, patches: bool) -> None:
        super().__init__(tokenizer)
        self.patches = patches

    def __call__(
        self, images: Any = None, text: Any = None, padding_side: str = "left", return_tensors: Any = "pt", **_: Any
    ) -> BatchFeature:
        flat = [np.asarray(image, dtype=np.float32) / 255 - 0.5 for own in images or () for image in own or ()]
        pixels, counts = (_patches if self.patches else _pixels)(flat) if flat else ({}, iter(()))
        rows = [self._row(each, counts) for each in text]
        types = "mm_token_type_ids" if self.patches else "token_type_ids"
        if return_tensors is None:
            kinds = [[int(token == IMAGE_TOKEN) for token in row] for row in rows]
            return BatchFeature(
                {"input_ids": rows, "attention_mask": [[1] * len(r) for r in rows], types: kinds, **pixels}
            )
        longest = max(map(len, rows))
        found = torch.zeros(2, len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            place = slice(longest - len(row), None) if padding_side == "left" else slice(len(row))
            found[0, index, place], found[1, index, place] = torch.tensor(row), 1
        kinds = (found[0] == IMAGE_TOKEN).long()
        return BatchFeature({"input_ids": found[0], "attention_mask": found[1], types: kinds, **pixels})

    def _row(self, text: str, counts: Any) -> list[int]:
        first, *others = (self.tokenizer(part)["input_ids"] for part in text.split("<image>"))
        return [*first, *(token for part in others for token in [IMAGE_TOKEN] * next(counts) + part)]

    def apply_chat_template(
        self, conversation: Any = None, tokenize: bool = False, return_tensors: Any = None, **_: Any
    ) -> Any:
        """Join the parts of messages."""
        several = isinstance(conversation[0], list)
        parts = [
            [part for message in each for part in message["content"] if not isinstance(part, str)]
            for each in (conversation if several else [conversation])
        ]
        texts = ["".join(PLACE if p["type"] == "image" else p["text"] + " " for p in each) for each in parts]
        if not tokenize:
            return texts if several else texts[0]
        images = [[part["image"] for part in each if part["type"] == "image"] for each in parts]
        return self(images=images, text=texts, return_tensors=return_tensors)


def _pixels(images: list[Any]) -> tuple[dict[str, Any], Any]:
    return {"pixel_values": torch.from_numpy(np.stack([i[:8, :8] for i in images])).permute(0, 3, 1, 2)}, iter(
        [4] * len(images)
    )


def _patches(images: list[Any]) -> tuple[dict[str, Any], Any]:
    """Two frames of each patch, and a token of four patches."""
    grids = [[1, image.shape[0] // PATCH, image.shape[1] // PATCH] for image in images]
    patches = [
        torch.from_numpy(image).view(rows, PATCH, columns, PATCH, 3).permute(0, 2, 4, 1, 3).unsqueeze(3)
        for image, (_, rows, columns) in zip(images, grids, strict=True)
    ]
    flat = torch.cat([each.expand(-1, -1, -1, 2, -1, -1).reshape(-1, 6 * PATCH**2) for each in patches])
    counts = [rows * columns // 4 for _, rows, columns in grids]
    return {"pixel_values": flat, "image_grid_thw": torch.tensor(grids)}, iter(counts)


def rows(name: str, count: int = 16) -> Dataset:
    """Prompts with one, two and no pictures of two sizes, and completions, of several lengths."""
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> str:
        return " ".join(f"t{word}" for word in torch.randint(4, VOCAB - 4, (number,), generator=generator).tolist())

    def picture(index: int) -> Any:
        pixels = torch.randint(0, 256, (8, 8 + index % 2 * 8, 3), generator=generator, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())

    found = []
    for index in range(count):
        images = [picture(index + each) for each in range((1, 2, 0, 1)[index % 4])]
        asked: Any = words(2 + index % 3)
        prompt = [{"role": "user", "content": asked}] if name == "GRPO" else PLACE * len(images) + asked
        answers = {
            "SFT": {"completion": words(4 + index % 5)},
            "DPO": {"chosen": words(3 + index % 4), "rejected": words(5)},
            "GRPO": {},
        }[name]
        found.append({"images": images, "prompt": prompt, **answers})
    return Dataset.from_list(found)


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [sum(map(ord, completion[0]["content"])) % 100 / 100 for completion in completions]


TRAINERS: dict[str, tuple[type, type, dict[str, Any], tuple[str, ...]]] = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, {"max_length": None}, ("entropy", "mean_token_accuracy")),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, {"max_length": None}, ("rewards/margins", "logps/chosen")),
    "GRPO": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        {"num_generations": 2, "max_completion_length": 5, "generation_kwargs": {"do_sample": False}, "beta": 0.1},
        ("reward", "kl", "entropy"),
    ),
}


def build(model: Any, mesh: Any, dp: int, *, name: str, output: str, **options: Any) -> Any:
    """A trainer of three steps, on a mesh or, for ``mesh=None``, TRL's own."""
    cls, config, settings, _ = TRAINERS[name]
    given = {
        **COMMON,
        "output_dir": output,
        "per_device_train_batch_size": BATCH // dp,
        "max_steps": 3,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "remove_unused_columns": False,  # else TRL drops the text
        **settings,
        **options,
    }
    common = {
        "model": model,
        "args": config(**{key: value for key, value in given.items() if key in config.__dataclass_fields__}),
        "train_dataset": rows(name),
        "processing_class": Processor(tokenizer(), patches=hasattr(model.config, "video_token_id")),
        **({"reward_funcs": reward} if name == "GRPO" else {}),
    }
    if name == "GRPO":
        sample_apart(model)
    return alone(cls, common) if mesh is None else on_mesh(cls)(**common, mesh=mesh)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", TRAINERS)
def test_figures_and_weights_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, qwen: Path, tmp_path: Path, name: str, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    found, expected = compare(pool, partial(build, name=name, output=str(tmp_path)), qwen, axes, key=f"vlm {name}")
    assert differences(found, expected, ("loss", "grad_norm", *TRAINERS[name][-1])) == {}


@pytest.mark.parametrize("name", TRAINERS)
def test_they_are_with_images_of_one_size(two_ranks: RankPool, gemma: Path, tmp_path: Path, name: str) -> None:
    set_up = partial(build, name=name, output=str(tmp_path))
    found, expected = compare(two_ranks, set_up, gemma, {"dp_shard": 2}, key=f"gemma {name}")
    assert differences(found, expected, ("loss", "grad_norm", *TRAINERS[name][-1])) == {}


def test_they_are_with_accumulated_gradients(two_ranks: RankPool, qwen: Path, tmp_path: Path) -> None:
    set_up = partial(build, name="SFT", output=str(tmp_path), gradient_accumulation_steps=2)
    found, expected = compare(two_ranks, set_up, qwen, {"dp_shard": 2}, key="accumulated")
    assert differences(found, expected) == {}


def _logged_images(folder: Path, output: Path, axes: dict[str, int] | None) -> list[int]:
    forget_accelerate()
    model, mesh = model_on(folder, axes)
    trainer = build(model, mesh, dp_size(axes), name="GRPO", output=str(output), max_steps=1)
    trainer.train()
    return [len(images or ()) for images in trainer._logs["images"]]


def test_images_are_logged_where_some_ranks_have_none(two_ranks: RankPool, qwen: Path, tmp_path: Path) -> None:
    expected = _logged_images(qwen, tmp_path, None)
    assert 0 in expected
    assert max(expected) > 0
    assert two_ranks.run(_logged_images, qwen, tmp_path, {"dp_shard": 2}, timeout=200) == [expected, expected]


def _over_cp(folder: Path, output: Path) -> list[str]:
    """What trainers say at construction."""
    forget_accelerate()
    model, mesh = model_on(folder, {"cp": 2})
    said = []
    for name in ("SFT", "GRPO"):
        try:
            build(model, mesh, 1, name=name, output=str(output))
        except OptionError as error:
            said.append(str(error))
    return said


def test_images_under_context_parallelism_are_refused(two_ranks: RankPool, gemma: Path, tmp_path: Path) -> None:
    for said in two_ranks.run(_over_cp, gemma, tmp_path):
        assert [line.partition(":")[0].split()[:2] for line in said] == [["the", "column"]] * 2
