"""Trained multi-token heads: one process has transformers' heads, and every mesh has the gradients of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, pad
from transformers.modeling_layers import MtpModel

from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import (
    ModelError,
    OptionError,
    forward_with_lm_head,
    parallelize,
    record_routes,
    replay_routes,
    sequence_layout,
    submesh,
)
from fsdp_runtime.errors import LayoutError, RoutesError
from fsdp_runtime.steps import MultiTokenHeads
from fsdp_runtime.steps.multi_token_heads import LAYOUTS
from harness.float64 import compute_in_float64
from harness.models import tiny_inputs
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool
from rl_logprobs import linear_token_logprobs

ROWS, LENGTH, BOUND = 4, 16, 1e-12
DOCUMENTS = (5, 2, 9)
OPTIONS = {"use_cache": False, "num_items_in_batch": ROWS * LENGTH}


def _plain(name: str) -> Any:
    """A tiny model; its config states the attention of heads where the tiny decoder has none of the default type."""
    model = tiny_model(coverage_entries()[name])
    if name in ("mellum", "exaone_moe"):
        model.config.mtp_layer_types = ["full_attention"]
    return model


def _model(name: str, **options: Any) -> tuple[Any, MultiTokenHeads]:
    """A model with jittered heads, in float64."""
    model = _plain(name)
    heads = MultiTokenHeads(model, **options)
    draw = torch.Generator().manual_seed(5)
    for block in model.model.layers[model.config.num_hidden_layers :]:
        for parameter in block.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
    return model, heads


def _batch(model: nn.Module, packed: bool) -> dict[str, Tensor]:
    ids = tiny_inputs(model, batch=ROWS, length=LENGTH)["input_ids"]
    if not packed:
        return {"input_ids": ids, "labels": ids}
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand_as(ids)
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def _loss(model: nn.Module, heads: MultiTokenHeads, inputs: Mapping[str, Tensor]) -> Tensor:
    return model(**inputs, **OPTIONS).loss + heads.loss


def _expected(name: str, build: Mapping[str, Any], packed: bool) -> dict[str, Tensor | None]:
    """The gradients of one process, in which every document is alone."""
    model, heads = _model(name, **build)
    ids = _batch(model, packed)["input_ids"]
    for document in ids.split(DOCUMENTS if packed else LENGTH, dim=1):
        _loss(model, heads, {"input_ids": document, "labels": document}).backward()
    return {path: parameter.grad for path, parameter in model.named_parameters()}


def _wrong(name: str, axes: Mapping[str, int], options: Mapping[str, Any], build: Mapping[str, Any]) -> list[str]:
    """Parameters with wrong gradients on this rank."""
    packed = "packed_sequences" in options
    with compute_in_float64():
        expected = _expected(name, build, packed)
        model, heads = _model(name, **build)
        batch, mesh = _batch(model, packed), mesh_for(axes)
        parallelize(model, mesh, **options)
        data, layout = submesh(mesh, "dp"), sequence_layout(mesh, LENGTH)
        rows = {key: value[data.get_local_rank() :: data.size()] for key, value in batch.items()}
        (_loss(model, heads, layout.shard_batch(rows)) * data.size()).backward()
    return [path for path, error in gradient_errors(expected, model).items() if not error <= BOUND]


#: Name to model, mesh, options of ``parallelize``, and options of the heads.
CASES: dict[str, tuple[Any, ...]] = {
    "two heads, sharded": ("deepseek_v3", {"dp_shard": 2}, {"activation_checkpointing": "block"}, {"count": 2}),
    "tensor parallel": ("deepseek_v3", {"tp": 2}, {}, {}),
    "sequence parallel": ("glm4_moe", {"tp": 2}, {"sequence_parallel": True}, {"count": 2}),
    "context parallel": ("qwen3_next", {"cp": 2}, {}, {}),
    "packed, context parallel": ("glm4_moe", {"cp": 2}, {"packed_sequences": True}, {"count": 2}),
    "packed": ("qwen3_5_text", {"dp_shard": 2}, {"packed_sequences": True}, {}),
    "states sharded on the sequence": ("qwen3_5_text", {"tp": 2}, {"sequence_parallel": True}, {}),
    "sliding windows and dense heads": ("mimo_v2_flash", {"tp": 2}, {}, {"count": 2}),
    "blocks that return a tuple": ("glm_moe_dsa", {"dp_shard": 2, "ep": 2}, {}, {"count": 2}),
}
#: The rows that no case has.
MORE = [(name, axes) for name in LAYOUTS for axes in ({"tp": 2}, {"cp": 2}, {"dp_shard": 2})]


@pytest.mark.parametrize("case", CASES)
def test_multi_token_heads_have_the_gradients_of_one_process(two_ranks: RankPool, case: str) -> None:
    assert two_ranks.run(_wrong, *CASES[case]) == [[]] * 2


def _adapted_losses() -> tuple[float, float]:
    """The loss of packed rows of a model with new adapters, and the loss of its documents alone."""
    with compute_in_float64():
        model, heads = _model("glm4_moe")
        inputs = _batch(model, packed=True)
        documents = [{"input_ids": ids, "labels": ids} for ids in inputs["input_ids"].split(DOCUMENTS, dim=1)]
        alone = sum(float(_loss(model, heads, document)) for document in documents)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        parallelize(adapted, mesh_for({"dp_replicate": 2}), packed_sequences=True)
        return float(_loss(adapted, heads, inputs)), alone


def test_multi_token_heads_beside_adapters_keep_packed_documents_alone(two_ranks: RankPool) -> None:
    for packed, alone in two_ranks.run(_adapted_losses):
        assert packed == pytest.approx(alone, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), MORE)
def test_multi_token_heads_of_each_family_have_the_gradients_of_one_process(
    two_ranks: RankPool, name: str, axes: Mapping[str, int]
) -> None:
    assert two_ranks.run(_wrong, name, axes, {}, {}) == [[]] * 2


def test_multi_token_heads_of_experts_on_an_axis_have_the_gradients_of_one_process(four_ranks: RankPool) -> None:
    assert four_ranks.run(_wrong, "qwen3_next", {"dp_shard": 2, "tp": 2, "ep": 4}, {}, {}) == [[]] * 4


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "mellum"])
def test_multi_token_heads_in_one_process_equal_those_of_transformers(name: str) -> None:
    with compute_in_float64():
        plain = _plain(name)
        plain.config.num_mtp_layers = 1
        plain.config.mtp_layer_types = ["full_attention"] if hasattr(plain.config, "layer_types") else None
        plain.config.mtp_mlp_layer_types = ["sparse"]
        model, heads = _model(name)
        rows = tiny_inputs(model, batch=2, length=LENGTH)["input_ids"]
        model(rows, labels=rows, use_cache=False)
        theirs = MtpModel(plain, 1).double()
        block = {path.replace("shared_head.norm", "post_norm"): each for path, each in _block(model).items()}
        inside = ("enorm", "hnorm", "eh_proj", "post_norm")
        named = {path if path.startswith(inside) else f"mtp_block.{path}": each for path, each in block.items()}
        theirs.layers[0].load_state_dict(named)
        states = plain.model(rows, use_cache=False).last_hidden_state
        hidden = theirs.forward_layer(
            0, states, torch.arange(LENGTH)[None] + 1, None, input_ids=pad(rows[:, 1:], (0, 1))
        )
        expected = cross_entropy(plain.lm_head(hidden)[:, :-2].flatten(0, 1), rows[:, 2:].flatten())
    assert largest(heads.hidden_states[0] - hidden) < BOUND
    assert abs(heads.loss - expected) < BOUND


def _block(model: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = model.model.layers[-1].state_dict()
    return tensors


def _detached(axes: Mapping[str, int]) -> tuple[set[str], list[str]]:
    """The parameters with gradients of the heads' loss alone, and those that differ from the joined trunk's."""
    expected, joined = {}, {}
    for detach in (True, False):
        model, heads = _model("glm4_moe", detach=detach)
        parallelize(model, mesh_for(axes))
        rows = _batch(model, packed=False)
        model(**rows, **OPTIONS)
        heads.loss.backward()
        gradients = {path: each.grad for path, each in model.named_parameters() if each.grad is not None}
        expected, joined = (gradients, joined) if detach else (expected, gradients)
    wrong = [path for path, each in expected.items() if not torch.equal(_local(each), _local(joined[path]))]
    return joined.keys() - expected.keys(), wrong


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def test_multi_token_heads_with_a_detached_trunk_leave_it_without_gradients(two_ranks: RankPool) -> None:
    for without, wrong in two_ranks.run(_detached, {"dp_shard": 2}):
        assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < without
        assert not [path for path in without if path.startswith("model.layers.2.")]
        assert not wrong


def _log_probs(options: Mapping[str, Any]) -> float:
    """The difference of a head's log-probs from hidden states and from logits."""
    model, heads = _model("glm4_moe")
    parallelize(model, mesh_for({"tp": 2}), **options)
    rows = _batch(model, packed=False)
    targets = pad(rows["input_ids"][:, 2:], (0, 2), value=-100)
    model(**rows, **OPTIONS)
    expected, loss = heads.loss, None

    def log_probs(hidden: Tensor, head: Any) -> Tensor:
        return linear_token_logprobs(heads.hidden_states[0], head.weight, targets)

    found = forward_with_lm_head(model, log_probs, rows["input_ids"], use_cache=False)
    loss = -found.sum() / OPTIONS["num_items_in_batch"]
    return float((loss - expected).abs())


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_multi_token_heads_give_log_probs_from_hidden_states(two_ranks: RankPool, options: Mapping[str, Any]) -> None:
    assert max(two_ranks.run(_log_probs, options)) < 1e-6


