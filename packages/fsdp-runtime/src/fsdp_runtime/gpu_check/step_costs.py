"""Training steps of one rank: run on a device, beside plain transformers, and beside the dry run's bytes and time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import FSDP2, MeshSpec, forward_with_lm_head, parallelize
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.step import ON_HOST, OPTIMIZERS
from fsdp_runtime.dry_run.step_time import HARDWARE, step_time
from fsdp_runtime.gpu_check.check_result import CheckResult, judged, largest, within
from fsdp_runtime.gpu_check.machine import World, optional
from fsdp_runtime.meters.step_meter import synchronize
from fsdp_runtime.optim import CPUOffloadAdamW
from fsdp_runtime.steps import ActivationCheckpointing, Quantized

#: Fields of the models' configs; a model with experts has the others too.
SIZES: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 64_000}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
#: The dry run is expected within this part of the allocator's allocated and reserved bytes.
TOLERANCE = 0.08
#: Steps before a timed one: the first makes the optimizer's state, and a compiled one its graphs.
WARM_UP = 2
#: A small step on a CPU, and the largest relative difference of its loss: quantized weights have other values.
SMALL_TOKENS, SMALL_BOUND = (1, 16), 0.05
SMALL_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}


@dataclass(frozen=True)
class StepSetting:
    """A step of forward, loss, backward and optimizer in bfloat16."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # keywords of ``parallelize``
    tokens: tuple[int, int] = (2, 2048)  # rows, and tokens of a row
    sizes: Mapping[str, Any] = field(default_factory=dict)  # fields of the config that differ from ``SIZES``
    experts: bool = False  # a mixture in every block
    lora: bool = False  # adapters of rank 16 on all linear layers; the rest is frozen
    linear: bool = False  # log-probabilities of hidden states, without logits
    optimizer: str = "adamw_fused"  # a name of ``estimate``
    documents: int = 1  # of each row; plain transformers gets a batch of them
    without: str = ""  # the setting without this one's lever, which takes more memory

    def build(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Return the model on the current device."""
        from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

        sizes = {**SIZES, "use_cache": False, **self.sizes}
        config: Any = Qwen3MoeConfig(**sizes, **EXPERTS) if self.experts else Qwen3Config(**sizes)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        if self.lora:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        return model

    def estimate(self) -> Estimate:
        """Return the dry run's estimate; it needs a process without a process group."""
        (rows, length), loss = self.tokens, "linear" if self.linear else "logits"
        step: dict[str, Any] = {"optimizer": self.optimizer, "logprobs": loss, "clip": False}
        return estimate(self.build, {"dp_shard": 1}, seq_len=length, micro_batch=rows, **step, **self.options)

    def step_on(self, device: torch.device, *, plain: bool = False) -> Callable[[], Tensor]:
        """Return a function that takes one step of a new model and returns the loss.

        The process has one rank.  ``plain`` is the step of transformers' own code.
        """
        torch.manual_seed(0)
        with device:
            model: Any = self.build(torch.float32 if "fsdp" in self.options else torch.bfloat16)
        tokens = torch.randint(0, model.config.vocab_size, self.tokens, device=device)
        if plain:
            if "activation_checkpointing" in self.options:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.model.layers if "compile" in self.options else ():
                layer.compile()
            tokens = tokens.view(self.tokens[0] * self.documents, -1)
        else:
            model = parallelize(model, MeshSpec(dp_shard=1).build(device_type=device.type), **self.options)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        make, _ = OPTIMIZERS[self.optimizer]
        optimizer: Any = CPUOffloadAdamW(trained, lr=1e-5) if self.optimizer in ON_HOST else make and make(trained)
        loss_of = _plain_loss if plain else self._loss

        def step() -> Tensor:
            loss = loss_of(model, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def _loss(self, model: Any, tokens: Tensor) -> Tensor:
        rl_logprobs: Any = optional("rl_logprobs")
        inputs = {"input_ids": tokens}
        if self.documents > 1:
            positions = torch.arange(self.tokens[1], device=tokens.device) % (self.tokens[1] // self.documents)
            inputs["position_ids"] = positions.expand_as(tokens)

        def score(hidden: Tensor, head: Any) -> Any:
            return rl_logprobs.linear_token_logprobs(hidden, head.weight, tokens, shift=True)

        if self.linear:
            logprobs: Tensor = forward_with_lm_head(model, score, **inputs)
        else:
            logprobs = rl_logprobs.token_logprobs(model(**inputs).logits, tokens, shift=True)
        return -logprobs.mean()


def _plain_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


_MASTERS = FSDP2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), master_dtype=torch.float32)
_BLOCKS = {"activation_checkpointing": "block"}
_TIED = {"tie_word_embeddings": True}
_LONG = (1, 32_768)


def _on_host(mode: Any) -> dict[str, Any]:
    return {"activation_checkpointing": ActivationCheckpointing(mode, offload=True)}


def _quantized(scheme: Any) -> dict[str, Any]:
    return {**_BLOCKS, "steps": (Quantized(scheme),)}


SETTINGS = (
    StepSetting("dense"),
    StepSetting("dense, foreach AdamW", optimizer="adamw"),
    StepSetting("tied embeddings", sizes=_TIED),
    StepSetting("mixture", experts=True),
    StepSetting("blocks recomputed", _BLOCKS),
    StepSetting("MLPs recomputed", {"activation_checkpointing": "mlp"}),
    StepSetting("selective recomputation", {"activation_checkpointing": "selective"}),
    StepSetting("compiled", {"compile": True}),
    StepSetting("float32 masters", {"fsdp": _MASTERS}),
    StepSetting("LoRA", _BLOCKS, lora=True),
    StepSetting("from hidden states", sizes=_TIED, linear=True),
    StepSetting("one long row", _BLOCKS, _LONG, linear=True),
    StepSetting("one long row, LoRA", _BLOCKS, _LONG, linear=True, lora=True),
    StepSetting("activations on the host", _on_host("none"), without="dense"),
    StepSetting("selective, on the host", _on_host("selective"), without="selective recomputation"),
    StepSetting(
        "inputs of blocks on the host", _on_host("block"), _LONG, linear=True, lora=True, without="one long row, LoRA"
    ),
    StepSetting("AdamW on the host", _BLOCKS, optimizer="adamw_cpu_offload", without="blocks recomputed"),
    StepSetting("8-bit states", _BLOCKS, optimizer="adamw_8bit", without="blocks recomputed"),
    StepSetting("bfloat16 states", {"fsdp": _MASTERS}, optimizer="adamw_bf16", without="float32 masters"),
    *(
        StepSetting(f"LoRA on {scheme}", _quantized(scheme), lora=True, without="LoRA")
        for scheme in ("nf4", "int4", "mxfp4", "int8", "fp8")
    ),
)

_QWEN = {"vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28}
_SMALL = {**_QWEN, **_TIED, "hidden_size": 1024, "intermediate_size": 3072}
_MIDDLE = {**_QWEN, **_TIED, "hidden_size": 2048, "intermediate_size": 6144}
_LARGE = {**_QWEN, "num_attention_heads": 32, "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12_288}
_ROWS = (2, 4096)
#: Steps of ``--bench``, beside plain transformers.
BENCH = (
    StepSetting("Qwen3-0.6B, 2 x 4096", {}, _ROWS, _SMALL),
    StepSetting("Qwen3-0.6B, 2 x 4096, compiled", {"compile": True}, _ROWS, _SMALL),
    StepSetting("Qwen3-0.6B, 2 x 8 documents of 512", {"packed_sequences": True}, _ROWS, _SMALL, documents=8),
    StepSetting("Qwen3-1.7B, 2 x 4096, blocks recomputed", _BLOCKS, _ROWS, _MIDDLE),
    StepSetting("Qwen3-8B, 2 x 4096, LoRA 16 on nf4", _quantized("nf4"), _ROWS, _LARGE, lora=True, linear=True),
)
_TINY = {**_QWEN, "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
#: A CPU tries the logic.
TINY_BENCH = (
    StepSetting("tiny", {"packed_sequences": True}, (2, 16), _TINY, documents=2),
    StepSetting("tiny, recomputed", _BLOCKS, (2, 16), _TINY),
    StepSetting("tiny, LoRA on nf4", _quantized("nf4"), (2, 16), _TINY, lora=True, linear=True),
)


class StepCost(NamedTuple):
    """The most bytes that the allocator handed out and reserved, and the seconds of a step; 0 for unknown ones."""

    allocated: int
    reserved: int
    seconds: float


def check_memory(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield bytes and seconds of every setting on one rank beside the dry run's, and the medians."""
    lacking = [name for name in ("rl_logprobs", "peft") if optional(name) is None]
    if device.type == "cpu" or lacking:
        reason = f"{' and '.join(lacking)} are not installed" if lacking else "a CPU has no allocator that counts"
        yield CheckResult("Memory", "steps against the dry run", reason, state="not run")
        yield from (small_steps(setting) for setting in SETTINGS if setting.without and not lacking)
        return
    measured: dict[str, StepCost] = {}
    for setting in SETTINGS:
        try:
            measured[setting.name] = measured_cost(setting, device)
        except torch.OutOfMemoryError:
            yield CheckResult("Memory", setting.name, "the device is too small", state="not run")
    settings = [setting for setting in SETTINGS if setting.name in measured]
    with get_context("spawn").Pool(4) as pool:  # a dry run needs a process without a process group
        costs = pool.starmap(expected_cost, [(setting, torch.cuda.get_device_name(device)) for setting in settings])
    expected = dict(zip(measured, costs, strict=True))
    for name, cost in measured.items():
        yield compared(f"{name} ({world.name})", cost, expected[name])
    yield from summary([*measured.values()], costs)
    for setting in settings:
        if setting.without in measured:
            yield lever(setting.name, measured[setting.name], setting.without, measured[setting.without])


def lever(name: str, cost: StepCost, without: str, larger: StepCost) -> CheckResult:
    """Return the bytes and the time of a lever's setting beside the setting without it; it passes with fewer bytes."""
    figures = [f"{each.allocated / 2**30:.2f} GiB, {each.seconds * 1e3:.0f} ms" for each in (cost, larger)]
    figure, saves = f"{figures[0]}; {without}: {figures[1]}", cost.allocated < larger.allocated
    return judged("Levers", name, figure, "fewer bytes", saves)


def small_steps(setting: StepSetting) -> CheckResult:
    """Return the losses of small steps on a CPU beside steps without the setting's lever."""
    without = next(each for each in SETTINGS if each.name == setting.without)
    losses = []
    for each in (setting, without):
        step = replace(each, tokens=SMALL_TOKENS, sizes=SMALL_SIZES).step_on(torch.device("cpu"))
        losses.append([float(step()) for _ in range(2)])
    error = largest(abs(one - other) / other for one, other in zip(*losses, strict=True))
    return within("Levers", f"{setting.name}: losses beside {setting.without}", error, SMALL_BOUND)


def expected_cost(setting: StepSetting, device_name: str = "") -> StepCost:
    """Return the dry run's bytes, and its seconds where the device's rates are known; without a process group."""
    dry_run = setting.estimate()
    hardware = next((name for name in HARDWARE if name in device_name), None)
    seconds = 0.0 if hardware is None else step_time(dry_run, hardware).expected
    return StepCost(dry_run.memory.peak.total, dry_run.memory.reserved or 0, seconds)


def measured_cost(setting: StepSetting, device: torch.device) -> StepCost:
    """Return the bytes of all steps on a device, and the seconds of the fastest of some."""
    gc.collect()  # the model of the setting before
    step = setting.step_on(device)
    torch.cuda.empty_cache()  # weights in full precision, of a base that is quantized
    torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(WARM_UP + 3):
        begin = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return StepCost(allocated, reserved, min(seconds[WARM_UP:]))


def compared(what: str, measured: StepCost, expected: StepCost) -> CheckResult:
    """Return a measured cost with the dry run's; it passes if both kinds of bytes are within ``TOLERANCE``."""
    kinds = zip(("allocated", "reserved"), measured, expected, strict=False)
    figures = [f"{kind} {nbytes / 2**30:.2f} GiB, estimate {other / nbytes - 1:+.1%}" for kind, nbytes, other in kinds]
    times = f", {measured.seconds / expected.seconds:.2f} of the expected time" if expected.seconds else ""
    errors = (abs(other / nbytes - 1) for nbytes, other in zip(measured[:2], expected[:2], strict=True))
    figure = "; ".join([*figures, f"{measured.seconds * 1e3:.0f} ms{times}"])
    return judged("Memory", what, figure, f"within {TOLERANCE:.0%}", max(errors) <= TOLERANCE)


def summary(measured: Sequence[StepCost], expected: Sequence[StepCost]) -> Iterator[CheckResult]:
    """Yield the median errors of bytes, and the factor of this device for ``StepTime.expected``."""
    pairs = [*zip(measured, expected, strict=True)]
    if not pairs:
        return
    errors = [median(abs(two[at] / one[at] - 1) for one, two in pairs) for at in (0, 1)]
    figure = f"allocated {errors[0]:.1%}, reserved {errors[1]:.1%}"
    yield CheckResult("Memory", f"median error of {len(pairs)} settings", figure)
    factors = sorted(one.seconds / two.seconds for one, two in pairs if two.seconds)
    if factors:
        # A setting's own time is not among these that predict it.
        others = [median([*factors[:at], *factors[at + 1 :]] or factors) for at in range(len(factors))]
        error = median(abs(other / factor - 1) for other, factor in zip(others, factors, strict=True))
        text = f"{median(factors):.2f} ({factors[0]:.2f} to {factors[-1]:.2f}); the others' median predicts a step "
        yield CheckResult("Memory", "time over the expected time", f"{text}within {error:.0%} in the median")
