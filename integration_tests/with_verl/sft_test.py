"""verl's SFT trainer with this engine and with verl's own, by its command; run by ``nox -s verl``, which has verl."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import checkpoints_on_disk  # after the check

OURS = ("engine=fsdp_runtime", "engine.param_dtype=fp32")
VERLS = (
    "engine.strategy=fsdp2",
    "+engine.mixed_precision.param_dtype=fp32",
    "+engine.mixed_precision.reduce_dtype=fp32",
    "engine.use_torch_compile=False",
)
COMMON = (
    "data.train_batch_size=8",
    "data.micro_batch_size_per_gpu=2",
    "data.use_dynamic_bsz=False",
    "data.num_workers=0",
    "data.max_length=256",
    "data.ignore_input_ids_mismatch=True",
    "+model.override_config.attn_implementation=sdpa",
    "model.enable_gradient_checkpointing=False",
    "optim.lr=1e-2",
    "+optim.override_optimizer_config.eps=1e-3",  # AdamW divides gradients near zero by their own size
    "trainer.device=cpu",
    "trainer.logger=[console,file]",
    "trainer.total_epochs=1",
    "trainer.test_freq=-1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints with a tokenizer of bytes, and 48 rows of messages."""
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("sft")
    letters = Tokenizer(
        models.BPE(vocab={each: i for i, each in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for kind in ("dense", "mixture", "hybrid"):
        tokenizer.save_pretrained(checkpoints_on_disk.write(kind, folder))
    draw = random.Random(0)
    rows = [
        [
            {"role": "user", "content": f"add {draw.randrange(50)} and {draw.randrange(50)}"},
            {"role": "assistant", "content": str(draw.randrange(99)) * draw.randrange(1, 4)},
        ]
        for _ in range(48)
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(folder / "rows.parquet")
    return folder


def train(folder: Path, name: str, *options: str, kind: str = "dense") -> dict[int, dict[str, float]]:
    """The metrics of each step of verl's command on two processes."""
    log = folder / f"{name}.jsonl"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "VERL_USE_EXTERNAL_MODULES": "with_verl.cpu_platform,with_verl.verls_on_cpu",
        "VERL_FILE_LOGGER_PATH": str(log),
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
    }
    files = (f"data.train_files={folder}/rows.parquet", f"model.path={folder}/{kind}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (*torchrun, "-m", "verl.trainer.sft_trainer", *files, *COMMON, *options)
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[int, dict[str, Any]] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], {}).update(entry.get("data", entry))
    return found


def test_sft_has_verls_losses_and_goes_on_from_checkpoints_of_other_meshes(folder: Path) -> None:
    """Also with another number of ranks of dp, for which verl's state of the data is rewritten."""
    anew = ("trainer.resume_mode=disable",)
    expected = train(folder, "verl", *VERLS, *anew, "trainer.save_freq=-1")
    assert len(expected) == 6
    agree(expected, train(folder, "dp", *OURS, *anew, *_saves(folder, "dp")))
    for name, mesh, start in (("tp", "tp=2", "dp/global_step_2"), ("cp", "cp=2", "tp/global_step_4")):
        found = train(folder, name, *OURS, f"engine.{mesh}", *_resumes(folder, start), *_saves(folder, name))
        agree({step: metrics for step, metrics in expected.items() if step > int(start[-1])}, found)
    again = train(folder, "again", *OURS, *_resumes(folder, "tp/global_step_4"), *_saves(folder, "again"))
    agree({step: expected[step] for step in (5, 6)}, again)


@pytest.mark.parametrize(("kind", "mesh"), [("mixture", "ep=2"), ("hybrid", "cp=2")])
def test_sft_of_a_mixture_and_of_a_hybrid(kind: str, mesh: str, folder: Path) -> None:
    """verl's own engine lets delta nets read the sample before in packed rows: it gets padded ones."""
    short = ("trainer.resume_mode=disable", "trainer.save_freq=-1", "trainer.total_training_steps=3")
    padded = "model.use_remove_padding=False"
    expected = train(folder, f"{kind}-verl", *VERLS, *short, padded, kind=kind)
    agree(expected, train(folder, f"{kind}-ours", *OURS, f"engine.{mesh}", *short, kind=kind))


def _saves(folder: Path, name: str) -> tuple[str, ...]:
    return f"trainer.default_local_dir={folder}/{name}", "trainer.save_freq=2"


def _resumes(folder: Path, start: str) -> tuple[str, ...]:
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/{start}"


def agree(expected: dict[int, dict[str, float]], found: dict[int, dict[str, float]]) -> None:
    assert sorted(found) == sorted(expected)
    for step, metrics in expected.items():
        for name in ("train/loss", "train/grad_norm"):
            assert found[step][name] == pytest.approx(metrics[name], rel=1e-5), (step, name)
