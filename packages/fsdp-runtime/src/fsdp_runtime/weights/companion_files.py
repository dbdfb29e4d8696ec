"""Files of a checkpoint beside weights and configs: tokenizer, processor and remote code."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime._transformers_compat.checkpoints import relative_imports, save_config, vocabulary_size
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.model.pretrained_source import saved_generation, source_folder
from fsdp_runtime.sharded.saved_files import naming_write_errors

logger = logging.getLogger(__name__)

#: Files of a tokenizer, as patterns, in the order in which they are moved into place.
_TOKENIZER = (
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "tokenizer.json", "tokenizer.model*", "tekken.json"),
    *("vocab*.json", "vocab.txt", "vocab.bpe", "merges.txt", "sp*.model", "sentencepiece*.model", "tiktoken.model"),
    *("*.tiktoken", "*.spm", "*_vocab.json", "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json"),
    *("normalizer.json", "prophetnet.tokenizer", "word_*.json"),
    *("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"),
)
#: Files of a processor.
_PROCESSOR = (
    *("chat_template.json", "audio_tokenizer_config.json", "video_preprocessor_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
_GROUPS = (_TOKENIZER, _PROCESSOR)
#: Legacy files: later versions of transformers read them only if the tokenizer's config lacks the added tokens.
_LEGACY = ("added_tokens.json", "special_tokens_map.json")
#: Patterns of all files that a load from the hub downloads beside the weights.
COMPANIONS = ("config.json", "generation_config.json", *_TOKENIZER, *_PROCESSOR, "*.py")


class SourceFolder:
    """The folder of the checkpoint that a model came from; a save copies files from it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.folder = source_folder(model) if is_transformers_model(model) else None

    @cached_property
    def stored_vocabulary(self) -> int | None:
        """The vocabulary size of the folder's config, if it states one."""
        config = {} if self.folder is None else _content(self.folder / "config.json")
        stored = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        return stored if isinstance(stored, int) else None

    @property
    def is_resized(self) -> bool:
        """Whether the model states another vocabulary size than the folder's config."""
        sizes = vocabulary_size(self.model), self.stored_vocabulary
        return None not in sizes and sizes[0] != sizes[1]

    def copy_files(self, work: Path, target: Path) -> None:
        """Copy tokenizer, processor and remote code."""
        if self.folder is None:
            return
        advice = f"write them with tokenizer.save_pretrained({str(target)!r})"
        if not self.folder.is_dir():
            logger.warning(
                "%s, the folder of the loaded weights, is gone with the tokenizer's files: %s", self.folder, advice
            )
            return
        for group in _GROUPS:
            files = _members(self.folder, group)
            if files and group is _TOKENIZER and self.is_resized:
                logger.warning(
                    "the model has a vocabulary of %d and %s one of %d, so the files of its tokenizer are not copied: "
                    "%s",
                    *(vocabulary_size(self.model), self.folder, self.stored_vocabulary, advice),
                )
                continue
            code = _remote_code(self.folder, files) if self.model.is_remote_code() else []
            for file in (*files, *code):
                copied = work / file.relative_to(self.folder)
                with naming_write_errors(copied):
                    copied.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copied)


def save_companions(
    source: SourceFolder, work: Path, target: Path, dtype: torch.dtype, quantization: dict[str, Any] | None
) -> None:
    """Write a transformers model's configs, and copy the files of the checkpoint that the model was loaded from."""
    source.copy_files(work, target)
    with naming_write_errors(work / "config.json"):
        save_config(source.model, work, dtype, saved_generation(source.model), quantization)


def leave_out_present(work: Path, target: Path) -> None:
    """Remove the copied tokenizer if the target already has a tokenizer; also the copied processor."""
    for group in _GROUPS:
        copied = _members(work, group)
        if copied and any((target / name).exists() for name in (copied[-1].relative_to(work), group[-1])):
            for file in copied:
                file.unlink()


def files_in_order(work: Path) -> list[Path]:
    """Return all unfinished files in the order in which they are moved into place: the model's configs last."""
    # The last file of a group tells a later save that the group is complete.
    copied = [file for group in _GROUPS for file in _members(work, group)]
    others = sorted({file for file in work.rglob("*") if file.is_file()} - {*copied}, key=lambda f: f.suffix == ".json")
    return [*copied, *others]


def _members(folder: Path, group: Sequence[str]) -> list[Path]:
    """Return a folder's files that match a group's patterns, in the group's order."""
    files = dict.fromkeys(file for pattern in group for file in sorted(folder.glob(pattern)) if file.is_file())
    config = folder / "tokenizer_config.json"
    if config in files and "added_tokens_decoder" in _content(config):
        # A later save of a tokenizer does not rewrite the legacy files: they would contradict the new tokenizer.
        return [file for file in files if file.name not in _LEGACY]
    return list(files)


def _remote_code(folder: Path, configs: Sequence[Path]) -> Iterator[Path]:
    """Yield the folder's modules in the ``auto_map`` of the configs, and the modules that they import."""
    for config in configs:
        if config.suffix != ".json" or not fnmatch(config.name, "*config.json"):
            continue
        classes = (_content(config).get("auto_map") or {}).values()
        names = {name for entry in classes for name in ([entry] if isinstance(entry, str) else entry) if name}
        for module in sorted({name.rpartition("--")[2].partition(".")[0] for name in names}):
            if (file := folder / f"{module}.py").is_file():
                yield from (file, *(imported for imported in relative_imports(file) if imported.parent == folder))


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
