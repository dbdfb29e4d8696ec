"""The peak of a step on one device against the dry run's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any, Literal

import torch

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.gpu_check.check_result import CheckResult
from fsdp_runtime.gpu_check.machine import World, optional

LENGTH, BATCH = 2048, 2
#: The dry run is expected within this part of the allocator's peak.
TOLERANCE = 0.05


def check_memory(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield the allocated peak of forward, loss, backward and AdamW on one rank, and the dry run's."""
    if device.type == "cpu":
        yield CheckResult("Memory", "a step against the dry run", "a CPU has no allocator that counts", state="not run")
        return
    rl_logprobs = optional("rl_logprobs")
    if rl_logprobs is None:
        yield CheckResult("Memory", "a step against the dry run", "rl-logprobs is not installed", state="not run")
        return
    measured = _peak(device, rl_logprobs.token_logprobs)
    with get_context("spawn").Pool(1) as pool:  # a dry run needs a process without a process group
        expected = pool.apply(expected_peak)
    yield compared(f"peak of a step ({world.name})", measured, expected)


def compared(what: str, measured: int, expected: int) -> CheckResult:
    """Return a measured peak with the dry run's, in bytes; it passes within ``TOLERANCE``."""
    ratio = expected / measured
    figure = f"{measured / 2**30:.3f} GiB; the dry run says {expected / 2**30:.3f} GiB, {ratio:.3f} of it"
    state: Literal["passed", "failed"] = "passed" if abs(ratio - 1) <= TOLERANCE else "failed"
    return CheckResult("Memory", what, figure, f"within {TOLERANCE:.0%}", state)


def config() -> Any:
    """Return a Llama of 0.4 G parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32_000,
        use_cache=False,
    )


def expected_peak() -> int:
    """Return the bytes that the dry run predicts; call it in a process without a process group."""
    from fsdp_runtime.dry_run import estimate

    dry_run = estimate(config(), {"dp_shard": 1}, seq_len=LENGTH, micro_batch=BATCH, clip=False)
    return dry_run.memory.peak.total


def _peak(device: torch.device, score: Callable[..., Any]) -> int:
    from transformers import AutoModelForCausalLM

    torch.cuda.reset_peak_memory_stats(device)
    with device:
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    parallelize(model, MeshSpec(dp_shard=1).build(device_type=device.type))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 32_000, (BATCH, LENGTH), device=device)
    for _ in range(2):  # the second has the optimizer's state from its beginning
        logits = model(input_ids=tokens).logits
        score(logits, tokens, shift=True).mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(device)
