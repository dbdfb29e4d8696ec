"""What is added to a plan by the structure of the tree, and what is left alone."""

import pytest
from stub_modules import Module as Node
from stub_modules import Norm, tensor

from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    NoParallel,
    ParameterStyle,
    Plan,
    Replicate,
    RowwiseParallel,
    Shard,
    VocabParallelEmbedding,
)
from tp_plans.infer.complete import complete_plan
from tp_plans.styles import GatheredParameters, MLAKVProjection, ParallelAttention

HIDDEN, HEADS, HEAD, INNER, VOCAB = 32, 4, 16, 96, 50
COLUMN, ROW, PARTIAL = ColwiseParallel(), RowwiseParallel(), NoParallel(gradient="partial")
HEADS_COLUMN, HEADS_ROW = ColwiseParallel(multiple_of="head_dim"), RowwiseParallel(multiple_of="head_dim")
GATHERED_COLUMN = ColwiseParallel(output_layouts=Replicate())
BLOCK = "model.layers.*."


class Linear(Node):
    """What counts as torch's linear layer does so by its class's name."""

    def __init__(self, out, inner, *, bias=False):
        super().__init__(parameters={"weight": tensor(out, inner), "bias": tensor(out) if bias else None})
        self.out_features, self.in_features = out, inner


class Router(Linear):
    """A relative of it, which might compute something else."""


class Convolution(Node):
    def __init__(self, channels):
        super().__init__(parameters={"weight": tensor(channels, 1, 4)}, attributes={"kernel_size": (4,)})


class Table(Node):
    def __init__(self, rows, width, **children):
        super().__init__(parameters={"weight": tensor(rows, width)}, attributes={"num_embeddings": rows}, **children)


def model(*blocks, **beside):
    """A language model of some blocks, without a head."""
    layers = Node(**{str(place): block for place, block in enumerate(blocks)})
    return Node(model=Node(layers=layers, **beside))


def blocks_of(make, number=2):
    return model(*(make() for _ in range(number)))


def added(tree, rules=None, *, root="model"):
    """The rules that completion adds or changes."""
    plan = Plan(rules or {})
    return {pattern: style for pattern, style in complete_plan(plan, tree, root=root).items()
            if plan.get(pattern) != style}  # fmt: skip


def attention(*, kv_heads=4, head=HEAD, attributes=None, **more):
    own = {"head_dim": head, **(attributes or {})}
    projections = {
        "q_proj": Linear(HEADS * head, HIDDEN),
        "k_proj": Linear(kv_heads * head, HIDDEN),
        "v_proj": Linear(kv_heads * head, HIDDEN),
        "o_proj": Linear(HIDDEN, HEADS * head),
    }
    return Node(attributes=own, **(projections | more))


def heads(prefix, *, shared=False):
    """The rules of an attention layer in heads."""
    keys_values = ColwiseParallel(multiple_of="head_dim", replicate_kv_heads=shared)
    return {
        f"{prefix}q_proj": HEADS_COLUMN,
        f"{prefix}k_proj": keys_values,
        f"{prefix}v_proj": keys_values,
        f"{prefix}o_proj": HEADS_ROW,
    }


def test_attention_of_known_parts_is_split_in_heads():
    tree = blocks_of(lambda: Node(attn=attention()))
    assert added(tree) == heads(f"{BLOCK}attn.")


@pytest.mark.parametrize("name", ["q_norm", "k_layernorm"])
def test_a_norm_over_one_head_sums_its_gradient(name):
    tree = blocks_of(lambda: Node(attn=attention(**{name: Norm(HEAD)})))
    assert added(tree) == {**heads(f"{BLOCK}attn."), f"{BLOCK}attn.{name}": PARTIAL}


def test_a_gate_as_wide_as_the_queries_is_split_with_them():
    tree = blocks_of(lambda: Node(attn=attention(g_proj=Linear(HEADS * HEAD, HIDDEN))))
    assert added(tree) == {**heads(f"{BLOCK}attn."), f"{BLOCK}attn.g_proj": HEADS_COLUMN}


@pytest.mark.parametrize(
    "odd",
    [
        {"q_norm": Norm(HEADS * HEAD)},  # over all heads at once
        {"gate_proj": Linear(HEADS, HIDDEN)},  # one number a head
        {"mystery": Linear(HIDDEN, HIDDEN)},
        {"o_proj": Linear(HIDDEN, HIDDEN)},  # does not take what the queries give
        {"k_proj": Linear(HEAD + 8, HIDDEN)},  # no whole number of heads
        {"attributes": {"head_dim": None}},
        {"parameters": {"sinks": tensor(HEADS)}},
    ],
)
def test_attention_with_a_part_unknown_is_not_split_in_heads(odd):
    def block():
        layer = attention(**{name: part for name, part in odd.items() if name != "parameters"})
        layer._parameters = odd.get("parameters", {})
        return Node(attn=layer)

    styles = set(added(blocks_of(block)).values())
    assert styles.isdisjoint({HEADS_COLUMN, HEADS_ROW, COLUMN, ROW})


