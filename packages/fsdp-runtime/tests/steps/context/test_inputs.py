"""Every input of a forward under context parallelism is taken as of full rows, or refused on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import LayoutError, MeshSpec, parallelize, sequence_layout
from fsdp_runtime.steps import ContextAttention, ContextParallel
from fsdp_runtime.steps.context.inputs import _require_order
from fsdp_runtime.steps.context.sharding import LoadBalancer, SequenceLayout
from fsdp_runtime.steps.context.step import replace_attention
from harness.float64 import compute_in_float64
from harness.models import tiny_inputs, tiny_model
from harness.parity import gradient_errors, largest, mesh_for
from harness.ranks import RankPool

LENGTH = 16
BALANCERS: tuple[LoadBalancer, ...] = ("headtail", None)


def _alone() -> nn.Module:
    """A model on one rank of cp."""
    return _on_one_rank(tiny_model("LlamaForCausalLM"))


def _on_one_rank(model: nn.Module) -> nn.Module:
    replace_attention(model, ContextAttention(MeshSpec().build(device_type="cpu").get_group("cp"), "headtail"))
    return model


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"labels": torch.zeros(2, 5, dtype=torch.long)}, r"labels \(2, 5\): give \[batch, length\], where the"),
        ({"use_cache": True}, "a key/value cache would hold the keys of this rank only: pass use_cache=False"),
        ({"cache_params": object()}, "a key/value cache would hold the keys"),
        ({"logits_to_keep": torch.ones(2, 6, dtype=torch.bool)}, "logits_to_keep of LlamaForCausalLM: under cp it is"),
        ({"logits_to_keep": 3, "labels": torch.zeros(2, 6, dtype=torch.long)}, "of the full row, without labels"),
        ({"output_attentions": True}, "a rank of cp computes a part of each attention map"),
        ({"token_type_ids": torch.zeros(2, 6)}, r"token_type_ids \(2, 6\) cannot be sharded along the tokens"),
        ({"encoder_outputs": (torch.zeros(2, 6),)}, r"encoder_outputs \(2, 6\) cannot be sharded"),
        ({"pixel_values": torch.zeros(2, 3)}, r"pixel_values \(2, 3\) cannot be sharded along the tokens: compute th"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask \(2, 5\): .* length is 6, this rank's tokens"),
        ({"position_ids": torch.ones(2, 5)}, r"position_ids \(2, 5\): .* length is 6, this rank's tokens"),
        ({"input_ids": None}, "neither input_ids nor inputs_embeds"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_inputs_that_cannot_be_cut_are_refused_with_the_fix(inputs: dict[str, Any], message: str) -> None:
    model = _alone()
    with pytest.raises(LayoutError, match=message):
        model(**{**tiny_inputs(model, batch=2, length=6), **inputs})


def test_outputs_that_a_config_asks_for_are_refused() -> None:
    model = tiny_model("LlamaForCausalLM")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    _on_one_rank(model)
    with pytest.raises(LayoutError, match="a rank of cp computes a part of each attention map"):
        model(**tiny_inputs(model, batch=2, length=6))


@pytest.mark.parametrize("kept", [{"logits_to_keep": 0}, {"output_hidden_states": True}, {"labels": None}])
def test_inputs_that_ask_for_nothing_of_full_rows_are_taken(kept: dict[str, Any]) -> None:
    model = _alone()
    inputs = tiny_inputs(model, batch=2, length=6)
    torch.testing.assert_close(model(**inputs, **kept).logits, model(**inputs).logits)


def test_inputs_by_position_are_refused() -> None:
    with pytest.raises(LayoutError, match="takes its inputs by name"):
        _alone()(torch.zeros(1, 4, dtype=torch.long))


def _rows(*lengths: int) -> Tensor:
    """Positions of one packed row."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


POSITIONS = {
    "one document": _rows(32),
    "shifted": _rows(32) + 5,
    "documents": _rows(5, 11, 3, 13),
    "a document in each half": _rows(16, 16),
    "padding at the left": (_rows(32) - 9).clamp(min=0),
    "axes": _rows(7, 25).expand(3, 1, 32),
}


@pytest.mark.parametrize("cut", BALANCERS)
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_positions_tell_by_which_load_balancer_rows_were_cut(ranks: int, kind: str, cut: LoadBalancer) -> None:
    full = POSITIONS[kind]
    of_ranks = [SequenceLayout(32, ranks, rank, cut) for rank in range(ranks)]
    by_rank = torch.cat([layout.shard(full, dim=-1) for layout in of_ranks], dim=-1)
    for balancer in BALANCERS:
        layout = SequenceLayout(32, ranks, 0, balancer)
        gathered = by_rank.index_select(-1, layout.permutation.argsort())
        if balancer == cut:
            _require_order(gathered, layout)
            continue
        with pytest.raises(LayoutError, match=f"by another load balancer than the model's {balancer!r}"):
            _require_order(gathered, layout)


