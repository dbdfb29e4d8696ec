"""Two packed copies of weights that vLLM's CPU backend (0.32) leaves as they were when new weights are loaded.

1. The matrix product of a vocabulary (``VocabParallelEmbedding``, ``ParallelLMHead``): where the LM head is tied to the
   embedding, the copy that oneDNN packed is not made anew.
2. Mixtures of experts: with a kernel already chosen, ``fused_experts.process_weights_after_loading`` is not called, so
   that unpacked weights lie where the kernel reads packed ones.

Both give old or wrong results without an error.  CUDA has other code, which is left alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn


def repack(model: nn.Module) -> list[str]:
    """Pack again what the CPU backend should have; once after each loading, for what is packed looks like what is not.

    Args:
        model: vLLM's model, after its weights were loaded.

    Returns:
        The paths of the modules that were packed again; none on other devices.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    packed: list[str] = []
    if not current_platform.is_cpu():
        return packed
    vocabularies = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    uses = Counter(id(module.weight) for module in vocabularies)
    for path, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and uses[id(module.weight)] > 1:
            method.process_weights_after_loading(module)
            packed.append(path)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
            packed.append(path)
    return packed