def test_fewer_key_value_heads_than_ranks_are_shared_and_the_layer_knows_its_groups():
    def block():
        return Node(attn=attention(kv_heads=2, attributes={"num_key_value_heads": 2}))

    assert added(blocks_of(block)) == {
        **heads(f"{BLOCK}attn.", shared=True),
        f"{BLOCK}attn": ParallelAttention(kv_heads_attr="num_key_value_heads"),
    }


def test_layers_that_read_the_keys_of_another_layer_know_their_groups_too():
    """Gemma 3n and 4: without their own keys they would repeat the shared heads for all ranks' queries."""
    own = attention(attributes={"num_key_value_heads": 2})
    reading = attention(attributes={"num_key_value_heads": 2})
    del reading.children["k_proj"], reading.children["v_proj"]
    rules = {f"{BLOCK}attn.{name}_proj": COLUMN for name in "qkv"} | {f"{BLOCK}attn.o_proj": ROW}
    plan = complete_plan(Plan(rules), model(Node(attn=own), Node(attn=reading)), root="model")
    assert plan[f"{BLOCK}attn"] == ParallelAttention(kv_heads_attr="num_key_value_heads")


def test_complete_plan_shares_heads_of_split_layers_and_keeps_their_rules():
    own = ParallelAttention(layout=None, head_count_attrs=("num_heads",))
    rules = {f"{BLOCK}attn.{name}_proj": COLUMN for name in "qkv"} | {f"{BLOCK}attn.o_proj": ROW, f"{BLOCK}attn": own}
    tree = blocks_of(lambda: Node(attn=attention(attributes={"num_key_value_heads": 4})))
    assert added(tree, rules) == {
        **heads(f"{BLOCK}attn.", shared=True),
        f"{BLOCK}attn": ParallelAttention(
            layout=None, head_count_attrs=("num_heads",), kv_heads_attr="num_key_value_heads"
        ),
    }


def test_layers_whose_heads_differ_in_size_get_rules_of_their_own():
    def block(head):
        return Node(attn=attention(head=head))

    tree = model(block(16), Node(attn=attention(attributes={"head_dim": None})))
    rules = {f"{BLOCK}attn.{name}_proj": COLUMN for name in "qkv"} | {f"{BLOCK}attn.o_proj": ROW}
    plan = complete_plan(Plan(rules), tree, root="model")
    assert {name: plan[f"model.layers.{name}.attn.q_proj"] for name in (0, 1)} == {0: HEADS_COLUMN, 1: COLUMN}
    assert {name: plan[f"model.layers.{name}.attn.o_proj"] for name in (0, 1)} == {0: HEADS_ROW, 1: ROW}
    assert f"{BLOCK}attn.q_proj" not in plan


def latent(**more):
    rope, nope, value, rank = 8, 16, 16, 24
    parts = {
        "q_proj": Linear(HEADS * (nope + rope), HIDDEN),
        "kv_a_proj_with_mqa": Linear(rank + rope, HIDDEN),
        "kv_a_layernorm": Norm(rank),
        "kv_b_proj": Linear(HEADS * (nope + value), rank),
        "o_proj": Linear(HIDDEN, HEADS * value),
    }
    return Node(attributes={"num_heads": HEADS, "qk_rope_head_dim": rope}, **(parts | more))


LATENT_RULES = {
    f"{BLOCK}attn.q_proj": ColwiseParallel(multiple_of=24),
    f"{BLOCK}attn.kv_a_proj_with_mqa": MLAKVProjection(),
    f"{BLOCK}attn.kv_b_proj": ColwiseParallel(multiple_of=32),
    f"{BLOCK}attn.o_proj": RowwiseParallel(multiple_of=16),
}


def test_latent_attention_is_split_in_heads_of_their_own_sizes():
    assert added(blocks_of(lambda: Node(attn=latent()))) == LATENT_RULES


def test_latent_attention_with_compressed_queries_is_split_behind_them():
    def block():
        layer = latent(q_a_proj=Linear(24, HIDDEN), q_a_layernorm=Norm(24), q_b_proj=Linear(HEADS * 24, 24))
        del layer.children["q_proj"]
        return Node(attn=layer)

    rules = added(blocks_of(block))
    assert rules.pop(f"{BLOCK}attn.q_a_proj") == GATHERED_COLUMN
    assert rules == {name.replace("q_proj", "q_b_proj"): style for name, style in LATENT_RULES.items()}


