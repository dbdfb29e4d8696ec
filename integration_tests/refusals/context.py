"""What context parallelism refuses: models when they are parallelized, and inputs of their forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from coverage.multimodal import multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from fsdp_runtime import parallelize, sequence_layout
from fsdp_runtime.setup import ModelFacts
from fsdp_runtime.steps import ContextAttention
from fsdp_runtime.steps.context.inputs import _require_order
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.methods import Method
from fsdp_runtime.steps.context.outputs import GlobalRows, LossOfRows
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.context.step import attention_of, check_context_parallel, replace_attention
from harness.models import tiny_inputs, tiny_model
from refusals import Provocations
from refusals.worlds import headed, ids, parallelized, refuse, row, with_attention, world

CP = {"cp": 2}
LAYOUT = SequenceLayout(length=8, ranks=2, rank=0)


def _llama() -> Any:
    return tiny_model("LlamaForCausalLM")


def _forward(inputs: Mapping[str, Any], model: nn.Module | None = None, *args: Any, **options: Any) -> None:
    """Call a model on the first of two ranks of ``cp``."""
    with parallelized(model or _llama(), CP, **options) as found:
        found(*args, **inputs)


def _given(**changes: Any) -> None:
    _forward({**tiny_inputs(_llama(), batch=2, length=6), **changes})


def _attend(
    change: Callable[[ContextAttention], None] = lambda attention: None,
    *,
    way: Method = "allgather",
    heads: int = 2,
    keys: int = 4,
    **options: Any,
) -> None:
    """Call attention as a model of one's own does, on the first of two ranks."""
    with world(**CP) as mesh:
        attention = ContextAttention(mesh.get_group("cp"), "headtail", way)
        change(attention)
        query, key = torch.ones(1, heads, 4, 8), torch.ones(1, heads, keys, 8)
        attention.attend(nn.Identity(), query, key, key, options.pop("attention_mask", None), **options)


def _eager(attention: ContextAttention) -> None:
    attention.eager = lambda cls: lambda *args, **kwargs: (args[1], None)


def _mixer(*args: Any, **kwargs: Any) -> None:
    """Call a mixer that runs on full sequences."""
    with parallelized(_xglm(), CP) as model:
        model.model.layers[0].self_attn(*args, **kwargs)


def _own_mask() -> None:
    with world(**CP) as mesh:
        ContextAttention(mesh.get_group("cp"), "headtail").full_mask(torch.ones(1, 1, 4, 8), LAYOUT)


def _other_attention() -> None:
    with parallelized(_llama(), CP) as model:
        model.set_attn_implementation("sdpa")
        model(input_ids=ids(1, 4))


def _derived() -> None:
    _forward(
        {"input_ids": ids(1, 8), "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}, headed("opt", "trunk")
    )


def _alone(model: nn.Module, inputs: Mapping[str, Any], *, unmasked: str = "", cuts_padding: bool = False) -> None:
    """Call a model on one rank of ``cp``."""
    with world() as mesh:
        attention = ContextAttention(mesh.get_group("cp"), "headtail")
        attention.unmasked = unmasked
        replace_attention(model, attention, shared_prefixes=True, cuts_padding=cuts_padding)
        model(**inputs)


def _media(kind: str, **changes: Any) -> None:
    """Call a multimodal model with images on one rank of ``cp``."""
    model = multimodal_model(kind)
    inputs = multimodal_inputs(model)
    for name in ("token_type_ids", "mm_token_type_ids"):
        inputs.pop(name, None)
    places = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
    _alone(model, {**inputs, "position_ids": places, **changes})


def _router_logits() -> None:
    with parallelized(tiny_model("Qwen3MoeForCausalLM"), CP) as model:
        gate = model.model.layers[0].mlp.gate
        gate.register_forward_hook(lambda *_: (torch.ones(5, 8), *_[2][1:]))
        model(input_ids=ids(1, 8), output_router_logits=True)


def _cut_otherwise() -> None:
    with world(**CP) as mesh:
        model = parallelize(_llama(), mesh)
        model(**sequence_layout(mesh, 8, load_balancer=None).shard_batch({"input_ids": ids(1, 8)}))


def _order() -> None:
    rows = torch.arange(8)[None]
    cut = [SequenceLayout(8, 2, rank, None).shard(rows, dim=-1) for rank in range(2)]
    _require_order(torch.cat(cut, -1).index_select(-1, LAYOUT.permutation.argsort()), LAYOUT)


def _check(model: nn.Module, way: Method = "allgather") -> None:
    check_context_parallel(ModelFacts.of(model), way)


def _rope() -> Any:
    model = _llama()
    model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}  # without transformers' embeddings
    return model


