import pytest
from stub_modules import Embedding, Linear, Module, Norm, decoder, tensor

from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    NoParallel,
    PlanError,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    VocabParallelEmbedding,
    check,
    plan_for,
)
from tp_plans.infer import suggest
from tp_plans.infer.bytecode import reads_below
from tp_plans.styles import GatheredParameters, MLAKVProjection, ParallelAttention


class Attention(Module):
    """Heads of eight over a stream of 32, with names that nobody uses."""

    def __init__(self, **more):
        attributes = more.pop("attributes", {"head_dim": 8})
        parameters = more.pop("parameters", None)
        layers = {"alpha": Linear(32, 32), "beta": Linear(16, 32), "gamma": Linear(16, 32), "proj": Linear(32, 32)}
        super().__init__(attributes=attributes, parameters=parameters, **{**layers, **more})

    def forward(self, tokens, mask):
        return self.proj(self.alpha(tokens), self.beta(tokens), self.gamma(tokens), mask)


class FeedForward(Module):
    def __init__(self, **layers):
        super().__init__(**(layers or {"gate": Linear(96, 32), "up": Linear(96, 32), "back": Linear(32, 96)}))

    def forward(self, tokens):
        return self.back(self.gate(tokens) * self.up(tokens))


def model(*blocks, **more):
    blocks = blocks or (block(), block())
    stack = Module(**{str(index): each for index, each in enumerate(blocks)})
    return Module(
        trunk=Module(table=Embedding(131, 32), stack=stack, last=Norm(32)), **{"logits": Linear(131, 32), **more}
    )


def block(mix=None, ff=None, **more):
    return Module(pre=Norm(32), mix=mix or Attention(), ff=ff or FeedForward(), **more)


def doubts(suggestion, where):
    return [doubt.what for doubt in suggestion.doubts if doubt.where == where]


GATHERED = (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate()))


@pytest.mark.parametrize("tied", [False, True])
def test_a_known_tree_gets_the_known_plan(tied):
    assert suggest(decoder(tied=tied)).plan == plan_for("llama")


def test_parts_of_unfamiliar_names_are_found_by_place_and_shape():
    found = suggest(model())
    assert dict(found.plan) == {
        "trunk.table": VocabParallelEmbedding(),
        "trunk.stack.*.pre": NoParallel(),
        "trunk.stack.*.mix": PrepareModuleInput(argument="tokens"),
        **{f"trunk.stack.*.mix.{name}": ColwiseParallel(multiple_of="head_dim") for name in ("alpha", "beta", "gamma")},
        "trunk.stack.*.mix.proj": RowwiseParallel(multiple_of="head_dim"),
        "trunk.stack.*.ff": PrepareModuleInput(argument="tokens"),
        "trunk.stack.*.ff.gate": ColwiseParallel(),
        "trunk.stack.*.ff.up": ColwiseParallel(),
        "trunk.stack.*.ff.back": RowwiseParallel(),
        "trunk.last": NoParallel(),
        "logits": ColwiseParallel(use_local_output=False),
    }
    assert check(found.plan, model(), tp=2).errors == ()
    assert [doubt.where for doubt in found.doubts] == ["trunk.stack.*.mix.proj"]
    assert "assumed to be the output projection by its name" in str(found)


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        (Attention(attributes={}), "input projections of 32, 16, 16 features precede one that reads 32"),
        (Attention(attributes={"num_heads": 5}), "its head size is unknown"),
        (Attention(parameters={"sinks": tensor(4)}), "it has direct parameters (sinks)"),
        (Attention(q_norm=Norm(32)), "q_norm is not over one head"),
        (Attention(low=Linear(7, 9)), "low neither read nor write the hidden states"),
        (Attention(delta=Linear(24, 32)), "projections of 32, 16, 16, 24 features, in heads of 8, are not queries"),
    ],
)
def test_attention_that_is_not_understood_is_gathered_with_the_reason(mix, reason):
    found = suggest(model(block(mix=mix)))
    column, row = GATHERED
    assert found.plan["trunk.stack.*.mix.alpha"] == column
    assert found.plan["trunk.stack.*.mix.proj"] == row
    assert "trunk.stack.*.mix" not in found.plan
    assert any(told.startswith(reason) for told in doubts(found, "trunk.stack.*.mix"))
    assert check(found.plan, model(block(mix=mix)), tp=2).errors == ()


def test_norms_over_one_head_are_marked():
    found = suggest(model(block(mix=Attention(q_norm=Norm(8)))))
    assert found.plan["trunk.stack.*.mix.q_norm"] == NoParallel(gradient="partial")