def test_latent_attention_with_a_part_unknown_is_left():
    rules = added(blocks_of(lambda: Node(attn=latent(indexer=Node(wq=Linear(64, 24))))))
    assert not any(isinstance(style, (MLAKVProjection, RowwiseParallel)) for style in rules.values())


@pytest.mark.parametrize(
    ("columns", "row"), [(("gate_proj", "up_proj"), "down_proj"), (("w1", "w3"), "w2"), (("fc1",), "fc2")]
)
def test_gated_and_plain_mlps_are_split(columns, row):
    def block():
        return Node(mlp=Node(**{name: Linear(INNER, HIDDEN) for name in columns}, **{row: Linear(HIDDEN, INNER)}))

    rules = {f"{BLOCK}mlp.{name}": COLUMN for name in columns}
    assert added(blocks_of(block)) == {**rules, f"{BLOCK}mlp.{row}": ROW}


def test_layers_that_store_their_weight_transposed_are_no_mlp():
    class Conv1D(Node):
        def __init__(self, inner, out):
            super().__init__(parameters={"weight": tensor(inner, out), "bias": tensor(out)})

    rules = added(blocks_of(lambda: Node(mlp=Node(c_fc=Conv1D(HIDDEN, INNER), c_proj=Conv1D(INNER, HIDDEN)))))
    assert not any(isinstance(style, (ColwiseParallel, RowwiseParallel)) for style in rules.values())


def test_gate_and_up_in_one_weight_are_two_pieces():
    def block():
        return Node(mlp=Node(gate_up_proj=Linear(2 * INNER, HIDDEN), down_proj=Linear(HIDDEN, INNER)))

    fused = ColwiseParallel(fused_sizes=(1, 1))
    assert added(blocks_of(block)) == {f"{BLOCK}mlp.gate_up_proj": fused, f"{BLOCK}mlp.down_proj": ROW}


@pytest.mark.parametrize(
    "parts",
    [
        {"gate_proj": Linear(INNER, HIDDEN), "up_proj": Linear(INNER, HIDDEN), "down_proj": Linear(HIDDEN, INNER - 1)},
        {"gate_up_proj": Linear(3 * INNER, HIDDEN), "down_proj": Linear(HIDDEN, INNER)},
        {"fc1": Linear(INNER, HIDDEN), "norm": Norm(INNER), "fc2": Linear(HIDDEN, INNER)},
    ],
    ids=["widths differ", "three pieces", "a norm within"],
)
def test_an_mlp_that_does_not_fit_is_stored_split_only(parts):
    styles = set(added(blocks_of(lambda: Node(mlp=Node(**parts)))).values())
    assert styles == {GATHERED_COLUMN}


def test_blocks_that_are_not_alike_get_concrete_rules():
    def dense():
        return Node(mlp=Node(fc1=Linear(INNER, HIDDEN), fc2=Linear(HIDDEN, INNER)))

    def odd():
        return Node(mlp=Node(fc1=Linear(3 * INNER, HIDDEN), fc2=Linear(HIDDEN, INNER)))

    rules = added(model(dense(), odd()))
    assert rules["model.layers.0.mlp.fc2"] == ROW
    assert rules["model.layers.0.mlp.fc1"] == COLUMN
    assert {style for name, style in rules.items() if ".0." not in name} == {GATHERED_COLUMN}


def test_complete_plan_adds_no_rule_beside_a_rule():
    rules = {f"{BLOCK}mlp.fc1": GATHERED_COLUMN, f"{BLOCK}attn.q_proj": NoParallel()}
    tree = blocks_of(lambda: Node(attn=attention(), mlp=Node(fc1=Linear(INNER, HIDDEN), fc2=Linear(HIDDEN, INNER))))
    found = added(tree, rules)
    assert rules.keys().isdisjoint(found)
    assert set(found.values()) == {GATHERED_COLUMN}


def test_complete_plan_adds_no_rule_outside_the_model_or_inside_split_experts():
    def mlp():
        return Node(fc1=Linear(INNER, HIDDEN), fc2=Linear(HIDDEN, INNER))

    tree = model(Node(experts=Node(parameters={"weight": tensor(8, INNER, HIDDEN)}, shared=mlp())))
    tree.children["vision"] = Node(mlp=mlp())
    assert added(tree, {f"{BLOCK}experts": ExpertsParallel()}) == {}
    assert {name.partition(".")[0] for name in added(tree)} == {"model"}
    assert {name.partition(".")[0] for name in added(tree, root="")} == {"model", "vision"}


