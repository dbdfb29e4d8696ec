import json
from types import SimpleNamespace

import pytest
from stub_modules import Embedding, Linear, Module, Norm, decoder, tensor

from tp_plans import (
    CheckFailedError,
    ColwiseParallel,
    ExpertsParallel,
    GatherSequence,
    NoParallel,
    ParameterStyle,
    Plan,
    Replicate,
    RowwiseParallel,
    Shard,
    explain,
    plan_for,
)
from tp_plans.styles import AllReduceOutput, MLAKVProjection

LLAMA = plan_for("llama")


def rule(explanation, pattern):
    (found,) = [rule for rule in explanation.rules if rule.pattern == pattern]
    return found


def sent(rules, model, *, sequence_parallel=False, tp=2):
    """Every collective as ``(pattern, when, kind, count)``."""
    told = explain(Plan(rules, sequence_parallel=sequence_parallel), model, tp=tp)
    return {(r.pattern, c.when, c.kind, c.count) for r in told.rules for c in r.collectives}


def test_every_rule_is_told_with_its_modules_and_their_parameters():
    told = explain(LLAMA, decoder(layers=3), tp=2)
    assert [each.pattern for each in told.rules] == list(LLAMA)
    down = rule(told, "model.layers.*.mlp.down_proj")
    assert down.places == tuple(f"model.layers.{index}.mlp.down_proj" for index in range(3))
    weight, bias = down.parameters[:2]
    assert (weight.shape, weight.local_shape, weight.layout) == ((32, 96), (32, 48), Shard(1))
    assert (bias.shape, bias.local_shape, bias.layout) == ((32,), (32,), Replicate())


def test_an_uneven_part_is_told_as_the_first_rank_has_it():
    told = explain(LLAMA, decoder(vocab=131), tp=4)
    assert rule(told, "lm_head").parameters[0].local_shape == (33, 32)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_is_summed_twice_each_way_as_in_megatron(sequence_parallel):
    told = explain(plan_for("llama", sequence_parallel=sequence_parallel), decoder(layers=1), tp=2)
    block = [c for r in told.rules if r.pattern.startswith("model.layers") for c in r.collectives]
    norms = [c for c in block if c.what == "gradient of weight"]
    assert sum(c.count for c in norms) == (2 if sequence_parallel else 0)
    per_pass = {
        when: sum(c.count for c in block if c.when == when and c not in norms) for when in ("forward", "backward")
    }
    assert per_pass == ({"forward": 4, "backward": 4} if sequence_parallel else {"forward": 2, "backward": 2})


def test_explain_lists_no_collective_on_a_single_rank():
    told = explain(LLAMA, decoder(), tp=1)
    assert told.collectives("forward") == told.collectives("backward") == {}


def test_parameters_without_a_rule_come_last_and_count_as_whole():
    plan = LLAMA.override({"lm_head": None})
    told = explain(plan, decoder(), tp=2)
    assert [parameter.path for parameter in told.rest] == ["lm_head.weight", "lm_head.bias"]
    assert told.sharded_share < explain(LLAMA, decoder(), tp=2).sharded_share
    assert str(told).splitlines()[-3:] == [
        "without a rule, replicated",
        "  lm_head.weight [131, 32]",
        "  lm_head.bias [131]",
    ]


def test_rows_that_other_ranks_store_are_fetched_and_their_gradients_returned():
    config = SimpleNamespace(q=4, kv=1)
    model = Module(attn=Module(attributes={"config": config}, qkv=Linear(48, 16), o=Linear(16, 32)))
    fused = {
        "attn.qkv": ColwiseParallel(
            multiple_of=8, fused_sizes=("config.q", "config.kv", "config.kv"), replicate_kv_heads=True
        )
    }
    assert {c for c in sent(fused, model) if c[2] == "all_to_all"} == {
        ("attn.qkv", "forward", "all_to_all", 1),
        ("attn.qkv", "backward", "all_to_all", 1),
    }
    assert not any(kind == "all_to_all" for _, _, kind, _ in sent({"attn.qkv": ColwiseParallel(multiple_of=8)}, model))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"x": AllReduceOutput()}, {("x", "forward", "all_reduce", 1), ("x", "backward", "all_reduce", 1)}),
        ({"x.s": ParameterStyle()}, set()),
        ({"x.s": ParameterStyle(gathered=True)}, {("x.s", "forward", "all_gather", 1)}),
        (
            {"x.s": ParameterStyle(gathered=True, gradient="partial")},
            {("x.s", "forward", "all_gather", 1), ("x.s", "backward", "reduce_scatter", 1)},
        ),
        ({"x": NoParallel(gradient="partial")}, {("x", "backward", "all_reduce", 1)}),
        ({"x": NoParallel()}, set()),
        (
            {"x": ExpertsParallel()},
            {("x", "forward", "all_reduce", 1), ("x", "backward", "all_reduce", 1)},
        ),
    ],
)
def test_explain_lists_the_collectives_of_every_other_style(rules, expected):
    assert sent(rules, Module(x=Module(parameters={"s": tensor(4)}))) == expected


def test_a_latent_projection_gathers_its_features_and_sums_two_gradients():
    told = explain(Plan({"kv_a": MLAKVProjection(rope_dim=8)}), Module(kv_a=Linear(24, 32)), tp=2)
    assert told.collectives("forward") == {"all_gather": 1}
    assert told.collectives("backward") == {"all_reduce": 2}


def test_explain_counts_no_gather_inside_a_gathered_sequence():
    model = Module(e=Embedding(9, 8), moe=Module(up=Linear(16, 8), down=Linear(8, 16)))
    rules = {"moe": GatherSequence(), "moe.up": ColwiseParallel(), "moe.down": RowwiseParallel()}
    assert sent(rules, model, sequence_parallel=True) == {
        ("moe", "forward", "all_gather", 1),
        ("moe", "backward", "all_gather", 1),
        ("moe.up", "backward", "all_reduce", 1),
        ("moe.down", "forward", "all_reduce", 1),
    }


def test_the_explanation_is_json_and_its_text_tells_the_totals_first():
    told = explain(LLAMA, decoder(), tp=2)
    data = json.loads(json.dumps(told.to_dict()))
    assert data["rules"][0]["rule"] == {"style": "VocabParallelEmbedding"}
    assert data["collectives"]["forward"] == {"all_reduce": 5}
    first, *others = str(told).splitlines()
    assert first.startswith("<Plan LlamaForCausalLM: TP, ")
    assert first.endswith("split")
    assert others[:2] == ["  forward: 5 all_reduce", "  backward: 5 all_reduce"]
    assert "  weight [96, 32] -> [48, 32], shard(0) (x 2)" in others
    assert "model.layers.*.self_attn.q_proj: ColwiseParallel(multiple_of=head_dim), 2 places" in others


def test_explain_refuses_values_that_are_no_size():
    with pytest.raises(CheckFailedError, match="tp is 0"):
        explain(LLAMA, decoder(), tp=0)


def test_norms_that_keep_their_gradient_send_nothing():
    assert sent({"n": NoParallel()}, Module(n=Norm(8))) == set()
