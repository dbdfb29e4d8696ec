"""Inputs of tiny multimodal models: several media in a row, a row without any.

A row's placeholder tokens are as many as the features that the model itself makes of its media.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from coverage.multimodal_media import COUNT, FRAMES, IMAGES_PER_ROW, media_tensors
from coverage.multimodal_rows import (
    FEATURES,
    FRAMES_APART,
    FRAMES_ARE_IMAGES,
    VIDEO_SPANS,
    WITHOUT_PLACEHOLDERS,
)

#: Text tokens before, between and after the media of a row.
_TEXT = 2
_IDS = 100
#: Tokens of a decoder that reads an encoder.
_DECODED = 5
#: Model types with such a decoder that do not say so; that of Diffusion Gemma draws random tokens without.
DECODES = ("t5gemma2", "florence2", "diffusion_gemma")
#: What marks a token in ``mm_token_type_ids``.
_KINDS = {"image": 1, "video": 2, "audio": 3}


def multimodal_inputs(model: nn.Module, *, media: str = "image", seed: int = 1) -> dict[str, Any]:
    """Return the inputs of a batch with media of one kind; the same on every rank.

    Args:
        model: a tiny model.
        media: ``"image"``, ``"video"`` or ``"audio"``.
        seed: of the random numbers.
    """
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if build := WITHOUT_PLACEHOLDERS.get(config.model_type):
        return {name: _cast(value, dtype) for name, value in build(config, generator).items()}
    tensors = {name: _cast(value, dtype) for name, value in media_tensors(model, media, generator).items()}
    counts = _features(model, media, tensors)
    parts = FRAMES if media == "video" and config.model_type in FRAMES_APART else 1
    ids, kinds = _rows(counts, placeholder(config, media), generator, parts=parts)
    if media == "video" and config.model_type in VIDEO_SPANS:
        steps = kinds.diff(dim=1)  # text stands before and after
        ids[:, :-1][steps == 1] = config.video_start_token_id
        ids[:, 1:][steps == -1] = config.video_end_token_id
    inputs = {"input_ids": ids, **tensors}
    takes = signature(type(model).forward).parameters
    if "mm_token_type_ids" in takes:
        inputs["mm_token_type_ids"] = kinds * _KINDS[media]
    if "token_type_ids" in takes:
        inputs["token_type_ids"] = kinds
    if getattr(config, "is_encoder_decoder", False) or config.model_type in DECODES:
        inputs["decoder_input_ids"] = torch.randint(3, _IDS, (len(ids), _DECODED), generator=generator)
    return inputs


def _features(model: nn.Module, media: str, tensors: Mapping[str, Any]) -> list[int]:
    """Return the number of features of each medium."""
    config: Any = model.config
    if count := FEATURES.get((config.model_type, media)):
        return [count] * COUNT
    methods: list[Callable[..., Any]] = [
        method for module in model.modules() if (method := getattr(module, f"get_{media}_features", None))
    ]
    names = {name for method in methods for name in signature(method).parameters}
    with torch.no_grad():
        found = methods[0](**{name: value for name, value in tensors.items() if name in names}, return_dict=True)
    features = found.pooler_output if found.get("pooler_output") is not None else found.last_hidden_state
    if isinstance(features, Tensor):
        total = features.numel() // features.shape[-1]
        return [total // COUNT] * COUNT
    return [part.numel() // part.shape[-1] for part in features]


def _rows(counts: list[int], token: int, generator: torch.Generator, *, parts: int) -> tuple[Tensor, Tensor]:
    """Return token ids with placeholders, and 1 where they are; the shorter rows are filled with text.

    Text stands between the ``parts`` of a medium, too: the frames of a video, each after its time.
    """
    rows: list[list[int]] = []
    left = iter(counts)
    for images in IMAGES_PER_ROW:
        row = [0] * _TEXT
        for _ in range(images):
            row += ([1] * (next(left) // parts) + [0] * _TEXT) * parts
        rows.append(row)
    length = max(map(len, rows)) + 1
    kinds = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    text = torch.randint(3, _IDS, kinds.shape, generator=generator)
    return torch.where(kinds == 1, token, text), kinds


def placeholder(config: Any, media: str) -> int:
    """Return the id of the token that stands for media of a kind."""
    media = "image" if config.model_type in FRAMES_ARE_IMAGES else media
    names = (f"{media}_token_id", f"{media}_token_index", f"{media}_patch_id")
    tower = getattr(config, {"image": "vision_config", "audio": "audio_config"}.get(media, ""), None)
    owners = [config, *([tower] if tower is not None else [])]
    ids = [value for owner in owners for name in names if isinstance(value := getattr(owner, name, None), int)]
    if not ids and media == "image":
        raise ValueError(f"{config.model_type} has no token for images: give one in CHANGES")
    return ids[0] if ids else placeholder(config, "image")  # frames of a video are images


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
