"""Inputs of tiny multimodal models: several images in a row, a row without an image, video and audio.

The media tensors have the shapes that the classes' own processors produce.  A row's placeholder tokens are as many as
the features that the model itself makes of its media.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

#: Images of each row of the batch.
IMAGES_PER_ROW = (2, 0, 1)
#: Text tokens before, between and after the media of a row.
_TEXT = 2
_IDS = 100
#: Model types whose images come as ``[rows, images, 3, size, size]``.
_IMAGES_BY_ROW = ("idefics2", "idefics3", "smolvlm")
#: Shapes of a patch that is not flat.
PATCH_SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "kimi_k25": lambda time, patch: (3, patch, patch),
    "paddleocr_vl": lambda time, patch: (3, patch, patch),
}
_WITH_BATCH_DIM = ("paddleocr_vl",)


def multimodal_inputs(model: nn.Module, *, media: str = "image", seed: int = 1) -> dict[str, Any]:
    """Return the inputs of a batch with media of one kind; the same on every rank.

    Args:
        model: a tiny model.
        media: ``"image"``, ``"video"`` or ``"audio"``.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    tensors = {name: _cast(value, dtype) for name, value in media_tensors(model, media, generator).items()}
    counts = _features(model, media, tensors)
    ids, kinds = _rows(counts, _placeholder(model.config, media), generator)
    inputs = {"input_ids": ids, **tensors}
    takes = signature(type(model).forward).parameters
    if "mm_token_type_ids" in takes:
        inputs["mm_token_type_ids"] = kinds * {"image": 1, "video": 2, "audio": 3}[media]
    if "token_type_ids" in takes:
        inputs["token_type_ids"] = kinds
    return inputs


def media_tensors(model: nn.Module, media: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of the media of all rows."""
    takes = signature(type(model).forward).parameters
    if media == "audio":
        return _mel_frames(model, generator)
    suffix = "" if media == "image" else "_videos"
    if f"{media}_grid_thw" in takes:
        return _patches(model.config, f"pixel_values{suffix}", f"{media}_grid_thw", media, generator)
    size = getattr(model.config.vision_config, "image_size", None) or 8
    size = size if isinstance(size, int) else size[0]
    images = sum(IMAGES_PER_ROW)
    if "spatial_shapes" in takes:  # patches of images of different sizes
        return {
            "pixel_values": torch.randn(images, 16, 12, generator=generator),
            "spatial_shapes": torch.tensor([[4, 4]] * images),
            "pixel_attention_mask": torch.ones(images, 16).long(),
        }
    if model.config.model_type in _IMAGES_BY_ROW:  # rows with fewer images are filled with zeros
        rows = torch.zeros(len(IMAGES_PER_ROW), max(IMAGES_PER_ROW), 3, size, size)
        for row, count in zip(rows, IMAGES_PER_ROW, strict=True):
            row[:count] = torch.randn(count, 3, size, size, generator=generator)
        return {"pixel_values": rows}
    if pinpoints := getattr(model.config, "image_grid_pinpoints", None):  # a small picture of the image, and its tiles
        height, width = pinpoints[0]
        tiles = 1 + (height // size) * (width // size)
        pixels = torch.randn(images, tiles, 3, size, size, generator=generator)
        return {f"pixel_values{suffix}": pixels, "image_sizes": torch.tensor([[height, width]] * images)}
    pixels = torch.randn(images, 3, size, size, generator=generator)
    sizes = {"image_sizes": torch.tensor([[size, size]] * images)} if _needs_sizes(model) else {}
    return {f"pixel_values{suffix}": pixels, **sizes}


def _needs_sizes(model: Any) -> bool:
    sizes = signature(_owner(model, "image").get_image_features).parameters.get("image_sizes")
    return sizes is not None and sizes.default is sizes.empty


def _patches(config: Any, name: str, grid_name: str, media: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Return flattened patches ``[patches, channels * time * patch * patch]`` and their grids."""
    vision = config.vision_config
    frames = 2 if media == "video" else 1
    grid = torch.tensor([[frames, 4, 4], [frames, 4, 8], [frames, 8, 4]][: sum(IMAGES_PER_ROW)])
    patch = next(size for key in ("patch_size", "spatial_patch_size") if (size := getattr(vision, key, None)))
    time = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    shape = PATCH_SHAPES.get(config.model_type, lambda time, patch: (3 * time * patch * patch,))(time, patch)
    pixels = torch.randn(int(grid.prod(-1).sum()), *shape, generator=generator)
    return {name: pixels.unsqueeze(0) if config.model_type in _WITH_BATCH_DIM else pixels, grid_name: grid}


def _mel_frames(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    audio = model.config.audio_config
    bins = getattr(audio, "num_mel_bins", 16)
    frames = 2 * getattr(audio, "max_source_positions", 16)
    features = torch.randn(sum(IMAGES_PER_ROW), bins, frames, generator=generator)
    takes = signature(type(model).forward).parameters
    masks = [name for name in ("feature_attention_mask", "input_features_mask") if name in takes]
    return {"input_features": features, **{name: torch.ones(len(features), frames).long() for name in masks}}


def _features(model: nn.Module, media: str, tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the number of features of each medium."""
    get: Callable[..., Any] = getattr(_owner(model, media), f"get_{media}_features")
    with torch.no_grad():
        found = get(**tensors, return_dict=True).pooler_output
    if isinstance(found, Tensor):
        total = found.numel() // found.shape[-1]
        return [total // sum(IMAGES_PER_ROW)] * sum(IMAGES_PER_ROW)
    return [part.numel() // part.shape[-1] for part in found]


def _owner(model: Any, media: str) -> Any:
    """Return the module that runs the tower: the model, or the one inside it."""
    return model if hasattr(model, f"get_{media}_features") else model.model


def _rows(counts: list[int], placeholder: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return token ids with placeholders, and 1 where they are; the shorter rows are filled with text."""
    rows: list[list[int]] = []
    left = iter(counts)
    for images in IMAGES_PER_ROW:
        row = [0] * _TEXT
        for _ in range(images):
            row += [1] * next(left) + [0] * _TEXT
        rows.append(row)
    length = max(map(len, rows)) + 1
    kinds = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    text = torch.randint(3, _IDS, kinds.shape, generator=generator)
    return torch.where(kinds == 1, placeholder, text), kinds


def _placeholder(config: Any, media: str) -> int:
    names = (f"{media}_token_id", f"{media}_token_index", f"{media}_patch_id")
    return next(value for name in names if isinstance(value := getattr(config, name, None), int))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
