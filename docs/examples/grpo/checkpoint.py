"""The checkpoint that the run starts from: a user's own, or a small real one that is written here."""

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

MIXTURE = "mixture"
"""The name that stands for a small mixture of experts in the place of the small dense model."""


def find_checkpoint(model: str) -> Path:
    """The folder of a user's checkpoint.

    Args:
        model: A folder, or the id of a model on the Hugging Face hub, which is then fetched into the hub's cache.

    Returns:
        A folder with weights in safetensors files, a config and a tokenizer.
    """
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"]))


def write_checkpoint(folder: Path, seed: int, mixture: bool = False) -> Path:
    """Write a freshly initialised checkpoint that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Args:
        folder: Where to write; made if it is not there.
        seed: Seed of the random weights.
        mixture: Write a mixture of experts.

    Returns:
        The folder.
    """
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small_mixture(tokenizer) if mixture else small_config(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 259 tokens: one for each byte, and three specials. It has a token form for any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def small_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """A Qwen3 architecture of 0.4 million parameters over a tokenizer's vocabulary, embeddings tied."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        # The default of 0.02 suits a width of thousands; so narrow a model learns faster from a wider spread.
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def small_mixture(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """The same with eight experts in each layer, of which a token uses two."""
    return Qwen3MoeConfig(
        **{
            name: value
            for name, value in small_config(tokenizer).to_dict().items()
            if name not in ("model_type", "architectures", "layer_types")
        },
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        norm_topk_prob=True,
    )
