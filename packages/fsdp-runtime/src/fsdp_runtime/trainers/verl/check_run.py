"""``fsdp-runtime verl-check --run``: verl's own SFT trainer for four steps on two CPU processes, ``tp=2``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsdp_runtime.trainers.verl.check import CheckLine

STEPS = 4
_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
_WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", "say", *map(str, range(10))]


def run_steps(seconds: float = 600.0) -> CheckLine:
    """Train a tiny model in a temporary folder; the finding has its losses or the trainer's last error."""
    with TemporaryDirectory(prefix="verl-check-") as name:
        folder = Path(name)
        _write(folder)
        environment = os.environ | {
            "VERL_USE_EXTERNAL_MODULES": "fsdp_runtime.trainers.verl.cpu_platform",
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(folder / "log.jsonl"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            job = subprocess.run(
                _command(folder), env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return CheckLine("error", f"four steps of SFT did not end within {seconds:.0f} s")
        if job.returncode:
            return CheckLine("error", f"SFT ended with code {job.returncode}: {_error_in(job.stderr)}")
        return _judged(folder / "log.jsonl")


def _error_in(stderr: str) -> str:
    """The first error of a rank, or Hydra's error about a setting; torchrun's own error comes later."""
    shown = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]*(?:Error|Exception): |Could not override ).*)", re.MULTILINE)
    found = shown.search(stderr)
    return found[1] if found else "\n".join(stderr.splitlines()[-20:])


def _judged(log: Path) -> CheckLine:
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    losses = [step["train/loss"] for step in steps if "train/loss" in step]
    shown = ", ".join(f"{loss:.3f}" for loss in losses)
    fine = len(losses) == STEPS and losses[-1] < losses[0]
    return CheckLine("ok" if fine else "error", f"SFT on two CPU processes, tp=2: losses {shown}")


def _command(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "verl.trainer.sft_trainer", "engine=fsdp_runtime", "engine.tp=2", "engine.param_dtype=fp32"),
        f"data.train_files={folder}/rows.parquet",
        f"data.val_files={folder}/rows.parquet",
        *("data.train_batch_size=8", "data.max_length=32", "data.max_token_len_per_gpu=128", "data.num_workers=0"),
        "data.ignore_input_ids_mismatch=True",
        f"model.path={folder}/model",
        *("+model.override_config.attn_implementation=sdpa", "model.use_remove_padding=True", "optim.lr=1e-2"),
        *("trainer.device=cpu", "trainer.logger=[console,file]", "trainer.resume_mode=disable"),
        *(f"trainer.total_training_steps={STEPS}", f"trainer.default_local_dir={folder}/checkpoints"),
    ]


def _write(folder: Path) -> None:
    """A tiny Llama, a tokenizer of a few words, and rows that repeat a digit."""
    import pandas
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", chat_template=_TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=len(_WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    models_of_text: Any = AutoModelForCausalLM
    models_of_text.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    digits = [str(row % 10) for row in range(40)]
    rows = [
        [{"role": "user", "content": f"say {digit}"}, {"role": "assistant", "content": f"{digit} {digit} {digit}"}]
        for digit in digits
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(folder / "rows.parquet")
