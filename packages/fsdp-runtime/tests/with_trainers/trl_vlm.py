"""``trl.SFTTrainer`` with images on a mesh against the trainer of one process; run by ``nox -s trainers``."""

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

from fsdp_runtime import FsdpRuntimeError
from fsdp_runtime.trainers import SFTTrainer
from harness.models import IMAGE_TOKEN, VOCAB
from harness.ranks import RankPool
from harness.trainers import (
    BATCH,
    COMMON,
    compare,
    differences,
    forget_accelerate,
    model_on,
    tokenizer,
    write_checkpoint,
)

MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})
SIZE, TOKENS = 8, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), architecture="Gemma3ForConditionalGeneration")


class Processor(ProcessorMixin):
    """Words, and images of 8 by 8 that stand at the beginning of a text as four tokens."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)

    def __call__(self, images: Any = None, text: Any = None, **_: Any) -> BatchFeature:
        rows = [[IMAGE_TOKEN] * TOKENS + self.tokenizer(each)["input_ids"] for each in text]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        pixels = [np.asarray(image, dtype=np.float32) / 255 - 0.5 for each in images for image in each]
        return BatchFeature(
            {
                "input_ids": ids,
                "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
                "token_type_ids": (ids == IMAGE_TOKEN).long(),
                "pixel_values": torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2),
            }
        )


def rows(count: int = 16) -> Dataset:
    """A picture and a text each, of several lengths."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        pixels = torch.randint(0, 256, (SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
        words = torch.randint(4, VOCAB - 1, (4 + index % 5,), generator=generator).tolist()
        found.append({"images": [Image.fromarray(pixels.numpy())], "text": " ".join(f"t{word}" for word in words)})
    return Dataset.from_list(found)


def build(model: Any, mesh: Any, dp: int, *, output: str, **options: Any) -> Any:
    """A trainer of three steps, on a mesh or, for ``mesh=None``, TRL's own."""
    given = {
        **COMMON,
        "output_dir": output,
        "per_device_train_batch_size": BATCH // dp,
        "max_steps": 3,
        "gradient_checkpointing": False,
        "max_length": None,
        "remove_unused_columns": False,  # else TRL drops the text
    }
    common = {
        "model": model,
        "args": trl.SFTConfig(**{**given, **options}),
        "train_dataset": rows(),
        "processing_class": Processor(tokenizer()),
    }
    return trl.SFTTrainer(**common) if mesh is None else SFTTrainer(**common, mesh=mesh)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_figures_and_weights_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    found, expected = compare(pool, partial(build, output=str(tmp_path)), folder, axes, key="vlm")
    assert differences(found, expected, ("loss", "grad_norm", "entropy", "mean_token_accuracy")) == {}


def _over_cp(folder: Path, output: Path) -> str:
    forget_accelerate()
    try:
        model, mesh = model_on(folder, {"cp": 2})
        build(model, mesh, 1, output=str(output)).train()
    except FsdpRuntimeError as error:
        return str(error)
    return "accepted"


def test_images_under_context_parallelism_are_refused(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert all(said != "accepted" for said in two_ranks.run(_over_cp, folder, tmp_path))
