"""Tiny models of every task class: classifiers, question answering, trunks alone, masked and seq2seq models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from coverage.heads_sizes import CHANGES, OTHER_INPUTS, SIZES
from coverage.heads_speech import SPEECH_INPUTS, SPEECH_SIZES
from coverage.multimodal import multimodal_config
from coverage.shrink import HIDDEN, VOCAB
from coverage.table import UNBUILDABLE, coverage_entries, memory_filled, prepare, text_fields
from harness.parity import padding_mask

BATCH, LENGTH = 3, 7  # odd, so that the sequence divides by no axis
#: The kinds of rows: padding on either side, none in the first row; with labels where the class takes them.
KINDS = ("left padding", "right padding")

#: The head of a row: transformers' mapping of its classes, and the number of labels.
DECODER_HEADS: dict[str, tuple[str, int]] = {
    "sequence classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", 3),
    "reward": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", 1),
    "token classification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", 3),
    "question answering": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", 2),
    "trunk": ("MODEL_MAPPING_NAMES", 2),
}
#: The further heads of models that are no decoders.
OTHER_HEADS: dict[str, tuple[str, int]] = {
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", 2),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", 2),
}
#: Recognizers of speech that are not among the multimodal models.
SPEECH = "speech seq2seq"
SPEECH_HEADS = {SPEECH: ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", 2)}
HEADS = DECODER_HEADS | OTHER_HEADS | SPEECH_HEADS
#: Models with towers, whose heads are measured with text alone.
_MULTIMODAL = ("emu3", "t5gemma2")


@dataclass(frozen=True)
class HeadRow:
    """One class of one model.

    Args:
        model_type: the config's ``model_type``.
        head: the name of the head in :data:`HEADS`.
        class_name: the class.
        labels: the number of labels; ``None`` for that of the head in :data:`HEADS`.
    """

    model_type: str
    head: str
    class_name: str
    labels: int | None = None


@cache
def head_rows() -> tuple[HeadRow, ...]:
    """Return every row: all heads of the coverage table's models, and of the masked and seq2seq ones."""
    decoders = dict.fromkeys(
        entry.model_type for name, entry in coverage_entries().items() if entry.model_type and name not in UNBUILDABLE
    )
    known = {*decoders, *OTHER_INPUTS}
    others = dict.fromkeys(name for head in OTHER_HEADS for name in _classes(head) if name not in known)
    chosen = [(name, DECODER_HEADS) for name in decoders] + [
        (name, {**OTHER_HEADS, **DECODER_HEADS}) for name in others
    ]
    chosen += [(name, SPEECH_HEADS) for name in SPEECH_INPUTS]
    return tuple(
        HeadRow(name, head, _classes(head)[name]) for name, heads in chosen for head in heads if name in _classes(head)
    )


@cache
def _classes(head: str) -> Mapping[str, str]:
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, HEADS[head][0])
    return {name: found if isinstance(found, str) else found[0] for name, found in mapping.items()}


def head_model(row: HeadRow, *, seed: int = 0) -> nn.Module:
    """Return the tiny jittered float64 model of a row, without dropout, the same on every rank."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(seed)
    entry = coverage_entries().get(row.model_type)
    changes = {**(entry.changes if entry else {}), "num_labels": row.labels or HEADS[row.head][1]}
    sizes = (SPEECH_SIZES if row.head == SPEECH else SIZES).get(row.model_type, {})
    changes = {**sizes, **changes, **CHANGES.get((row.model_type, row.head), {})}
    if row.model_type in _MULTIMODAL:
        config = multimodal_config(row.model_type)
        config.num_labels = changes["num_labels"]
    else:
        config = CONFIG_MAPPING[row.model_type](**text_fields(row.model_type, changes))
    model_class: Any = getattr(transformers, row.class_name)
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
        config.num_labels = changes["num_labels"]
    config.use_cache = False
    options = {"experts_implementation": "eager"} if model_class._can_set_experts_implementation() else {}
    with memory_filled():
        model: nn.Module = model_class._from_config(config, **options).train(row.model_type == "reformer")
    prepare(model, torch.float64)
    return model


def head_inputs(model: nn.Module, row: HeadRow, kind: str) -> dict[str, Tensor]:
    """Return the keyword arguments of a forward, with labels where the class takes them."""
    generator = torch.Generator().manual_seed(1)
    if row.head == SPEECH:
        heard = SPEECH_INPUTS[row.model_type](generator)
        return heard if "decoder_input_ids" in heard else {**heard, "labels": _decoded(generator)}
    length = LENGTH + (row.model_type == "reformer")  # a multiple of its chunks
    ids = torch.randint(3, VOCAB, (BATCH, length), generator=generator)
    takes = inspect.signature(type(model).forward).parameters
    mask = padding_mask(ids, kind.partition(" ")[0])
    if "decoder_input_ids" in takes and row.head in ("sequence classification", "reward"):
        ids[torch.arange(BATCH), mask.cumsum(1).argmax(1)] = 2  # the last token, whose hidden state is classified
    if (row.model_type, row.head) == ("longformer", "question answering"):
        ids[:, [LENGTH // 2 - 1, LENGTH // 2, LENGTH // 2 + 1]] = model.config.sep_token_id  # three, as it requires
    inputs = {"input_ids": ids * mask, "attention_mask": mask}  # the tiny models pad with id 0
    if "input_ids" not in takes:  # Perceiver alone
        return {"inputs": torch.randn(BATCH, length, HIDDEN, generator=generator).double(), "attention_mask": mask}
    inputs |= _labels(row, mask, generator) if {"labels", "start_positions"} & takes.keys() else {}
    if row.model_type == "fsmt" and row.head == "seq2seq":  # its code makes them of input_ids, not of labels
        inputs["decoder_input_ids"] = inputs["labels"]
    if "decoder_input_ids" in takes and "labels" not in inputs and "start_positions" not in inputs:
        inputs["decoder_input_ids"] = torch.randint(3, VOCAB, (BATCH, LENGTH - 2), generator=generator)
    return inputs


def _labels(row: HeadRow, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    labels = row.labels or HEADS[row.head][1]
    match row.head:
        case "sequence classification":
            return {"labels": torch.randint(labels, (BATCH,), generator=generator)}
        case "reward":
            return {"labels": torch.randn(BATCH, generator=generator).double()}
        case "token classification":
            return {"labels": torch.randint(labels, mask.shape, generator=generator).where(mask.bool(), -100)}
        case "question answering":
            spans = torch.randint(LENGTH, (2, BATCH), generator=generator)
            return {"start_positions": spans[0], "end_positions": spans[1]}
        case "masked":
            return {"labels": torch.randint(3, VOCAB, mask.shape, generator=generator).where(mask.bool(), -100)}
        case "seq2seq":
            return {"labels": _decoded(generator)}
    return {}


def _decoded(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH - 2), generator=generator)