def latent_attention(queries=4 * 24):
    """Latent attention with DeepSeek's names: queries and keys of 16 + 8 features a head, values of 16."""
    return Module(
        attributes={"num_heads": 4, "qk_rope_head_dim": 8},
        q_a_proj=Linear(24, 32),
        q_a_layernorm=Norm(24),
        q_b_proj=Linear(queries, 24),
        kv_a_proj_with_mqa=Linear(40, 32),
        kv_a_layernorm=Norm(32),
        kv_b_proj=Linear(4 * 32, 32),
        o_proj=Linear(32, 4 * 16),
    )


def test_latent_attention_with_known_names_is_split_in_heads_without_a_doubt():
    suggestion = suggest(model(block(latent_attention()), block(latent_attention())))
    mix = "trunk.stack.*.mix"
    assert {name: suggestion.plan[f"{mix}.{name}"] for name in latent_attention().children if "norm" not in name} == {
        "q_a_proj": ColwiseParallel(output_layouts=Replicate()),
        "q_b_proj": ColwiseParallel(multiple_of=24),
        "kv_a_proj_with_mqa": MLAKVProjection(),
        "kv_b_proj": ColwiseParallel(multiple_of=32),
        "o_proj": RowwiseParallel(multiple_of=16),
    }
    assert not [doubt for doubt in suggestion.doubts if doubt.where.startswith(mix)]


def test_latent_attention_whose_features_are_no_heads_is_gathered_with_the_reason():
    suggestion = suggest(model(block(latent_attention(queries=98)), block(latent_attention(queries=98))))
    (reason,) = doubts(suggestion, "trunk.stack.*.mix")
    assert reason.startswith("q_b_proj has 98 features for 4 heads")
    assert suggestion.plan["trunk.stack.*.mix.o_proj"] == RowwiseParallel(input_layouts=Replicate())


def test_attention_that_is_split_in_some_blocks_only_is_gathered_in_all():
    """Blocks may hand one another keys and values."""
    found = suggest(model(block(), block(mix=Attention(parameters={"sinks": tensor(4)}))))
    assert found.plan["trunk.stack.*.mix.alpha"] == GATHERED[0]
    assert "trunk.stack.*.mix" not in found.plan


class Counting(Attention):
    def forward(self, x):
        return [self.heads_here * self.alpha(x) for _ in range(2) if self.config.num_kv_heads]


def test_counts_that_the_code_reads_are_told_and_given():
    config = Module(attributes={"num_kv_heads": 2, "unread_heads": 4})
    mix = Counting(attributes={"head_dim": 8, "heads_here": 4, "num_heads": 4, "config": config})
    found = suggest(model(block(mix=mix)))
    counts = ("heads_here", "config.num_kv_heads")
    assert found.plan["trunk.stack.*.mix"] == ParallelAttention(argument="x", head_count_attrs=counts)
    assert "treating heads_here, config.num_kv_heads as per-rank counts" in doubts(found, "trunk.stack.*.mix")[0]


class Kernel(Attention):
    def forward(self, tokens):
        return tokens @ self.alpha.weight


def test_a_tensor_below_is_read_by_nested_functions_too():
    class Reader:
        def forward(self, states):
            return sorted(states, key=lambda each: each @ self.child.weight)

    assert reads_below(Reader, "child", "weight")
    assert not reads_below(Reader, "child", "bias")


def test_code_that_reads_weights_itself_gets_them_gathered():
    found = suggest(model(block(mix=Kernel())))
    names = ("alpha.weight", "beta.weight", "gamma.weight", "proj.weight")
    assert found.plan["trunk.stack.*.mix"] == GatheredParameters(names=names)


class Fused(Module):
    def __init__(self, name="packed", **attributes):
        super().__init__(attributes={"head_dim": 8, **attributes}, **{name: Linear(64, 32), "proj": Linear(32, 32)})


def test_fused_queries_keys_and_values_are_pieces_and_a_doubt():
    found = suggest(model(block(mix=Fused("qkv", num_heads=4, num_kv_heads=2))))
    pieces = ("num_heads", "num_kv_heads", "num_kv_heads")
    assert found.plan["trunk.stack.*.mix.qkv"] == ColwiseParallel(multiple_of="head_dim", fused_sizes=pieces)
    assert "concatenated" in doubts(found, "trunk.stack.*.mix.qkv")[0]
    numbers = suggest(model(block(mix=Fused("qkv"))))
    assert numbers.plan["trunk.stack.*.mix.qkv"].fused_sizes == (4, 2, 2)


def test_a_projection_that_keeps_heads_together_is_gathered():
    found = suggest(model(block(mix=Fused("query_key_value"))))
    assert found.plan["trunk.stack.*.mix.query_key_value"] == GATHERED[0]


def test_gate_and_up_in_one_are_two_pieces():
    found = suggest(model(block(ff=Module(both=Linear(192, 32), back=Linear(32, 96)))))
    assert found.plan["trunk.stack.*.ff.both"] == ColwiseParallel(fused_sizes=(1, 1))
    assert "if they are interleaved" in doubts(found, "trunk.stack.*.ff.both")[0]


