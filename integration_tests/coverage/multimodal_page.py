"""The coverage page on vision-language and audio-language models: ours next to transformers' own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coverage.cells import NO_PLAN, Cell, mark, table, tally
from coverage.multimodal_absent import COLUMNS

#: The key of the results that holds the rows.
KEY = "multimodal"
#: Columns: the name of what was measured, and its title.
_OURS = {"TP": "TP", "SP": "SP"}
MEDIA = ("video", "audio")
#: What comes before the reason why an inferred plan was not used.
_UNDECIDED = "They could not be decided by running it: "
_MOSTLY = 0.95

#: Model types of ``AutoModelForImageTextToText`` and ``AutoModelForMultimodalLM`` without a row, and why.
NOT_MEASURED = {
    "fast_vlm": "its vision tower needs timm",
    "gemma3n": "its vision tower needs timm",
    "inkling_mm_model": "its vision tower needs scipy",
    "mistral4": "a language model alone",
    "perception_lm": "its vision tower needs timm",
    "pi0": "returns actions of a robot and no logits",
    "qwen2_5_omni": "generates only; its model with a loss is qwen2_5_omni_thinker",
    "qwen3_omni_moe": "generates only; its model with a loss is qwen3_omni_moe_thinker",
}

#: Those that take no images, with the media that they take.
WITHOUT_IMAGES = {
    "fun_asr_nano": "audio",
    "glmasr": "audio",
    "granite_speech": "audio",
    "granite_speech_plus": "audio",
    "instructblipvideo": "video",
    "moss_transcribe_diarize": "audio",
    "nemo_speechlm": "audio",
    "omniasr": "audio",
    "qwen2_audio": "audio",
    "qwen3_asr": "audio",
    "vibevoice_asr": "audio",
    "voxtral": "audio",
    "voxtral_realtime": "audio",
}


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the summary and the table of multimodal models, if any was measured."""
    rows = {name: _shown(row) for name, row in results.get(KEY, {}).items()}
    if not rows:
        return
    yield (
        "Every model type of `AutoModelForImageTextToText` and `AutoModelForMultimodalLM` that builds, tiny, in "
        "float64, on two ranks of `tp`, with towers sharded (the default): a batch with two images in one row, none in "
        "the next, one in the last, placeholders as the processors have them. A model is right (✓) where the logits "
        "and every parameter's gradient, towers and projectors too, agree on every rank with one process. The share is "
        "that of the bytes that the loss reaches whose storage is split; the second one is that of transformers' own "
        'tensor parallelism (`tp_plan="auto"`) on the same model and batch. The columns video and audio are the same '
        "with these media, with TP and with SP. Model types without a plan of transformers have one that is inferred "
        "and verified by running a small copy with images. Where it is refused for its doubts, the column inferred has "
        'the outcome of `plan="inferred"`, which accepts them. Less than 100 % are split where norms, biases and '
        "tensors of less than 0.3 % of the model, such as small convolutions and position tables, stay replicated. "
        "The columns media on one rank are FSDP2 over two data-parallel ranks, alone and with sequence parallelism "
        "(or without it where that is not right): one has the rows with two images and with one (or with the medium "
        "that the model takes), the other the row without any; logits of both, and every gradient, are those of one "
        "process that runs the two batches. Some models do not run on rows without an image in one process."
    )
    yield ""
    yield from _summary(rows)
    yield ""
    titles = ["model type", *_OURS.values(), "split", "inferred", *MEDIA, *COLUMNS]
    titles += ["transformers' own", "split", "notes"]
    yield from table(titles, (_cells(name, rows[name]) for name in sorted(rows)))
    yield ""
    for name, reason in NOT_MEASURED.items():
        yield f"- not measured: {name}, {reason}"


def _shown(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without the outcome of accepted doubts where none are left."""
    decided = row.get("TP", {}).get("status") == "right"
    return {mode: found for mode, found in row.items() if not (decided and mode == "inferred")}


def _cells(name: str, row: Mapping[str, Any]) -> list[Cell]:
    return [
        name,
        mark(row, "TP"),
        mark(row, "SP"),
        _share(row, "TP"),
        mark(row, "inferred"),
        *(_both(row, medium) for medium in MEDIA),
        *(mark(row, column) for column in COLUMNS),
        mark(row, "transformers"),
        _share(row, "transformers"),
        _notes(row),
    ]


def _summary(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for mode, title in {**_OURS, "transformers": "transformers' own TP"}.items():
        found = [row[mode] for row in rows.values() if mode in row]
        right = [each for each in found if each["status"] == "right"]
        mostly = sum(each["share"] >= _MOSTLY for each in right)
        yield f"- {title}, with images: {len(right)} of {len(found)} right ({mostly} with at least 95 % split)"
    for medium in MEDIA:
        found = [row[f"{mode} {medium}"] for row in rows.values() for mode in _OURS if f"{mode} {medium}" in row]
        if found:
            right = [each for each in found if each["status"] == "right"]
            yield f"- {medium}: {len(right)} of {len(found)} right (TP and SP counted each)"
    for column in COLUMNS:
        if found := [row[column]["status"] for row in rows.values() if column in row]:
            yield f"- {column}: {tally(found)}"


def _both(row: Mapping[str, Any], medium: str) -> str:
    """Return one mark where TP and SP have the same outcome, else both."""
    marks = {mode: mark(row, f"{mode} {medium}") for mode in _OURS if f"{mode} {medium}" in row}
    if len(set(marks.values())) <= 1:
        return next(iter(marks.values()), "")
    return ", ".join(f"{mode} {found}" for mode, found in marks.items())


def _share(row: Mapping[str, Any], mode: str) -> str:
    """Return the share that is split, with images or with the medium that the model has."""
    found = next(
        (
            row[key]
            for key in (mode, *(f"{mode} {medium}" for medium in MEDIA), *(["inferred"] * (mode == "TP")))
            if key in row
        ),
        {},
    )
    return "" if found.get("share") is None else f"{100 * found['share']:.1f} %"


def _notes(row: Mapping[str, Any]) -> list[str]:
    notes = {mode: _reason(found["note"]) for mode, found in row.items() if found.get("note")}
    notes = {mode: note for mode, note in notes.items() if note != NO_PLAN}
    told = [
        f"{', '.join(mode for mode in notes if notes[mode] == note)}: {note}" for note in dict.fromkeys(notes.values())
    ]
    whole = next((found["whole"] for found in row.values() if found.get("whole")), {})
    if whole and row.get("TP", {}).get("share", 1) < _MOSTLY:
        told.append("replicated: " + ", ".join(f"`{pattern}` {100 * share:.0f} %" for pattern, share in whole.items()))
    return told


def _reason(note: str) -> str:
    """Return a note without what every refused inferred plan says."""
    before, undecided, reason = note.partition(_UNDECIDED)
    return f"an inferred plan has doubts that running it did not decide: {reason}" if undecided else before