def test_leftovers_are_stored_split_when_they_are_large():
    def block():
        return Node(
            mixer=Node(
                parameters={"wide": tensor(4, 64), "state": tensor(64, 32), "vector": tensor(64)},
                project=Linear(64, HIDDEN),
                few=Linear(8, HIDDEN),
                route=Router(64, HIDDEN),
                convolution=Convolution(64),
            )
        )

    assert added(blocks_of(block)) == {
        f"{BLOCK}mixer.wide": ParameterStyle(layout=Shard(1), gathered=True),
        f"{BLOCK}mixer.state": ParameterStyle(gathered=True),
        f"{BLOCK}mixer.project": GATHERED_COLUMN,
        f"{BLOCK}mixer.route.weight": ParameterStyle(gathered=True),
    }


def test_complete_plan_leaves_small_parameters_replicated():
    tree = model(Node(mixer=Node(small=Linear(16, 16))), beside=Linear(1000, 1000))
    assert added(tree) == {"model.beside": GATHERED_COLUMN}


def test_a_layer_beside_split_ones_is_stored_split_only_where_it_feeds_them():
    def block(out):
        return Node(
            mixer=Node(
                feeding=Linear(24, HIDDEN), split=Linear(INNER, 24), other=Linear(out, INNER), row=Linear(HIDDEN, INNER)
            )
        )

    rules = {f"{BLOCK}mixer.split": COLUMN, f"{BLOCK}mixer.row": ROW}
    assert added(blocks_of(lambda: block(40)), rules) == {f"{BLOCK}mixer.feeding": GATHERED_COLUMN}


class MultiheadAttention(Node):
    """Torch's attention, which reads the weight of its output projection, by its class's name."""


def test_the_weights_that_torchs_attention_reads_are_gathered_by_it():
    def block():
        fused = tensor(3 * HIDDEN, HIDDEN)
        return Node(attention=MultiheadAttention(out_proj=Linear(HIDDEN, HIDDEN), parameters={"in_proj_weight": fused}))

    names = ("in_proj_weight", "out_proj.weight")
    assert added(blocks_of(block)) == {f"{BLOCK}attention": GatheredParameters(names=names)}


def test_a_weight_that_a_kernel_takes_as_an_argument_is_gathered_by_the_layer_above():
    def block():
        return Node(
            mixer=Node(
                in_proj=Linear(64, HIDDEN), conv1d=Convolution(64), dt_proj=Linear(64, 16), out_proj=Linear(32, 64)
            )
        )

    names = ("out_proj.weight", "dt_proj.weight")
    assert added(blocks_of(block)) == {
        f"{BLOCK}mixer": GatheredParameters(names=names),
        f"{BLOCK}mixer.in_proj": GATHERED_COLUMN,
    }


class ReadingRouter(Node):
    def forward(self, tokens):
        return tokens @ self.classifier.weight.T.to(self.unread.weight.dtype)


def test_a_weight_that_the_layer_above_reads_itself_is_gathered_by_it():
    """LongCat Flash: its router multiplies with the weight of a layer that it does not call."""
    tree = blocks_of(lambda: Node(router=ReadingRouter(classifier=Linear(64, HIDDEN), unread=Linear(64, HIDDEN))))
    assert added(tree) == {
        f"{BLOCK}router": GatheredParameters(names=("classifier.weight",)),
        f"{BLOCK}router.unread": GATHERED_COLUMN,
    }


def test_complete_plan_splits_tables_and_sums_gradients_of_norms_in_them():
    tree = model(Node(), embed=Table(VOCAB, HIDDEN, norm=Norm(HIDDEN)), per_layer=Table(VOCAB, 64))
    assert added(tree) == {
        "model.embed": VocabParallelEmbedding(),
        "model.embed.norm": PARTIAL,
        "model.per_layer": VocabParallelEmbedding(),
    }


def test_a_table_whose_weight_has_a_rule_gets_no_other():
    tree = model(Node(), embed_tokens=Table(VOCAB, HIDDEN))
    rules = {"model.embed_tokens.weight": ParameterStyle(gathered=True)}
    assert added(tree, rules) == {}


def test_a_parameter_that_a_rule_above_gathers_already_is_left():
    tree = model(Node(), embed=Table(VOCAB, HIDDEN))
    assert added(tree, {"model": GatheredParameters(names=("embed.weight",))}) == {}


def test_completing_twice_adds_nothing():
    tree = blocks_of(
        lambda: Node(
            attn=attention(kv_heads=2, attributes={"num_key_value_heads": 2}),
            mixer=Node(parameters={"state": tensor(64, 32)}, project=Linear(64, HIDDEN)),
        )
    )
    once = complete_plan(Plan({}), tree, root="model")
    assert complete_plan(once, tree, root="model") == once
