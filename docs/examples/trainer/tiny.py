"""A tiny checkpoint with a tokenizer of numbers and a few signs, so that the examples need no download."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<bos>", "<eos>", "+", "=", *map(str, range(40))]


def checkpoint() -> str:
    """Write a checkpoint on the first rank, and return its folder on every rank."""
    folder = [tempfile.mkdtemp(prefix="tiny-")] if dist.get_rank() == 0 else [""]
    if dist.get_rank() == 0:
        write(Path(folder[0]))
    dist.broadcast_object_list(folder)
    return folder[0]


def write(folder: Path) -> None:
    """Write a freshly initialised Llama of two layers."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), initializer_range=0.08, **sizes, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
