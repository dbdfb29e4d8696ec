"""Imports of every rank, done once in the server process that ranks are forked from."""

import contextlib
import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed.launcher.api
import torch.distributed.tensor.parallel
import torch.testing._internal.distributed.fake_pg  # noqa: F401

import fsdp_runtime._api  # noqa: F401 what fsdp_runtime imports on first use
import harness.parity  # noqa: F401
import rl_logprobs  # noqa: F401

with contextlib.suppress(ImportError):
    import peft  # noqa: F401

with contextlib.suppress(ImportError):
    from architecture_matrix.table import entries

    entries()  # imports the config of every architecture

with contextlib.suppress(ImportError):
    from transformers import (  # noqa: F401
        Gemma3ForConditionalGeneration,
        LlamaForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
    )

# The collector skips what the server made: a rank would otherwise search half a million objects again and again, and
# copy the memory that it shares with the server to do so.
gc.collect()
gc.freeze()