def test_documents_that_are_chunks_have_no_order() -> None:
    layout = SequenceLayout(32, 2, 0)
    _require_order(_rows(8, 8, 8, 8), layout)


def _other_load_balancer(balancer: LoadBalancer, given: str) -> str:
    """What a rank says to a batch that the other load balancer cut."""
    mesh = MeshSpec(cp=2).build(device_type="cpu")
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh, context_parallel=ContextParallel(load_balancer=balancer))
    layout = sequence_layout(mesh, LENGTH, load_balancer=None if balancer else "headtail")
    batch = tiny_inputs(model, batch=2, length=LENGTH)
    if given == "mask":
        batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    local = layout.shard_batch(batch)
    if given == "ids":
        del local["position_ids"]
    else:  # as after a move to another device
        local = {name: value.clone() for name, value in local.items()}
    try:
        model(**local)
    except LayoutError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("given", ["ids", "positions", "mask"])
@pytest.mark.parametrize("balancer", BALANCERS)
def test_a_batch_of_another_load_balancer_is_refused_on_every_rank(
    two_ranks: RankPool, balancer: LoadBalancer, given: str
) -> None:
    for said in two_ranks.run(_other_load_balancer, balancer, given):
        assert f"cut it with sequence_layout(mesh, 16, load_balancer={balancer!r})" in said


#: So large that the routers' gradients are mostly the auxiliary loss's.
_COEFFICIENT = 30.0


def _full_rows() -> list[str]:
    """Return the errors of forwards of full rows on every rank, of this rank's part, and of equal tokens."""
    mesh = MeshSpec(cp=2).build(device_type="cpu")
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh)
    tokens = torch.arange(2, 18).reshape(2, 8)
    part = sequence_layout(mesh, 8).shard(tokens)
    errors: list[str] = []
    for rows in (tokens, part, torch.full((2, 4), 5)):  # equal parts of a row of one token are no full rows
        try:
            model(input_ids=rows)
        except LayoutError as error:
            errors.append(str(error))
    return errors


def test_full_rows_on_every_rank_are_refused(two_ranks: RankPool) -> None:
    for errors in two_ranks.run(_full_rows):
        (error,) = errors
        assert "all 2 ranks of cp were given the same tokens [2, 8]" in error
        assert "sequence_layout(mesh, length).shard_batch(batch)" in error


def _auxiliary_loss(axes: dict[str, int], options: dict[str, Any], padded: bool) -> tuple[float, float]:
    """Errors of a mixture's auxiliary loss, and of all gradients of a loss with it."""
    with compute_in_float64():
        reference = tiny_model("Qwen3MoeForCausalLM")
        batch: dict[str, Any] = {"input_ids": tiny_inputs(reference, batch=2, length=LENGTH)["input_ids"]}
        if padded:
            batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])).long()
        asked = {"use_cache": False, "output_router_logits": True}
        expected = reference(**batch, **asked)
        weights = torch.randn(expected.logits.shape, generator=torch.Generator().manual_seed(3)).to(torch.float64)
        if padded:
            weights = weights * batch["attention_mask"][..., None]
        ((expected.logits * weights).sum() + _COEFFICIENT * expected.aux_loss).backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        mesh = mesh_for(axes)
        model = parallelize(copy.deepcopy(reference), mesh, logits="full", **options)
        model.zero_grad()
        layout = sequence_layout(mesh, LENGTH)
        output = model(**layout.shard_batch(batch), **asked)
        ((output.logits * layout.shard(weights)).sum() + _COEFFICIENT * output.aux_loss).backward()
        error = abs(float(output.aux_loss) - float(expected.aux_loss))
        return error, max(gradient_errors(gradients, model).values())


@pytest.mark.parametrize("padded", [False, True])
def test_an_auxiliary_loss_is_that_of_full_rows(two_ranks: RankPool, padded: bool) -> None:
    options = {"activation_checkpointing": "block"}
    for errors in two_ranks.run(_auxiliary_loss, {"cp": 2}, options, padded):
        assert max(errors) < 1e-6


def test_an_auxiliary_loss_is_that_of_full_rows_under_sequence_parallelism(four_ranks: RankPool) -> None:
    for errors in four_ranks.run(_auxiliary_loss, {"cp": 2, "tp": 2}, {"sequence_parallel": True}, False):
        assert max(errors) < 1e-6


def _token_types() -> float:
    """The error of an encoder's hidden states with token types."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    reference = transformers.BertForMaskedLM(config).eval()
    mesh = MeshSpec(cp=2).build(device_type="cpu")
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    batch = {"input_ids": ids, "token_type_ids": (ids % 5 > 2).long()}
    layout = sequence_layout(mesh, LENGTH)
    with torch.no_grad():
        expected = layout.shard(reference(**batch).logits)
        found = parallelize(copy.deepcopy(reference), mesh)(**layout.shard_batch(batch)).logits
    return largest(found - expected)


def test_token_types_that_a_table_embeds_are_sharded(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_token_types)) < 1e-5
