"""Inputs that the code of a model runs on: token ids, and images or audio where its forward takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from tp_plans._validate import is_integer
from tp_plans.errors import ModelError
from tp_plans.infer.bytecode import takes_argument
from tp_plans.model_tree import ModelTree
from tp_plans.module_attrs import getattr_path

Inputs = Mapping[str, Any] | tuple[Any, ...]

_ROWS, _TOKENS, _DECODED = 2, 7, 5
#: Rows and columns of an image's patches, and its pixels where no config gives a size.
_GRID, _PIXELS = 4, 32
#: Fields of a config that name a special token.
SPECIAL_TOKEN = re.compile(r".*(token|patch)_(id|index)")
#: Those that stand for a feature of an image, or of a video.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
#: Samples of a wave, and frames of a spectrogram where its number is free.
_SAMPLES, _FRAMES = 3200, 64
#: What configs call the bins of a spectrogram.
_BINS = (
    *("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"),
    *("encoder_config.num_mel_bins", "audio_config.num_mel_bins", "d_model"),
)
#: The field for the config of the vision tower.
_TOWERS = ("config.vision_config", "config.encoder.vision_config", "config.encoder", "config")


def candidate_inputs(model: nn.Module) -> Iterator[Inputs]:
    """Iterate over arguments that a small model may run on; arguments that reach most of the model come first."""
    tree = ModelTree.of(model)
    vocabulary = tree.size(tree.embedding or "", 0)
    if vocabulary is None:
        raise ModelError(f"{type(model).__name__} has no token embedding: give inputs, as inputs={{'hidden': tensor}}")
    if takes_argument(model, "pixel_values") or takes_argument(model, "flattened_patches"):
        for images, reads_tokens in product((None, 1, 4), (True, False)):
            if (inputs := _Maker.of(model, vocabulary).with_images(images, reads_tokens=reads_tokens)) is not None:
                yield inputs
    if takes_argument(model, "decoder_input_ids"):
        yield from _Maker.of(model, vocabulary).with_audio()
    yield _Maker.of(model, vocabulary).without_images()
    if (codebooks := getattr_path(model, "config.num_codebooks")) is not None and is_integer(codebooks, least=1):
        yield {"input_ids": _Maker.of(model, vocabulary).codes(codebooks)}


@dataclass(frozen=True)
class _Maker:
    """The sources of one model's inputs; every rank draws the same random numbers."""

    model: nn.Module
    vocabulary: int
    generator: torch.Generator

    @classmethod
    def of(cls, model: nn.Module, vocabulary: int) -> _Maker:
        maker = cls(model, vocabulary, torch.Generator().manual_seed(1))
        encoded = maker._number("encoder_config.vocab_size")  # a decoder of codes may have the larger table
        return maker if encoded is None else replace(maker, vocabulary=min(vocabulary, encoded))

    def without_images(self) -> Inputs:
        """Return token ids alone; for an encoder-decoder, ids for both stacks."""
        config = getattr(self.model, "config", None)
        pools = type(self.model).__name__.endswith("ForSequenceClassification")
        if not self._takes("decoder_input_ids"):
            # Without an id for padding, the last token of a row is found for one row only.
            ids = self._ids(1 if pools and getattr(config, "pad_token_id", None) is None else _ROWS, _TOKENS)
            return {"input_ids": ids} if self._takes("input_ids") else (ids,)
        if not pools:
            return {"input_ids": self._ids(_ROWS, _TOKENS), "decoder_input_ids": self._decoded()}
        rows = self._ids(_ROWS, _TOKENS)
        rows[:, -1] = getattr(config, "eos_token_id", None) or 0  # the head classifies the hidden state of this token
        return {"input_ids": rows}

    def codes(self, codebooks: int) -> Tensor:
        """Return a token of text and the codes of the audio at each place ``[rows, tokens, 1 + codebooks]``."""
        size = self._number("codebook_vocab_size") or 2
        codes = torch.randint(0, max(1, size - 1), (_ROWS, _TOKENS, codebooks), generator=self.generator)
        text = self._ids(_ROWS, _TOKENS).clamp(max=(self._number("vocab_size") or self.vocabulary) - 1)
        return torch.cat([text.unsqueeze(-1), codes], -1)

    def with_images(self, images: int | None, *, reads_tokens: bool) -> Inputs | None:
        """Return inputs with images in each row (``None``: one, without a dim); ``None`` if none can be made."""
        decodes = self._takes("decoder_input_ids")
        if not reads_tokens and not decodes:
            return None
        try:
            inputs = self._media(images)
            if reads_tokens:
                inputs |= self._of_tokens(self._with_placeholders(inputs, images), images)
        except Exception:  # noqa: BLE001 (the code of a model may raise anything)
            return None
        return {**inputs, "decoder_input_ids": self._decoded()} if decodes else inputs

    def with_audio(self) -> Iterator[Inputs]:
        """Iterate over waves and spectrograms next to the token ids of a decoder, where the model takes these."""
        decoded = self._decoded()
        if self._takes("input_values"):
            yield {"input_values": self._random(_ROWS, _SAMPLES), "decoder_input_ids": decoded}
        bins = next((number for name in _BINS if (number := self._number(name)) is not None), None)
        if self._takes("input_features") and bins is not None:
            exact = 2 * (self._number("max_source_positions") or 0)  # frames; a convolution halves their number
            for shape in ((bins, exact or _FRAMES), (_FRAMES, bins)):
                yield {"input_features": self._random(_ROWS, *shape), "decoder_input_ids": decoded}

    def _decoded(self) -> Tensor:
        """Return the token ids of a decoder ``[rows, tokens]``, or codes of audio ``[rows, tokens, channels]``."""
        channels = self._number("decoder_config.num_channels")
        if channels is None:
            return self._ids(_ROWS, _DECODED)
        size = self._number("decoder_config.vocab_size") or self.vocabulary
        return torch.randint(0, min(size, self.vocabulary), (_ROWS, _DECODED, channels), generator=self.generator)

    def _takes(self, name: str) -> bool:
        return takes_argument(self.model, name)

    def _number(self, name: str) -> int | None:
        number = getattr_path(self.model, f"config.{name}")
        return number if is_integer(number, least=1) else None

    def _of_tower(self, *names: str) -> Any:
        """Return the first field of these names in the config of the vision tower, or of the model."""
        values = (getattr_path(self.model, f"{tower}.{name}") for name in names for tower in _TOWERS)
        return next((value for value in values if value is not None), None)

    @property
    def _special(self) -> dict[str, int]:
        fields = getattr(getattr(self.model, "config", None), "__dict__", {})
        return {name: value for name, value in fields.items() if SPECIAL_TOKEN.fullmatch(name) and is_integer(value)}

    def _ids(self, rows: int, length: int) -> Tensor:
        low = min(3, self.vocabulary - 1)
        ids = torch.randint(low, self.vocabulary, (rows, length), generator=self.generator)
        return torch.where(torch.isin(ids, torch.tensor([*self._special.values()], dtype=ids.dtype)), low, ids)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def _media(self, images: int | None) -> dict[str, Tensor]:
        if self._takes("flattened_patches"):  # each begins with its row and its column
            places = 1.0 + torch.cartesian_prod(torch.arange(_GRID), torch.arange(_GRID)).expand(_ROWS, -1, -1)
            patches = self._random(_ROWS, _GRID**2, self._of_tower("patch_embed_hidden_size"))
            return {"flattened_patches": torch.cat([places, patches], -1)}
        several = () if images is None else (images, self._tiles) if self._takes("aspect_ratio_ids") else (images,)
        size = self._of_tower("image_size") or _PIXELS
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = self._of_tower("num_channels", "in_channels") or 3
        sizes = {"image_sizes": torch.tensor([[height, width]] * _ROWS)} if self._takes("image_sizes") else {}
        return {"pixel_values": self._random(_ROWS, *several, channels, height, width), **sizes}

    @property
    def _tiles(self) -> int:
        return int(self._of_tower("max_num_tiles") or 1)

    def _with_placeholders(self, media: Mapping[str, Tensor], images: int | None) -> Tensor:
        """Return token ids, with a placeholder for every feature of the images where the model has one."""
        ids = self._ids(_ROWS, _TOKENS + (self._number("latent_query_num") or 0))
        token = next((self._special[name] for name in _PLACEHOLDERS if name in self._special), None)
        if token is None:
            return ids
        features = torch.full((_ROWS, self._features(media, images)), token)
        return torch.cat([ids[:, :2], features, ids[:, 2:]], 1)

    def _features(self, media: Mapping[str, Tensor], images: int | None) -> int:
        """Return the placeholders of a row's images: the features that the model makes, or that its config counts."""
        if count := self._number("num_query_tokens"):
            return count * (images or 1)
        if self._takes("aspect_ratio_ids"):  # blocks attend to the features, and one token stands for an image
            return images or 1
        methods = [method for module in self.model.modules() if (method := getattr(module, "get_image_features", None))]
        known = signature(methods[0]).parameters
        with torch.no_grad():
            media_output = methods[0](
                **{name: value for name, value in media.items() if name in known}, return_dict=True
            )
        pooled = media_output.get("pooler_output")
        features = media_output.last_hidden_state if pooled is None else pooled
        parts = [features] if isinstance(features, Tensor) else features
        return sum(part.numel() // int(part.shape[-1]) for part in parts) // _ROWS

    def _of_tokens(self, ids: Tensor, images: int | None) -> dict[str, Tensor]:
        """Return the token ids and their companions, under the names of the forward's arguments."""
        length = ids.shape[1]
        queries = self._number("latent_query_num") or 0
        asked = self._number("qformer_config.vocab_size") or 1
        box = torch.tensor([0.1, 0.2, 0.4, 0.6], dtype=torch.float64)
        made: dict[str, Callable[[], Tensor]] = {
            "input_ids": lambda: ids,
            "qformer_input_ids": lambda: self._ids(_ROWS, _DECODED) % asked,
            "bbox": lambda: box.expand(_ROWS, length, 4),
            "image_attention_mask": lambda: torch.ones(_ROWS, length, images or 1, dtype=torch.long),
            "aspect_ratio_ids": lambda: torch.ones(_ROWS, images or 1, dtype=torch.long),
            "aspect_ratio_mask": lambda: torch.ones(_ROWS, images or 1, self._tiles, dtype=torch.long),
            "cross_attention_mask": lambda: torch.ones(_ROWS, length, images or 1, self._tiles, dtype=torch.long),
            "image_embeds_position_mask": lambda: (torch.arange(length) < queries).long().expand(_ROWS, -1),
        }
        return {name: make() for name, make in made.items() if self._takes(name)}
