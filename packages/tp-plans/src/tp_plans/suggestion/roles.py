"""Which linear layer of a sub-layer does what, by shape where shapes tell and by the names in use where not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tp_plans.suggestion.anatomy import Anatomy, is_linear, matrix

_WRITERS = re.compile(
    r"o|wo|w2|fc2|(o|out|c|down)_?proj|proj|dense(_4h_to_h)?|down|out(put)?(_linear|_layer)?|out_lin|lin2"
)
_ATTENTION = re.compile(r"attn|attention|self_att|mha")
_HEAD_FIRST = re.compile(r"query_key_value")
_QUERIES = re.compile(r"q|wq|q_?(proj|lin|linear)|query(_proj)?|to_q")
_KEYS_AND_VALUES = re.compile(r"[kv]|w[kv]|[kv]_?(proj|lin|linear)|(key|value)(_proj)?|to_[kv]")


@dataclass(frozen=True)
class SubLayer:
    """A module whose linear layers read the stream and write to it.

    Args:
        path: where it is.
        readers: the layers that read the stream.
        writer: the one that writes to it.
        others: its other linear layers.
        inner: features that the writer reads.
        by_name: whether the writer was told by its name only.
    """

    path: str
    readers: tuple[str, ...]
    writer: str
    others: tuple[str, ...]
    inner: int
    by_name: bool

    @property
    def is_named_attention(self) -> bool:
        """Whether it mixes tokens, as far as its name and its layers' names tell."""
        name = self.path.rpartition(".")[2]
        queries = any(_QUERIES.fullmatch(leaf(each)) or "qkv" in leaf(each).lower() for each in self.readers)
        return bool(_ATTENTION.search(name.lower())) or queries

    @property
    def is_head_first(self) -> bool:
        """Whether a fused projection is known to keep each head's query, key and value together."""
        return any(_HEAD_FIRST.search(leaf(each)) for each in self.readers)


def sublayer_at(path: str, anatomy: Anatomy) -> SubLayer | None:
    """The sub-layer that a module is, if linear layers right below it read the stream and one writes to it."""
    linear = [child for child in anatomy.children[path] if is_linear(anatomy.modules[child])]
    shapes = {layer: matrix(anatomy.modules[layer]) for layer in linear}
    writing = [layer for layer in linear if shapes[layer][0] == anatomy.width]
    if len(linear) < 2 or not writing:
        return None
    certain = [layer for layer in writing if shapes[layer][1] != anatomy.width]
    named = [layer for layer in writing if _WRITERS.fullmatch(leaf(layer).lower())]
    writer = (certain or named or writing)[-1]
    readers = tuple(layer for layer in linear if layer != writer and shapes[layer][1] == anatomy.width)
    others = tuple(layer for layer in linear if layer != writer and layer not in readers)
    if not readers:
        return None
    return SubLayer(path, readers, writer, others, shapes[writer][1], by_name=not certain and len(writing) > 1)


def is_key_or_value(path: str) -> bool:
    """Whether a layer's name says that it computes keys or values."""
    return bool(_KEYS_AND_VALUES.fullmatch(leaf(path)))


def leaf(path: str) -> str:
    """A module's own name."""
    return path.rpartition(".")[2]
