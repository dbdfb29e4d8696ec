"""The loss that a model computes from ``labels`` while its logits are sharded on the vocabulary."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BartConfig, BartForCausalLM, T5Config, T5ForConditionalGeneration

from fsdp_runtime import parallelize
from fsdp_runtime.trainers.logits import compute_losses_on
from harness.layers import gradient_mismatches
from harness.models import tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

TOKENS = torch.randint(3, 130, (2, 7), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.masked_fill(torch.arange(7) < 2, -100)


def _differences() -> list[str]:
    qwen = tiny_model("Qwen3ForCausalLM")
    plain: dict[str, Any] = {"Qwen3": qwen, "T5": _t5(), "adapters": _adapted(qwen)}
    wrong = []
    for name, reference in plain.items():
        wanted = reference(input_ids=TOKENS, labels=LABELS)
        wanted.loss.backward()
        for sequence_parallel in (False, True):
            model = _adapted(qwen) if name == "adapters" else copy.deepcopy(reference)
            parallelize(model, mesh_for({"tp": 2}), sequence_parallel=sequence_parallel)
            found = model(input_ids=TOKENS, labels=LABELS)
            found.loss.backward()
            case = f"{name}, {'SP' if sequence_parallel else 'TP'}"
            if not torch.allclose(found.loss, wanted.loss, atol=1e-12) or isinstance(found.logits, DTensor):
                wrong.append(f"{case}: loss")
            if found.logits._is_view():  # FSDP2 warns of views
                wrong.append(f"{case}: logits are a view")
            wrong += [f"{case}: {each}" for each in gradient_mismatches(reference, model, bound=1e-10)]
            if not isinstance(model(input_ids=TOKENS, **_no_labels(name)).logits, DTensor):
                wrong.append(f"{case}: logits of a forward without labels are full")
    return wrong


def _with_loss_of_trainers() -> list[bool]:
    """Return whether losses are right, and which logits stay sharded, with the loss that our trainers give a model."""
    found = []
    for plain in (tiny_model("Qwen3ForCausalLM"), _bart()):
        mesh = mesh_for({"tp": 2})
        model: Any = parallelize(copy.deepcopy(plain), mesh)
        compute_losses_on(model, mesh)
        wanted, output = (each(input_ids=TOKENS, labels=LABELS) for each in (plain, model))
        # transformers' loss is computed in float32
        found += [torch.allclose(output.loss.float(), wanted.loss.float()), isinstance(output.logits, DTensor)]
    return found


def _bart() -> Any:
    """A causal language model whose code calls torch's cross entropy itself."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 130, "d_model": 16, "decoder_ffn_dim": 32, "decoder_layers": 1}
    model: Any = BartForCausalLM(BartConfig(**sizes, decoder_attention_heads=4))
    return model.double().eval()


def _t5() -> Any:
    """A model whose code calls torch's cross entropy itself."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 130, "d_model": 16, "d_ff": 32, "d_kv": 4, "num_heads": 4, "num_layers": 1}
    config: Any = T5Config(**sizes)
    config.decoder_start_token_id = 0
    model: Any = T5ForConditionalGeneration(config)
    return model.double().eval()


def _adapted(model: nn.Module) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False).double().eval()


def _no_labels(name: str) -> dict[str, Any]:
    return {"decoder_input_ids": TOKENS} if name == "T5" else {}


def test_a_model_computes_the_loss_of_one_process_from_labels(two_ranks: RankPool) -> None:
    assert two_ranks.run(_differences) == [[], []]


def test_the_loss_of_trainers_takes_sharded_logits_where_the_model_calls_it(two_ranks: RankPool) -> None:
    assert two_ranks.run(_with_loss_of_trainers) == [[True, True, True, False]] * 2
