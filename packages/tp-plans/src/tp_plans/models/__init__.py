"""The architectures with a plan in this package: one file per family, names only.

An architecture: ``Architecture``; all of them: ``ARCHITECTURES``
A decoder:       ``DecoderSpec``; ``decoder_plan`` makes its plan
Its sub-layers:  ``SublayerSpec``, ``ReplicatedSublayer``, ``FusedLinear``, ``ExpertsSpec``
"""

from __future__ import annotations

from tp_plans.models.falcon_h1 import FALCON_H1
from tp_plans.models.gemma import GEMMA3, GEMMA3_TEXT, GEMMA4, GEMMA4_TEXT
from tp_plans.models.llama import LLAMA, MINISTRAL3, MISTRAL, MISTRAL3
from tp_plans.models.phi import PHI, PHI3
from tp_plans.models.qwen import QWEN2, QWEN3, QWEN3_5, QWEN3_5_TEXT
from tp_plans.models.remote_code import BAICHUAN, DECILM, NEMOTRON_FLASH, NEMOTRON_LABS_DIFFUSION
from tp_plans.models.spec import (
    Architecture,
    DecoderSpec,
    ExpertsSpec,
    FusedLinear,
    ReplicatedSublayer,
    SublayerSpec,
    decoder_plan,
)

ARCHITECTURES: tuple[Architecture, ...] = (
    *(LLAMA, MISTRAL, MINISTRAL3, MISTRAL3),
    *(QWEN2, QWEN3, QWEN3_5_TEXT, QWEN3_5),
    *(GEMMA3_TEXT, GEMMA3, GEMMA4_TEXT, GEMMA4),
    *(PHI, PHI3, FALCON_H1),
    *(BAICHUAN, DECILM, NEMOTRON_LABS_DIFFUSION, NEMOTRON_FLASH),
)

__all__ = ["ARCHITECTURES", "Architecture", "DecoderSpec", "ExpertsSpec", "FusedLinear", "ReplicatedSublayer"]
__all__ += ["SublayerSpec", "decoder_plan"]