CASES: Provocations = {
    "fsdp_runtime/steps/context/attention.py": {
        "LayoutError: does not come from transformers' mask functions": _own_mask,
        "ModelError: attends from": lambda: _attend(keys=6),
        "ModelError: changes scores in a way": lambda: _attend(softcap=30.0),
        "ModelError: the rows of one rank only": lambda: _attend(way="ring", attention_mask=torch.ones(1, 1, 4, 4)),
    },
    "fsdp_runtime/steps/context/mixers.py": {
        "LayoutError: takes no tensor [batch": lambda: _mixer(None),
        "LayoutError: makes its masks itself": lambda: _mixer(
            torch.ones(1, 4, 16), attention_mask=torch.zeros(1, 1, 3, 3), position_ids=ids(1, 4)
        ),
        "LayoutError: for each pair of this rank's tokens": lambda: _mixer(torch.ones(1, 4, 16), distances=ids(4, 4)),
    },
    "fsdp_runtime/steps/context/inputs.py": {
        "LayoutError: takes its inputs by name": lambda: _forward({}, None, ids(1, 4)),
        "LayoutError: neither input_ids nor": lambda: _given(input_ids=None),
        "LayoutError: output_router_logits beside": lambda: _alone(
            tiny_model("Qwen3MoeForCausalLM"),
            {"input_ids": ids(1, 4), "attention_mask": torch.ones(1, 4), "output_router_logits": True},
            cuts_padding=True,
        ),
        "LayoutError: derives positions from": _derived,
        "LayoutError: position_ids restart within": lambda: _alone(
            _llama(), {"input_ids": ids(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}, unmasked="layers.0"
        ),
        "LayoutError: need position_ids, and take no": lambda: _alone(
            _llama(), {"input_ids": ids(1, 4), "subtree_end": torch.full((1, 4), 4)}
        ),
        "LayoutError: attention_mask beside position_ids": lambda: _forward(
            {"input_ids": ids(1, 4), "position_ids": ids(1, 4), "attention_mask": torch.ones(1, 4)},
            packed_sequences=True,
        ),
        "LayoutError: the batch was cut by another load balancer": (_cut_otherwise, _order),
        "LayoutError: computes its loss by custom code": lambda: _forward(
            {"input_ids": ids(1, 4), "labels": ids(1, 4)}, headed("bert", "masked")
        ),
        "LayoutError: where the length is": (
            lambda: _given(labels=torch.zeros(2, 5)),
            lambda: _given(attention_mask=torch.ones(2, 5)),
            lambda: _given(position_ids=torch.ones(2, 5)),
        ),
        "ModelError: was set after parallelize": _other_attention,
        "LayoutError: logits_to_keep of": lambda: _given(logits_to_keep=torch.ones(2, 6, dtype=torch.bool)),
        "LayoutError: a key/value cache would hold the keys of this rank only": (
            lambda: _given(use_cache=True),
            lambda: _given(other=_cache()),
        ),
        "LayoutError: cannot be sharded along the tokens": lambda: _given(pixel_values=torch.ones(2, 3)),
    },
    "fsdp_runtime/steps/outputs/full_tensors.py": {
        "LayoutError: computes a part of each attention map": lambda: _given(output_attentions=True),
    },
    "fsdp_runtime/steps/context/media.py": {
        "LayoutError: media without position_ids": (
            lambda: _media("llava", position_ids=None),
            lambda: _media("qwen3_vl"),
        ),
        "LayoutError: media beside inputs_embeds": lambda: _media(
            "llava", input_ids=None, inputs_embeds=torch.ones(1, 4, 64)
        ),
        "LayoutError: beside embeddings with media": lambda: _media("gemma3"),
    },
    "fsdp_runtime/steps/context/masks.py": {
        "LayoutError: leave logits_to_keep out": lambda: SequenceMask(
            lambda *_: torch.ones(1), LAYOUT, torch.device("cpu")
        )[:, :, -1:, :],
    },
    "fsdp_runtime/steps/context/methods.py": {
        "ModelError: computes softmax(q k) v": (
            lambda: _over_cp(row("granite_swa"), context_parallel="ring"),
            lambda: _over_cp(tiny_model("LlamaForCausalLM", attention_dropout=0.1), context_parallel="ring"),
            lambda: _attend(way="ring", dropout=0.1),
        ),
        "ModelError: divides heads over cp": (
            lambda: refuse(_llama(), {"cp": 3}, context_parallel="ulysses"),
            lambda: _attend(way="ulysses", heads=3),
        ),
    },
    "fsdp_runtime/steps/context/outputs.py": {
        "LayoutError: router logits (5, 8) are not": _router_logits,
        "LayoutError: of a loss are not": lambda: LossOfRows(lambda *_: torch.ones(()), GlobalRows(1, LAYOUT, None))(  # type: ignore[arg-type]
            torch.ones(1, 3, 8), ids(1, 4)
        ),
    },
    "fsdp_runtime/steps/context/sharding.py": {
        "LayoutError: give an integer": (lambda: SequenceLayout(0, 2, 0), lambda: SequenceLayout(8, 2, 2)),
        "LayoutError: are not divisible over": lambda: SequenceLayout(6, 2, 0),
        "LayoutError: give one entry for each of the 8 tokens on dim 1": (
            lambda: LAYOUT.shard(torch.ones(8)),
            lambda: LAYOUT.shard(torch.ones(1, 9)),
        ),
        "LayoutError: pass values per sample": (
            lambda: LAYOUT.shard_batch({"rewards": torch.ones(8)}),
            lambda: LAYOUT.shard_batch({"input_ids": torch.ones(1, 8), "other": torch.ones(1, 9)}),
        ),
    },
    "fsdp_runtime/steps/context/step.py": {
        "ModelError: picks one token": lambda: _over_cp(_reward_model(), plan=None),
        "ModelError: makes one vector of each row": lambda: _over_cp(headed("bert", "trunk"), plan=None),
        "ModelError: cannot run on a part of a row: its ": (
            lambda: _over_cp(_t5(), plan=None),
            lambda: _over_cp(headed("mobilebert", "masked"), plan=None),
            lambda: _over_cp(headed("deberta", "masked"), plan=None),
        ),
        "ModelError: computes attention by": lambda: _over_cp(with_attention("flex_attention")),
        "ModelError: has rotary embeddings of type": lambda: _over_cp(_rope()),
        "ModelError: is not under context parallelism": lambda: attention_of(_llama()),
    },
}


def _over_cp(model: nn.Module, **options: Any) -> None:
    refuse(model, CP, **options)


def _cache() -> Any:
    return transformers.DynamicCache()


def _xglm() -> Any:
    """A model whose attention does not use ``transformers.AttentionInterface``."""
    sizes: Any = {"vocab_size": 16, "d_model": 16, "num_layers": 1, "attention_heads": 2, "ffn_dim": 16}
    return transformers.XGLMForCausalLM(transformers.XGLMConfig(max_position_embeddings=16, **sizes)).eval()


def _reward_model() -> Any:
    sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32)
    return transformers.RobertaForSequenceClassification(config)


def _t5() -> Any:
    sizes: Any = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