def test_multi_token_heads_refuse_models_counts_and_embeddings() -> None:
    model, _ = _model("glm4_moe")
    with pytest.raises(ModelError, match="Glm4MoeForCausalLM has multi-token heads already"):
        MultiTokenHeads(model)
    with pytest.raises(ModelError, match="LlamaForCausalLM has no known multi-token heads"):
        MultiTokenHeads(tiny_model(coverage_entries()["llama"]))
    with pytest.raises(ModelError, match="its trunk runs every block of its list"):
        MultiTokenHeads(tiny_model(coverage_entries()["nemotron_h"]))
    with pytest.raises(ModelError, match="give the config mtp_layer_types"):
        MultiTokenHeads(tiny_model(coverage_entries()["exaone_moe"]))
    with pytest.raises(ModelError, match="need a block of sliding_attention: layer_types="):
        MultiTokenHeads(tiny_model(coverage_entries()["mellum"]))
    with pytest.raises(OptionError, match="count=2: qwen3_next has 1 head"):
        MultiTokenHeads(tiny_model(coverage_entries()["qwen3_next"]), count=2)
    rows = tiny_inputs(model, batch=1, length=LENGTH)["input_ids"]
    with pytest.raises(LayoutError, match="give input_ids, not inputs_embeds"):
        model(inputs_embeds=model.get_input_embeddings()(rows), use_cache=False)
    with pytest.raises(ModelError, match="the forward of the model with multi-token heads was passed by"):
        model.model(rows)


def test_replay_routes_of_a_generator_have_no_layer_for_a_head() -> None:
    model, _ = _model("glm4_moe")  # a dense block, a mixture, and the head, which is a mixture
    rows = _batch(model, packed=False)
    with record_routes(model) as routes:
        expected = model(**rows, use_cache=False).logits
    assert [*routes] == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    of_mixture = routes["model.layers.1.mlp.gate"]
    for layers in ([of_mixture], [torch.full_like(of_mixture, -1), of_mixture]):  # of mixtures, or of all blocks
        with replay_routes(model, torch.stack(layers)):
            assert torch.equal(model(**rows, use_cache=False).logits, expected)
    with pytest.raises(RoutesError, match="routes of 3 layers: this model has 1 routers in 2 blocks"):
        replay_routes(model, torch.stack([of_mixture] * 3)).__enter__()
