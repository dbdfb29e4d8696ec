"""What a user can choose on the command line."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Settings:
    """The run's settings; each field is a command-line option of the same name."""

    model: Annotated[
        str | None, "folder or hub id of a checkpoint; none: write a small one; mixture: one with experts"
    ] = None
    output: Annotated[Path, "folder for checkpoints, figures and the plot"] = Path("grpo-output")
    device: Annotated[Literal["auto", "cpu", "cuda"], "where to compute"] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16"], "what to compute in"] = "float32"
    seed: Annotated[int, "seed of weights, questions and sampling"] = 0

    dp_shard: Annotated[int, "ranks that shard weights and batch (FSDP2); -1: all that tp leaves"] = -1
    tp: Annotated[int, "ranks that split each layer (tensor parallelism)"] = 2
    ep: Annotated[int, "ranks that a mixture's experts are divided over (expert parallelism)"] = 1
    sequence_parallel: Annotated[bool, "split the activations between layers over tp, too"] = True

    activation_checkpointing: Annotated[bool, "recompute each block in backward instead of keeping it"] = False
    float8: Annotated[str | None, "recipe of float8 products, such as rowwise; a CPU emulates them"] = None

    warmup_steps: Annotated[int, "supervised steps; 0 starts from the checkpoint as it is"] = 80
    warmup_batch: Annotated[int, "texts in a supervised step"] = 192
    warmup_lr: Annotated[float, "peak learning rate of the supervised steps"] = 5e-3

    steps: Annotated[int, "GRPO steps"] = 25
    prompts: Annotated[int, "prompts in a GRPO step"] = 32
    group: Annotated[int, "samples for each prompt"] = 8
    updates: Annotated[int, "optimizer steps that a GRPO step's samples are cut into"] = 2
    lr: Annotated[float, "peak learning rate of the GRPO steps"] = 8e-4
    temperature: Annotated[float, "sampling temperature of the GRPO steps"] = 1.0
    top_p: Annotated[float, "probability of the most probable tokens that the GRPO steps sample from"] = 1.0
    clip: Annotated[float, "how far a token's probability ratio may move before its gradient is cut"] = 0.2
    max_grad_norm: Annotated[float, "gradient norm to clip to"] = 1.0
    max_new_tokens: Annotated[int, "the most tokens to sample for a prompt"] = 8

    explain_drift: Annotated[bool, "show which cause moves log-probs between trainer and generator"] = False
    held_out: Annotated[int, "held-out questions that make up the score"] = 512
    report_every: Annotated[int, "GRPO steps between two rows of the table"] = 5
    score_every: Annotated[int, "GRPO steps between two held-out scores"] = 10


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the settings from the command line.

    Args:
        arguments: The words to read; those of this process if none are given.

    Returns:
        The settings.
    """
    parser = ArgumentParser(
        description="GRPO on a tensor-parallel, fully sharded policy, from a checkpoint on disk to a better one.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    hints = get_type_hints(Settings, include_extras=True)
    for option in fields(Settings):
        kind, text = get_args(hints[option.name])
        flag = f"--{option.name.replace('_', '-')}"
        parser.add_argument(flag, default=option.default, help=text, **_argument_kind(kind))
    return Settings(**vars(parser.parse_args(arguments)))


def _argument_kind(kind: Any) -> dict[str, Any]:
    """What ``argparse`` has to know to read a value of this type."""
    if kind is bool:
        return {"action": BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind if isinstance(kind, type) else str}
