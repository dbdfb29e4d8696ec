"""Media of tiny multimodal models, with the shapes that the classes' own processors produce."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import nn

#: Media of each row of the batch.
IMAGES_PER_ROW = (2, 0, 1)
COUNT = sum(IMAGES_PER_ROW)
#: Frames of a video.
FRAMES = 2
#: Frames of a mel spectrogram where its number is fixed.
FRAMES_OF_AUDIO = {"qwen3_asr": 100}
#: Height and width of each image in patches.
GRIDS = ((4, 4), (4, 8), (8, 4))

Media = dict[str, Any]
_Builder = Callable[[Any, torch.Generator], Media]


def media_tensors(model: nn.Module, media: str, generator: torch.Generator) -> Media:
    """Return the tensors of the media of all rows."""
    config: Any = model.config
    build = BUILDERS[media].get(config.model_type)
    if build is not None:
        return build(config, generator)
    if media == "audio":
        return _mel_frames(model, generator)
    takes = signature(type(model).forward).parameters
    if f"{media}_grid_thw" in takes:
        return _patches(config, media, generator)
    return _pixels(model, media, generator)


def _pixels(model: Any, media: str, generator: torch.Generator) -> Media:
    config = model.config
    size = image_size(config)
    if media == "video":  # frames are images
        return {"pixel_values_videos": torch.randn(COUNT, FRAMES, 3, size, size, generator=generator)}
    if pinpoints := getattr(config, "image_grid_pinpoints", None):  # a small picture of the image, and its tiles
        height, width = pinpoints[0]
        tiles = 1 + (height // size) * (width // size)
        pixels = torch.randn(COUNT, tiles, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]] * COUNT)}
    pixels = torch.randn(COUNT, 3, size, size, generator=generator)
    sizes = {"image_sizes": torch.tensor([[size, size]] * COUNT)} if _needs_sizes(model) else {}
    return {"pixel_values": pixels, **sizes}


def image_size(config: Any) -> int:
    """Return the height of an image in pixels."""
    owner = config.encoder if config.model_type == "t5gemma2" else config
    size = getattr(owner.vision_config, "image_size", None) or 8
    return size if isinstance(size, int) else size[0]


def _needs_sizes(model: Any) -> bool:
    owner = model if hasattr(model, "get_image_features") else getattr(model, "model", None)
    if not hasattr(owner, "get_image_features"):
        return False
    sizes = signature(owner.get_image_features).parameters.get("image_sizes")
    return sizes is not None and sizes.default is sizes.empty


def _patches(config: Any, media: str, generator: torch.Generator) -> Media:
    """Return flattened patches ``[patches, channels * time * patch * patch]`` and their grids."""
    vision = config.vision_config
    patch = next(size for key in ("patch_size", "spatial_patch_size") if (size := getattr(vision, key, None)))
    time = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    return _in_grids(media, (3 * time * patch * patch,), generator)


def _in_grids(media: str, shape: tuple[int, ...], generator: torch.Generator, *, cells: int = 1) -> Media:
    """Return patches of a shape, ``cells`` of which are one cell of the grids."""
    suffix, frames = ("", 1) if media == "image" else ("_videos", FRAMES)
    grid = torch.tensor([[frames, *size] for size in GRIDS])
    pixels = torch.randn(int(grid.prod(-1).sum()) * cells, *shape, generator=generator)
    return {f"pixel_values{suffix}": pixels, f"{media}_grid_thw": grid}


def _square_patches(media: str) -> _Builder:
    def build(config: Any, generator: torch.Generator) -> Media:
        patch = config.vision_config.patch_size
        return _in_grids(media, (3, patch, patch), generator)

    return build


def _with_merge_sizes(media: str) -> _Builder:
    def build(config: Any, generator: torch.Generator) -> Media:
        return {**_patches(config, media, generator), f"{media}_merge_sizes": torch.full((COUNT,), 2)}

    return build


def _merged_patches(config: Any, generator: torch.Generator) -> Media:
    vision = config.vision_config
    side = vision.spatial_merge_size * vision.patch_size
    return _in_grids("image", (side, side, 3), generator)


def _images_by_row(config: Any, generator: torch.Generator) -> Media:
    """Return images ``[rows, images, 3, size, size]``; rows with fewer images are filled with zeros."""
    size = image_size(config)
    rows = torch.zeros(len(IMAGES_PER_ROW), max(IMAGES_PER_ROW), 3, size, size)
    for row, count in zip(rows, IMAGES_PER_ROW, strict=True):
        row[:count] = torch.randn(count, 3, size, size, generator=generator)
    return {"pixel_values": rows}


def _tiles_by_row(config: Any, generator: torch.Generator) -> Media:
    mask = torch.arange(max(IMAGES_PER_ROW)) < torch.tensor(IMAGES_PER_ROW).unsqueeze(1)
    return {**_images_by_row(config, generator), "pixel_attention_mask": mask}


def _patches_of_any_size(_config: Any, generator: torch.Generator) -> Media:
    return {
        "pixel_values": torch.randn(COUNT, 16, 12, generator=generator),
        "spatial_shapes": torch.tensor([[4, 4]] * COUNT),
        "pixel_attention_mask": torch.ones(COUNT, 16).long(),
    }


def _two_resolutions(config: Any, generator: torch.Generator) -> Media:
    size, high = image_size(config), config.high_res_vision_config.image_size
    return {
        "pixel_values": torch.randn(COUNT, 3, size, size, generator=generator),
        "high_res_pixel_values": torch.randn(COUNT, 3, high, high, generator=generator),
    }


def _with_positions(media: str) -> _Builder:
    """Return images as patches next to their places, padded to as many."""

    def build(config: Any, generator: torch.Generator) -> Media:
        vision = config.vision_config
        side = getattr(vision, "pooling_kernel_size", None) or 3
        patch = getattr(vision, "model_patch_size", None) or vision.patch_size
        frames = COUNT * (FRAMES if media == "video" else 1)
        places = torch.cartesian_prod(torch.arange(2 * side), torch.arange(2 * side)).flip(-1)
        pixels = torch.rand(frames, len(places), 3 * patch * patch, generator=generator)
        if media == "image":
            return {"pixel_values": pixels, "image_position_ids": places.expand(frames, -1, -1)}
        return {
            "pixel_values_videos": pixels,
            "video_position_ids": places.expand(frames, -1, -1),
            "num_frames_per_video": torch.full((COUNT,), FRAMES),
        }

    return build


def _packed_strips(media: str) -> _Builder:
    """Return the patches of all images side by side ``[1, 3, patch, patches * patch]``."""

    def build(config: Any, generator: torch.Generator) -> Media:
        patch = config.vision_config.patch_size
        sizes = torch.tensor(GRIDS, dtype=torch.int32)
        pixels = torch.randn(1, 3, patch, int(sizes.prod(-1).sum()) * patch, generator=generator)
        suffix = "" if media == "image" else "_videos"
        return {f"pixel_values{suffix}": pixels, f"target_sizes{suffix}": sizes}

    return build


def _crops_with_pooling(media: str) -> _Builder:
    """Return flat patches of crops, and which of them each token pools."""

    def build(config: Any, generator: torch.Generator) -> Media:
        patch, patches = config.vision_config.patch_size, config.vision_config.num_position_embeddings
        frames = FRAMES if media == "video" else 1
        pixels = torch.randn(COUNT * frames, patches, 3 * patch * patch, generator=generator)
        pooling = torch.arange(COUNT * frames * patches).reshape(-1, 4)
        side = int((patches // 4) ** 0.5)
        if media == "video":
            grids = torch.tensor([[frames, side, side]] * COUNT)
            return {"pixel_values_videos": pixels, "video_token_pooling": pooling, "video_grids": grids}
        return {
            "pixel_values": pixels,
            "image_token_pooling": pooling,
            "image_grids": torch.tensor([[side, side, 0, 0]] * COUNT),
            "image_num_crops": torch.ones(COUNT).long(),
        }

    return build


def _flat_patches_with_heights(config: Any, generator: torch.Generator) -> Media:
    vision = config.vision_config
    grid = torch.tensor(GRIDS)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * vision.patch_size**2, generator=generator)
    return {"pixel_values": pixels, "image_grid_hw": grid}


def _crops_by_image(config: Any, generator: torch.Generator) -> Media:
    """Return a small picture of each image and its crops."""
    size = config.vision_config.crop_size
    return {
        "image_pixel_values": torch.randn(COUNT, 2, 3, size, size, generator=generator),
        "image_sizes": torch.tensor([[size, size]] * COUNT),
        "image_attention_mask": torch.ones(COUNT, 2, size // config.vision_config.patch_size, size // 2).long(),
    }


def _codes(_config: Any, generator: torch.Generator) -> Media:
    return {"pixel_values": torch.randn(COUNT, 3, 8, 8, generator=generator)}


def _codes_with_sizes(_config: Any, generator: torch.Generator) -> Media:
    return {
        "pixel_values": torch.randn(COUNT, 3, 8, 8, generator=generator),
        "image_sizes": torch.tensor([[8, 8]] * COUNT),
    }


def _folded(config: Any, generator: torch.Generator) -> Media:
    vision = config.vision_config
    shape = (COUNT, vision.temporal_patch_size, vision.patch_size, vision.patch_size, 3)
    return {"pixel_values": torch.randn(shape, generator=generator)}


def _flat_patches(config: Any, generator: torch.Generator) -> Media:
    return {"pixel_values": torch.randn(COUNT, 4, 3 * config.patch_size**2, generator=generator)}


def _with_questions(config: Any, generator: torch.Generator) -> Media:
    size = config.vision_config.image_size
    ids = torch.randint(3, 50, (COUNT, 5), generator=generator)
    shape = (COUNT, 3, size, size) if config.model_type == "instructblip" else (COUNT, FRAMES, 3, size, size)
    return {"pixel_values": torch.randn(shape, generator=generator), "qformer_input_ids": ids}


def _mel_frames(model: nn.Module, generator: torch.Generator) -> Media:
    """Return mel spectrograms ``[clips, bins, frames]``, all of whose frames are valid."""
    config: Any = model.config
    audio = config.audio_config
    frames = FRAMES_OF_AUDIO.get(config.model_type) or 2 * getattr(audio, "max_source_positions", 16)
    features = torch.randn(COUNT, getattr(audio, "num_mel_bins", 16), frames, generator=generator)
    takes = signature(type(model).forward).parameters
    masks = [name for name in ("feature_attention_mask", "input_features_mask") if name in takes]
    return {"input_features": features, **{name: torch.ones(COUNT, frames).long() for name in masks}}


def _frames_first(bins: Callable[[Any], int], *, mask: bool, frames: int = 32) -> _Builder:
    """Return features ``[clips, frames, bins]``."""

    def build(config: Any, generator: torch.Generator) -> Media:
        features = torch.randn(COUNT, frames, bins(config), generator=generator)
        return {
            "input_features": features,
            **({"input_features_mask": torch.ones(COUNT, frames).bool()} if mask else {}),
        }

    return build


def _chunks_of_clips(config: Any, generator: torch.Generator) -> Media:
    audio = config.audio_config
    frames = 2 * audio.max_source_positions
    return {
        "input_features": torch.randn(COUNT, audio.num_mel_bins, frames, generator=generator),
        "input_features_mask": torch.ones(COUNT, frames).long(),
        "padding_mask": torch.ones(COUNT, config.audio_chunk_size).long(),
    }


def _discrete_frames(config: Any, generator: torch.Generator) -> Media:
    audio = config.audio_config
    shape = (COUNT, 4, audio.num_mel_bins if hasattr(audio, "num_mel_bins") else audio.n_mel_bins)
    return {
        "audio_input_ids": torch.randint(0, audio.mel_vocab_size, shape, generator=generator),
        "audio_input_ids_mask": torch.ones(COUNT, 4).long(),
    }


def _waves(samples: Callable[[Any], tuple[int, ...]], **more: Any) -> _Builder:
    def build(config: Any, generator: torch.Generator) -> Media:
        return {"input_values": torch.randn(COUNT, *samples(config), generator=generator), **more}

    return build


def _phi_audio(config: Any, generator: torch.Generator) -> Media:
    frames = 32
    features = torch.randn(COUNT, frames, config.audio_config.input_size, generator=generator)
    return {
        "audio_input_features": features,
        "audio_embed_sizes": torch.full((COUNT,), frames // config.audio_config.time_reduction),
        "audio_attention_mask": torch.ones(COUNT, frames).bool(),
    }


#: What makes the media of model types whose tensors are of their own kind.
BUILDERS: dict[str, dict[str, _Builder]] = {
    "image": {
        "apertus1p5": _codes_with_sizes,
        "chameleon": _codes,
        "deepseek_vl_hybrid": _two_resolutions,
        "diffusion_gemma": _with_positions("image"),
        "emu3": _codes_with_sizes,
        "fuyu": _flat_patches,
        "gemma4": _with_positions("image"),
        "gemma4_unified": _with_positions("image"),
        "granite_docling": _tiles_by_row,
        "idefics2": _images_by_row,
        "idefics3": _images_by_row,
        "inkling2": _merged_patches,
        "inkling2_loop": _merged_patches,
        "inkling_mm_model": _folded,
        "instructblip": _with_questions,
        "instructblipvideo": _with_questions,
        "kimi_k25": _square_patches("image"),
        "lfm2_vl": _patches_of_any_size,
        "minicpm_ocr": _packed_strips("image"),
        "minicpmv4_6": _packed_strips("image"),
        "minicpmv4_7": _packed_strips("image"),
        "molmo2": _crops_with_pooling("image"),
        "nemotron_h_omni": _flat_patches_with_heights,
        "paddleocr_vl": _square_patches("image"),
        "phi4_multimodal": _crops_by_image,
        "smolvlm": _images_by_row,
        "video_llama_3": _with_merge_sizes("image"),
    },
    "video": {
        "instructblipvideo": _with_questions,
        "gemma4": _with_positions("video"),
        "gemma4_unified": _with_positions("video"),
        "kimi_k25": _square_patches("video"),
        "minicpm_ocr": _packed_strips("video"),
        "minicpmv4_6": _packed_strips("video"),
        "minicpmv4_7": _packed_strips("video"),
        "molmo2": _crops_with_pooling("video"),
        "video_llama_3": _with_merge_sizes("video"),
    },
    "audio": {
        "fun_asr_nano": _frames_first(lambda config: config.audio_config.num_mel_bins * 7, mask=True),
        "gemma4": _frames_first(lambda config: config.audio_config.subsampling_conv_channels[0], mask=True),
        "gemma4_unified": _frames_first(lambda config: config.audio_config.audio_embed_dim, mask=True, frames=8),
        "granite_speech": _frames_first(lambda config: config.encoder_config.input_dim, mask=False, frames=30),
        "granite_speech_plus": _frames_first(lambda config: config.encoder_config.input_dim, mask=False, frames=30),
        "inkling_mm_model": _discrete_frames,
        "moss_transcribe_diarize": _chunks_of_clips,
        "muse_spark": _waves(lambda config: (4 * config.audio_config.samples_per_token,)),
        "nemotron_h_omni": _frames_first(lambda config: config.audio_config.num_mel_bins, mask=True, frames=64),
        "nemo_speechlm": _frames_first(
            lambda config: config.audio_config.asr_config.num_mel_bins, mask=True, frames=64
        ),
        "omniasr": _waves(lambda config: (1, 2000)),
        "phi4_multimodal": _phi_audio,
        "vibevoice_asr": _waves(
            lambda config: (1, 4 * config.acoustic_tokenizer_encoder_config.hop_length), sample=False
        ),
    },
}
#: Builders whose tensors begin with the rows of the batch.
MEDIA_BY_ROW = (_images_by_row, _tiles_by_row)