class Sparse(FeedForward):
    def forward(self, tokens):
        gate = self.gate(tokens)
        return self.back((gate - gate.mean(-1)) * self.up(tokens))


def test_a_feed_forward_whose_code_may_meet_all_features_is_gathered():
    found = suggest(model(block(ff=Sparse())))
    assert found.plan["trunk.stack.*.ff.gate"] == GATHERED[0]
    assert "its code uses mean, which may need all features" in doubts(found, "trunk.stack.*.ff")[0]


def test_stacked_experts_are_dealt_and_what_is_inside_is_theirs():
    stack = Module(parameters={"up": tensor(4, 48, 32), "down": tensor(4, 32, 48)})
    found = suggest(model(block(ff=Module(router=Linear(4, 32), experts=stack))))
    assert found.plan["trunk.stack.*.ff.experts"] == ExpertsParallel(skips_sentinel_index=False)
    assert "trunk.stack.*.ff.router" not in found.plan
    assert "this Linear stays replicated" in doubts(found, "trunk.stack.*.ff.router")[0]


def test_experts_in_a_list_are_feed_forwards_each():
    experts = Module(**{str(index): FeedForward() for index in range(4)})
    found = suggest(model(block(ff=Module(router=Linear(4, 32), experts=experts))))
    assert found.plan["trunk.stack.*.ff.experts.*.gate"] == ColwiseParallel()
    assert found.plan["trunk.stack.*.ff.experts.*.back"] == RowwiseParallel()


def test_blocks_that_differ_have_rules_of_their_own():
    fused = Module(both=Linear(192, 32), back=Linear(32, 96))
    blocks = (block(), block(ff=fused), block(mix=Attention(attributes={"head_size": 8})))
    found = suggest(model(*blocks))
    assert check(found.plan, model(*blocks), tp=2).errors == ()
    assert found.plan["trunk.stack.*.ff.both"] == ColwiseParallel(fused_sizes=(1, 1))
    assert found.plan["trunk.stack.*.ff.back"] == RowwiseParallel()
    assert found.plan["trunk.stack.0.mix.alpha"] == ColwiseParallel(multiple_of="head_dim")
    assert found.plan["trunk.stack.2.mix.alpha"] == ColwiseParallel(multiple_of="head_size")


class NormedHead(Module):
    pass


class ScaledHead(Linear):
    def __init__(self, rows, features, scale):
        super().__init__(rows, features)
        self._parameters["scale"] = scale

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


def test_a_head_whose_parameters_all_have_its_rows_is_split():
    found = suggest(model(logits=ScaledHead(131, 32, scale=tensor(131))))
    assert found.plan["logits"] == ColwiseParallel(use_local_output=False)
    assert "each row separately" in doubts(found, "logits")[0]


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (NormedHead(parameters={"weight": tensor(131, 32)}), "a head of class NormedHead, which is not a linear layer"),
        (ScaledHead(131, 32, scale=tensor(32)), "a head of class ScaledHead, which is not a linear layer"),
        (Module(), "no layer has the shape of the embedding"),
    ],
)
def test_a_head_that_is_none_stays_whole(head, told):
    found = suggest(model(logits=head))
    assert "logits" not in found.plan
    assert any(told in str(doubt) for doubt in found.doubts)


def test_an_embedding_with_something_inside_stays_whole():
    whole = model()
    whole.children["trunk"].children["table"].children["scale"] = Norm(32)
    found = suggest(whole)
    assert "trunk.table" not in found.plan
    assert "the embedding stays replicated" in doubts(found, "trunk.table")[0]


def test_a_tower_beside_the_language_model_is_left_alone():
    tower = Module(**{str(index): FeedForward() for index in range(9)})
    found = suggest(model(tower=Module(patches=Linear(32, 12), layers=tower)))
    assert not any(pattern.startswith("tower") for pattern in found.plan)


@pytest.mark.parametrize(
    ("other", "told"),
    [(Module(a=Linear(2, 2)), "has no embedding"), (Module(e=Embedding(9, 4)), "has no list of blocks")],
)
def test_suggest_refuses_models_without_tokens(other, told):
    with pytest.raises(PlanError, match=told):
        suggest(other)


class Grouped(Linear):
    def forward(self, x):
        return x


def test_a_linear_layer_with_a_forward_of_its_own_is_none():
    found = suggest(model(block(ff=FeedForward(gate=Linear(96, 32), up=Linear(96, 32), back=Grouped(32, 96)))))
    assert "trunk.stack.*.ff.back" not in found.plan
    assert "this Grouped is stored sharded and gathered" in doubts(found, "trunk.stack.*.ff.back")[0]
