"""The architectures that have a plan of their own: one file a family, names only."""

from __future__ import annotations

from tp_plans.families.entry import Architecture
from tp_plans.families.gemma3 import GEMMA3, GEMMA3_TEXT
from tp_plans.families.llama import LLAMA
from tp_plans.families.qwen import QWEN2, QWEN3

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3, GEMMA3_TEXT, GEMMA3)

__all__ = ["ARCHITECTURES", "Architecture"]
