"""Multi-token heads of a checkpoint that are not trained: the model's class does not load them, a save copies them.

transformers drops the layers that predict further tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2) when it loads a
model, and ``generate(use_mtp=True)`` and engines read them from the checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fsdp_runtime._transformers_compat.checkpoints import is_ignored_on_load
from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.model_state import ModelState
from fsdp_runtime.sharded.safetensors_io import STORED_DTYPES, SafetensorsReader
from fsdp_runtime.weights.companion_files import SourceFolder
from fsdp_runtime.weights.export import ExportedTensor, ExportGroup
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint

logger = logging.getLogger(__name__)

_ADVICE = "it changed after the save began; save again"
#: A part of a name that belongs to such a head by its word, as in ``mtp.layers.0`` or ``model.mtp_block``.
_WORD = re.compile(r"(^|\.)(mtp|nextn)(_\w+)?(\.|$)")
#: A block of the decoder; the heads of some checkpoints are blocks beyond the last one.
_BLOCK = re.compile(r"^(?:(?:language_)?model\.)*layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class CopiedTensor(ExportGroup):
    """A tensor that a save copies from a file of the source checkpoint."""

    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(item.nbytes for item in self.tensors)

    def produce(self, full: Mapping[str, Tensor]) -> Iterator[tuple[ExportedTensor, Tensor]]:
        """Yield the tensor in its stored dtype, on the CPU."""
        with SafetensorsReader(_ADVICE) as reader:
            for item in self.tensors:
                yield item, reader.read_box(self.file, item.name)


def multi_token_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the multi-token heads of the checkpoint that a model was loaded from, as stored.

    For an engine that drafts with the heads and gets all weights from :func:`~fsdp_runtime.stream_weights`: chain both.
    :func:`~fsdp_runtime.save_weights` copies the same tensors.  No communication.

    Args:
        model: a model of transformers, plain or sharded, loaded by ``load_weights`` or ``from_pretrained``.

    Yields:
        Name in the checkpoint, and tensor on the CPU in the stored dtype.  Nothing, if the checkpoint has no such head.

    Raises:
        CheckpointError: a file is damaged.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.weights import multi_token_weights
        >>> list(multi_token_weights(nn.Linear(2, 3)))
        []
    """
    state = ModelState(model, allow_offloaded=True)
    names = {name for entry in state.whole for name in entry.names}
    for head in heads_at_source(SourceFolder(state.base.module), names):
        for item, tensor in head.produce({}):
            yield item.name, tensor


def heads_at_source(source: SourceFolder, exported: Collection[str]) -> Sequence[CopiedTensor]:
    """Return the heads in the folder that a model came from; ``exported`` names belong to the model."""
    model, folder = source.model, source.folder
    if folder is None:
        return []
    try:
        with HubCheckpoint(folder) as checkpoint:
            stored = checkpoint.tensors
    except CheckpointError as error:  # a save does not fail for it, and a checkpoint of another format has no heads
        logger.debug("no multi-token heads: %s", error)
        return []
    trained = runtime_state(model).multi_token  # beside them are copies of the shared embedding and LM head
    names = [name for name in stored if name not in exported and _depth(model, name, stored) >= trained]
    if not names:
        return []
    reason = "the vocabulary was resized" if source.is_resized else ""
    if packed := next((name for name in names if stored[name].dtype not in ("F64", "F32", "F16", "BF16")), None):
        reason = f"{packed} is stored as {stored[packed].dtype}, which needs scales"
    if reason:
        logger.warning("the multi-token heads in %s are not copied (%d tensors): %s", folder, len(names), reason)
        return []
    return [
        CopiedTensor(
            tensors=[ExportedTensor(name, STORED_DTYPES[stored[name].dtype], stored[name].shape, None)],
            file=stored[name].file,
        )
        for name in names
    ]


def _depth(model: Any, name: str, stored: Collection[str]) -> int:
    """Return the depth, from 0, of the head that a name of a checkpoint belongs to; -1 for other names."""
    if block := _BLOCK.match(name):
        depth = int(block[1]) - int(model.config.get_text_config().num_hidden_layers)
        # Blocks of a deeper model lack the projection of embeddings and hidden states.
        is_head = is_ignored_on_load(model, name) or f"{block[0]}eh_proj.weight" in stored
        return depth if is_head or _WORD.search(name) else -1
    number = re.search(r"\.(\d+)\.", name)
    return -1 if not _WORD.search(name) else 0 if number is None else int(number[1])
