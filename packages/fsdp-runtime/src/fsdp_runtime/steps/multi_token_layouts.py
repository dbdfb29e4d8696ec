"""The names and the blocks of multi-token heads, by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_runtime.errors import ModelError


@dataclass(frozen=True)
class HeadLayout:
    """The checkpoint's names of a head, and the kind of its block."""

    #: Renamings from a checkpoint, applied in turn; ``{head}`` is the prefix in the model, ``{depth}`` counts from 0.
    prefixes: Mapping[str, str] = field(default_factory=dict)
    attention: str | None = "full_attention"  # the block's entry in ``layer_types``; ``None``: the config states it
    mlp: str = "sparse"  # and in ``mlp_layer_types``
    several: bool = True

    def renamings(self, heads: Mapping[int, str]) -> dict[str, str]:
        """Return the renamings of heads by their depth and their prefix in the model."""
        return {
            source.format(depth=depth, head=head): target.format(depth=depth, head=head)
            for depth, head in heads.items()
            for source, target in self.prefixes.items()
        }

    def types(self, config: Any, count: int) -> dict[str, list[str]]:
        """Return the types of ``count`` heads in the lists of a config; its own fields for heads take precedence."""
        attention = getattr(config, "mtp_layer_types", None) or ([self.attention] * count if self.attention else [])
        mlp = getattr(config, "mtp_mlp_layer_types", None) or [self.mlp] * count
        if len(attention) < count or len({*attention[:count]}) > 1:
            raise ModelError(
                f"{count} multi-token heads of {config.model_type} with mtp_layer_types={attention}: give the config "
                "mtp_layer_types with the same type for each head, such as ['full_attention']"
            )
        return {"layer_types": attention[:count], "mlp_layer_types": mlp[:count], "indexer_types": ["full"] * count}


_NORM_BEHIND = {"{head}final_layernorm.": "{head}shared_head.norm."}
_BLOCKS = HeadLayout()
_BLOCKS_WITH_NORM = HeadLayout(_NORM_BEHIND)
_QWEN_NAMES = {
    "mtp.layers.0.": "{head}",
    "mtp.fc.": "{head}eh_proj.",
    "mtp.pre_fc_norm_embedding.": "{head}enorm.",
    "mtp.pre_fc_norm_hidden.": "{head}hnorm.",
    "mtp.norm.": "{head}shared_head.norm.",
}
_QWEN = HeadLayout(_QWEN_NAMES, several=False)
_INDEXED = HeadLayout(attention="indexed_attention")
_MIMO_NAMES = {
    "model.mtp.layers.{depth}.": "{head}",
    "{head}pre_mlp_layernorm.": "{head}post_attention_layernorm.",
    **_NORM_BEHIND,
}

#: By ``model_type``.
LAYOUTS: Mapping[str, HeadLayout] = {
    "bailing_hybrid": _BLOCKS_WITH_NORM,
    "deepseek_v3": _BLOCKS,
    "deepseek_v32": _INDEXED,
    "exaone_moe": HeadLayout(_QWEN_NAMES, attention=None, mlp="dense", several=False),
    "glm4_moe": _BLOCKS,
    "glm4_moe_lite": _BLOCKS,
    "glm_moe_dsa": _INDEXED,
    "hy_v3": _BLOCKS_WITH_NORM,
    "mellum": HeadLayout(_QWEN_NAMES, "sliding_attention", several=False),
    "mimo_v2_flash": HeadLayout(_MIMO_NAMES, "sliding_attention", "dense"),
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": _QWEN,
}
#: Reasons against training the heads of other families.
REFUSED: Mapping[str, str] = {
    "deepseek_v4": "its heads mix the streams of hyper-connections",
    "ernie4_5_moe": "its heads share the trunk's last norm in training, and engines apply no norm",
    "inkling_text": "its trunk runs every block of its list",
    "longcat_flash": "its heads are dense blocks, which its decoder's class does not build",
    "nemotron_h": "its trunk runs every block of its list, and a head is two blocks",
    "sarvam_mla": "its checkpoints have none",
    "sarvam_moe": "its checkpoints have none",
}


def head_layout(kind: str, name: str) -> HeadLayout:
    """Return the layout of a family's heads; raise for a class without one."""
    if kind in LAYOUTS:
        return LAYOUTS[kind]
    reason = f": {REFUSED[kind]}" if kind in REFUSED else ""
    raise ModelError(f"{name} has no known multi-token heads{reason}; known are {', '.join(LAYOUTS)}")
