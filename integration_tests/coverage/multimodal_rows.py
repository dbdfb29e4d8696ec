"""Inputs of model types whose rows have no placeholders: text attends to the media, or follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from coverage.multimodal_media import IMAGES_PER_ROW

_ROWS, _LENGTH, _IDS = len(IMAGES_PER_ROW), 9, 100
_IMAGES = max(IMAGES_PER_ROW)

#: Features of a medium where no method of the model returns them.
FEATURES = {
    ("granite4_vision", "image"): 10,
    ("qwen2_audio", "audio"): 8,
    ("phi4_multimodal", "image"): 13,
    ("phi4_multimodal", "audio"): 4,
}
#: Model types that number the positions of each frame of a video for itself, with text between frames.
FRAMES_APART = {
    *("cohere_compass", "cosmos3_edge", "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp"),
}
#: Model types whose frames have the placeholder of images.
FRAMES_ARE_IMAGES = {"glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga"}
#: Those of them that tell a video's placeholders from an image's by the tokens around it.
VIDEO_SPANS = {"glm5_next"}


def _ids(generator: torch.Generator, length: int = _LENGTH) -> torch.Tensor:
    return torch.randint(3, _IDS, (_ROWS, length), generator=generator)


def _has_image() -> torch.Tensor:
    """Return which of the images of a row there are."""
    return torch.arange(_IMAGES) < torch.tensor(IMAGES_PER_ROW).unsqueeze(1)


def _one_image(config: Any, generator: torch.Generator) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {
        "input_ids": _ids(generator),
        "pixel_values": torch.randn(_ROWS, 3, size, size, generator=generator),
    }


def _idefics(config: Any, generator: torch.Generator) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {
        "input_ids": _ids(generator),
        "pixel_values": torch.randn(_ROWS, _IMAGES, 3, size, size, generator=generator),
        "image_attention_mask": _has_image().unsqueeze(1).expand(-1, _LENGTH, -1).long(),
    }


def _mllama(config: Any, generator: torch.Generator) -> dict[str, Any]:
    vision = config.vision_config
    tiles = vision.max_num_tiles
    pixels = torch.randn(_ROWS, _IMAGES, tiles, 3, vision.image_size, vision.image_size, generator=generator)
    present = _has_image()
    shown = present.unsqueeze(-1).repeat(1, 1, tiles).long()
    shown[..., 0] = 1  # as the processor has it for absent images
    return {
        "input_ids": _ids(generator),
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.full((_ROWS, _IMAGES), 6) * present,
        "aspect_ratio_mask": shown,
        "cross_attention_mask": present[:, None, :, None].expand(-1, _LENGTH, -1, tiles).long(),
    }


def _kosmos(config: Any, generator: torch.Generator) -> dict[str, Any]:
    queries = config.latent_query_num
    mask = torch.zeros(_ROWS, _LENGTH + queries).long()
    mask[:, 2 : 2 + queries] = 1
    inputs = {"input_ids": _ids(generator, _LENGTH + queries), "image_embeds_position_mask": mask}
    vision = config.vision_config
    if config.model_type == "kosmos-2":
        size = vision.image_size
        return {**inputs, "pixel_values": torch.randn(_ROWS, 3, size, size, generator=generator)}
    return {**inputs, "flattened_patches": _numbered_patches(vision.patch_embed_hidden_size, generator)}


def _numbered_patches(size: int, generator: torch.Generator) -> torch.Tensor:
    """Return patches that begin with their row and their column."""
    places = 1.0 + torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(_ROWS, -1, -1)
    return torch.cat([places, torch.randn(_ROWS, 16, size, generator=generator)], -1)


def _pix2struct(config: Any, generator: torch.Generator) -> dict[str, Any]:
    return {
        "flattened_patches": _numbered_patches(config.vision_config.patch_embed_hidden_size, generator),
        "decoder_input_ids": _ids(generator),
    }


def _image_to_text(config: Any, generator: torch.Generator) -> dict[str, Any]:
    size = getattr(config, "vision_config", getattr(config, "encoder", None)).image_size
    return {
        "pixel_values": torch.randn(_ROWS, 3, size, size, generator=generator),
        "decoder_input_ids": _ids(generator),
    }


def _udop(config: Any, generator: torch.Generator) -> dict[str, Any]:
    low = torch.randint(0, 400, (_ROWS, _LENGTH, 2), generator=generator) / 1000
    return {
        "input_ids": _ids(generator),
        "bbox": torch.cat([low, low + 0.3], -1),
        "pixel_values": torch.randn(_ROWS, 3, config.image_size, config.image_size, generator=generator),
        "decoder_input_ids": _ids(generator),
    }


def _evolla(_config: Any, generator: torch.Generator) -> dict[str, Any]:
    return {
        "input_ids": _ids(generator),
        "protein_input_ids": torch.randint(4, 24, (_ROWS, 8), generator=generator),
        "protein_attention_mask": torch.ones(_ROWS, 8).long(),
    }


def _added_audio(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Return a token of text at each place of the audio, the features of both of which are added."""
    frames = 2 * config.downsample_factor * _LENGTH
    features = torch.randn(_ROWS, config.audio_config.num_mel_bins, frames, generator=generator)
    return {"input_ids": _ids(generator), "input_features": features}


def _codes(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Return a token of text and the codes of the audio at each place."""
    codes = torch.randint(
        0, config.codebook_vocab_size - 1, (_ROWS, _LENGTH, config.num_codebooks), generator=generator
    )
    return {"input_ids": torch.cat([_ids(generator).unsqueeze(-1), codes], -1)}


#: What makes all inputs, by the model type.
WITHOUT_PLACEHOLDERS: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "blip": _one_image,
    "evolla": _evolla,
    "git": _one_image,
    "idefics": _idefics,
    "kosmos-2": _kosmos,
    "kosmos-2.5": _kosmos,
    "kyutai_speech_to_text": _codes,
    "mllama": _mllama,
    "pix2struct": _pix2struct,
    "pp_formulanet": _image_to_text,
    "udop": _udop,
    "voxtral_realtime": _added_audio,
    "vision-encoder-decoder": _image_to_text,
}
