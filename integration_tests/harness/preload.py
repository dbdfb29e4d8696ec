"""Imports of every rank, done once in the server process that ranks are forked from."""

import contextlib
import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed.launcher.api
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.testing._internal.distributed.fake_pg

with contextlib.suppress(ImportError):  # a package is tested alone, too
    import rl_logprobs  # noqa: F401

with contextlib.suppress(ImportError):
    import tp_plans.verification.run
    import tp_plans.verification.tiny  # noqa: F401

with contextlib.suppress(ImportError):
    import fsdp_runtime._api
    import fsdp_runtime.monitor  # noqa: F401
    import harness.parity  # noqa: F401

with contextlib.suppress(ImportError):  # what the first compilation of a process imports
    import torch._dynamo.repro.after_dynamo
    import torch._inductor.compiler_bisector
    import torch.export._trace  # noqa: F401

with contextlib.suppress(ImportError):
    import peft.utils.transformers_weight_conversion  # noqa: F401

with contextlib.suppress(ImportError):
    from coverage.table import entries

    entries()  # imports the config of every architecture

with contextlib.suppress(ImportError):
    from transformers import (  # noqa: F401
        DeepseekV3ForCausalLM,
        Gemma3ForConditionalGeneration,
        GptOssForCausalLM,
        LlamaForCausalLM,
        MixtralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        SiglipVisionModel,
    )

with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all architectures

# The collector skips what the server made: a rank would otherwise search half a million objects again and again, and
# copy the memory that it shares with the server to do so.
gc.collect()
gc.freeze()
