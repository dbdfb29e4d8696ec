"""A task that a CPU learns in a minute: asked for a digit, answer with nothing but that digit.

``python toy_task.py FOLDER`` writes a tiny policy, a tiny critic, their tokenizer, and the rows of SFT and of RL.  verl
calls ``compute_score`` (``reward.custom_reward_function``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

LENGTH = 8  # digits of an answer
DIGITS = [str(digit) for digit in range(10)]
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% if m['role'] == 'assistant' %}<eos> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Return the part of a full answer that is the digit asked for."""
    return solution_str.split().count(ground_truth) / LENGTH


def write(folder: Path, *, prompts: int = 320, seed: int = 0) -> None:
    """Write ``policy/``, ``critic/``, ``rl.parquet``, ``sft.parquet`` and their ``-held-out`` rows into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _models(folder, seed)
    for name, number in (("", prompts), ("-held-out", 20)):
        digits = [DIGITS[row % len(DIGITS)] for row in range(number)]  # a batch of ten asks for each digit once
        _parquet(folder / f"rl{name}.parquet", [_question(digit, row) for row, digit in enumerate(digits)])
        _parquet(folder / f"sft{name}.parquet", [_answered(digit) for digit in digits])


def _question(digit: str, row: int) -> dict[str, Any]:
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": f"say {digit}"}],
        "ability": "toy",
        "reward_model": {"style": "rule", "ground_truth": digit},
        "extra_info": {"index": row, "split": "train"},
    }


def _answered(digit: str) -> dict[str, Any]:
    answer = " ".join([digit] * LENGTH)
    return {"messages": [{"role": "user", "content": f"say {digit}"}, {"role": "assistant", "content": answer}]}


def _parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pandas

    pandas.DataFrame(rows).to_parquet(path)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, "say", *DIGITS]
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
    )


def _models(folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
        initializer_range=0.08,
    )
    for name, model_class in (("policy", AutoModelForCausalLM), ("critic", AutoModelForTokenClassification)):
        torch.manual_seed(seed)
        model_class.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
