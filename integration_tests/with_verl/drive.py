"""Drive an engine of verl directly, on each rank: log-probabilities, updates and weights, for any engine and mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "with_verl.cpu_platform")

VOCAB = 317
LENGTHS = ((5, 7), (9, 3), (4, 12), (6, 6), (3, 8), (8, 9), (7, 4), (5, 5))
OURS, VERLS = "fsdp_runtime", "fsdp2"


def config_of(engine: str, **options: Any) -> Any:
    """The engine's config, in float32."""
    import fsdp_runtime.trainers.verl.plugin  # noqa: F401  # the entry point does it where the package is installed

    if engine == OURS:
        from fsdp_runtime.trainers.verl.config import engine_config

        return engine_config(**{"param_dtype": "fp32", **options})
    from verl.workers.config import FSDPEngineConfig

    precision = {"param_dtype": options.pop("param_dtype", "fp32"), "reduce_dtype": "fp32"}
    return FSDPEngineConfig(strategy=engine, mixed_precision=precision, use_torch_compile=False, **options)


def build(
    engine: str,
    path: str,
    *,
    model_type: str = "language_model",
    lr: float = 1e-2,
    model: Mapping[str, Any] = {},
    optim: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An initialized engine as verl's worker makes it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    config = config_of(engine, **options)
    model_config = HFModelConfig(
        path=path,
        load_tokenizer=False,
        **{"override_config": {"attn_implementation": "sdpa"}, "enable_gradient_checkpointing": False, **model},
    )
    model_config.model_type = model_type
    if engine != OURS:  # verl registers its own for accelerators only
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    try:
        built = EngineRegistry.new(
            model_type=model_type,
            backend=config.strategy,
            model_config=model_config,
            engine_config=config,
            optimizer_config=FSDPOptimizerConfig(
                lr=lr, **{"clip_grad": 1.0, "total_training_steps": 8, **(optim or {})}
            ),
            checkpoint_config=None if checkpoint is None else CheckpointConfig(**checkpoint),
        )
    finally:
        os.environ.pop("VERL_ENGINE_DEVICE", None)
    built.initialize()
    return built


def samples(count: int = len(LENGTHS), seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Prompts and responses with old log-probabilities, advantages, values and returns."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for prompt, response in LENGTHS[:count]:
        draw = partial(torch.randn, response, generator=generator)
        found.append(
            {
                "ids": torch.randint(1, VOCAB, (prompt + response,), generator=generator),
                "prompt": torch.tensor(prompt),
                "old_log_probs": -5.7 + 0.1 * draw(),
                "advantages": draw(),
                "values": 0.1 * draw(),
                "returns": draw(),
            }
        )
    return found


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch_of(engine: Any, every: list[dict[str, torch.Tensor]], **settings: Any) -> Any:
    """This rank's share of samples in verl's form; every dp-th sample, as a distributed sampler deals."""
    from verl.utils import tensordict_utils as tu

    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    own = settings.pop("own", None) or every[rank::size]
    ids, prompts = [each["ids"] for each in own], [int(each["prompt"]) for each in own]
    masks = [(torch.arange(len(row)) >= prompt).long() for row, prompt in zip(ids, prompts, strict=True)]
    tensors = {
        "input_ids": _nested(ids),
        "position_ids": _nested([torch.arange(len(row)) for row in ids]),
        "prompts": _nested([row[:prompt] for row, prompt in zip(ids, prompts, strict=True)]),
        "responses": _nested([row[prompt:] for row, prompt in zip(ids, prompts, strict=True)]),
        "response_mask": _nested([torch.ones(len(row) - prompt) for row, prompt in zip(ids, prompts, strict=True)]),
        "loss_mask": _nested(masks),
        **{
            name: _nested([each[name] for each in own]) for name in ("old_log_probs", "advantages", "values", "returns")
        },
    }
    given = {
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 40,
        "temperature": 0.7,
        "calculate_entropy": True,
        "global_batch_size": len(every),
        **settings,
    }
    return tu.get_tensordict(tensors, given)


def loss_of(kind: str, engine: Any) -> Any:
    """verl's loss for a kind of model."""
    from verl.workers.utils import losses

    if kind == "sft":
        return partial(losses.sft_loss, config=None)
    if kind == "value":
        from verl.workers.config import CriticConfig

        settings = {"strategy": "any", "ppo_micro_batch_size_per_gpu": 1}
        return partial(losses.value_loss, config=CriticConfig(**settings))
    from verl.workers.config import ActorConfig

    settings: dict[str, Any] = {"strategy": "any", "rollout_n": 1, "use_dynamic_bsz": True, "entropy_coeff": 0.01}
    if kind == "unclipped":
        settings |= dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), 1e6)
    return partial(losses.ppo_loss, config=ActorConfig(**settings))


def gathered(engine: Any, nested: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The values of all samples in their order, without each one's last, which no loss reads."""
    import torch.distributed as dist

    size = engine.get_data_parallel_size()
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, [row[:-1].float() for row in nested.unbind()], group=engine.get_data_parallel_group())
    return [parts[index % size][index // size] for index in range(count)]


def values_alone(path: str) -> list[torch.Tensor]:
    """The values of transformers' token classifier, one sample at a time."""
    from transformers import AutoModelForTokenClassification

    model: Any = AutoModelForTokenClassification.from_pretrained(path, attn_implementation="sdpa").eval()
    with torch.no_grad():
        return [model(each["ids"][None], use_cache=False).logits[0, :-1, 0] for each in samples()]


def run(
    engine: str,
    path: str,
    *,
    steps: int = 2,
    loss: str = "ppo",
    batch: Mapping[str, Any] = {},
    model: Mapping[str, Any] = {},
    count: int = len(LENGTHS),
    exports: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Score a batch, update on it, and return what an engine of verl is asked for."""
    model_type = "value_model" if loss == "value" else "language_model"
    built = build(engine, path, model_type=model_type, model=model, **options)
    every = samples(count)
    settings = {"use_remove_padding": model.get("use_remove_padding", True), **batch}
    with built.eval_mode():
        scored = built.infer_batch(batch_of(built, every, **settings))["model_output"]
    found: dict[str, Any] = {name: gathered(built, values, count) for name, values in scored.items()}
    losses, norms = [], []
    for _ in range(steps):
        with built.train_mode():
            output = built.train_batch(batch_of(built, every, **settings), loss_of(loss, built))
        norms.append(output["metrics"]["grad_norm"] if built.is_mp_src_rank_with_outputs() else None)
        total = torch.tensor(sum(output["loss"]))
        torch.distributed.all_reduce(total, group=built.get_data_parallel_group())
        losses.append(float(total) / built.get_data_parallel_size())
        built.lr_scheduler_step()
    weights = built.get_per_tensor_param()[0] if exports else ()
    found["weights"] = {name: tensor.detach().float().clone() for name, tensor in weights}
    return {**found, "losses": losses, "norms": norms}
