"""The sequence-parallel form of a plan, derived from the tree: the stream between sub-layers, and the doors to them."""

import pytest
from stub_modules import Embedding, Linear, Module, Norm, tensor

from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    GatherSequence,
    NoParallel,
    Partial,
    Plan,
    PlanError,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
)
from tp_plans.infer.sequence_parallel import with_sequence_parallelism
from tp_plans.styles import AllReduceOutput, GatheredParameters, MLAKVProjection, ParallelAttention

HIDDEN = 8
COLUMN, ROW, NORM, DOOR = ColwiseParallel(), RowwiseParallel(), SequenceParallel(), GatherSequence()
SCATTERED = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
BLOCK = "model.layers.*"


class Trunk(Module):
    """A language model that takes embeddings in place of ids."""

    def forward(self, input_ids=None, inputs_embeds=None): ...


class Recurrence(Module):
    """Mixes tokens, and is in no plan."""

    def __init__(self):
        super().__init__(conv=Linear(HIDDEN, 1), out=Linear(HIDDEN, HIDDEN))


def mlp(**more):
    return Module(up=Linear(16, HIDDEN), down=Linear(HIDDEN, 16), **more)


def model(make_block=None, *, blocks=2, beside=None, trunk=Trunk, **more):
    make_block = make_block or (lambda: Module(norm=Norm(HIDDEN), mlp=mlp()))
    layers = Module(**{str(place): make_block() for place in range(blocks)})
    inner = trunk(**{"embed": Embedding(50, HIDDEN), "layers": layers, "norm": Norm(HIDDEN), **(beside or {})})
    return Module(model=inner, lm_head=Linear(50, HIDDEN), **more)


TABLE = VocabParallelEmbedding()
MLP = {f"{BLOCK}.mlp.up": COLUMN, f"{BLOCK}.mlp.down": ROW}
HEAD = {"lm_head": ColwiseParallel(use_local_output=False)}
AROUND = {"model": PrepareModuleInput(layout=Shard(1), argument="inputs_embeds", position=None), "model.norm": NORM}
SCATTERED_TABLE = {"model.embed": VocabParallelEmbedding(output_layouts=Shard(1), use_local_output=False)}
IN_MLP = {f"{BLOCK}.mlp": PrepareModuleInput(), f"{BLOCK}.mlp.up": COLUMN, f"{BLOCK}.mlp.down": SCATTERED}


def derived(tree, rules=None):
    plan = Plan({"model.embed": TABLE, **MLP, **HEAD} if rules is None else rules, name="tiny")
    return with_sequence_parallelism(plan, tree)


def test_norms_work_on_the_stream_and_sub_layers_gather_once_and_scatter():
    plan = derived(model())
    assert dict(plan) == {**AROUND, **SCATTERED_TABLE, **HEAD, **IN_MLP, f"{BLOCK}.norm": NORM}
    assert plan.sequence_parallel
    assert plan.name == "tiny"


def test_an_attention_layer_keeps_its_counts_and_gathers():
    rules = {
        f"{BLOCK}.mlp": ParallelAttention(layout=None, head_count_attrs=("num_heads",), argument="x"),
        **MLP,
    }
    assert derived(model(), rules)[f"{BLOCK}.mlp"] == ParallelAttention(head_count_attrs=("num_heads",), argument="x")


def test_sequence_parallel_keeps_the_prepared_input_of_a_sublayer():
    rules = {**MLP, f"{BLOCK}.mlp": PrepareModuleInput(argument="x", position=1)}
    assert derived(model(), rules)[f"{BLOCK}.mlp"] == PrepareModuleInput(argument="x", position=1)


def test_a_row_wise_layer_keeps_its_unit_and_pieces():
    rules = {**MLP, f"{BLOCK}.mlp.down": RowwiseParallel(multiple_of="head_dim", fused_sizes=(1, 3))}
    wanted = RowwiseParallel(
        output_layouts=Shard(1), use_local_output=False, multiple_of="head_dim", fused_sizes=(1, 3)
    )
    assert derived(model(), rules)[f"{BLOCK}.mlp.down"] == wanted


def test_norms_of_latents_work_inside():
    def block():
        attention = mlp(kv_a=Linear(10, HIDDEN), kv_a_layernorm=Norm(8))
        return Module(norm=Norm(HIDDEN), mlp=attention)

    rules = {**MLP, f"{BLOCK}.mlp.kv_a": MLAKVProjection(rope_dim=2)}
    plan = derived(model(block), rules)
    assert (plan[f"{BLOCK}.mlp"], plan[f"{BLOCK}.mlp.down"]) == (PrepareModuleInput(), SCATTERED)
    assert f"{BLOCK}.mlp.kv_a_layernorm" not in plan


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({f"{BLOCK}.mlp.down": RowwiseParallel(input_layouts=Replicate())}, None),
        ({f"{BLOCK}.mlp.down": RowwiseParallel(output_layouts=Partial())}, None),
        ({f"{BLOCK}.mlp.up": ColwiseParallel(output_layouts=Replicate())}, None),
        ({f"{BLOCK}.mlp": GatheredParameters(names=("up.weight",))}, GatheredParameters(names=("up.weight",))),
        ({f"{BLOCK}.mlp": AllReduceOutput()}, AllReduceOutput()),
    ],
)
def test_a_sub_layer_of_other_mechanics_has_a_door_with_its_rule_behind_it(change, own):
    rules = {**MLP, **change}
    plan = derived(model(), rules)
    assert plan[f"{BLOCK}.mlp"] == GatherSequence(inner=own)
    assert {name: plan[name] for name in rules if name != f"{BLOCK}.mlp"} == {
        name: style for name, style in rules.items() if name != f"{BLOCK}.mlp"
    }


@pytest.mark.parametrize("odd", ["router", "parameter", "second row"])
def test_a_sub_layer_with_a_part_that_the_plan_does_not_know_has_a_door(odd):
    def block():
        layer = mlp()
        if odd == "router":
            layer.children["router"] = Linear(4, HIDDEN)
        elif odd == "second row":
            layer.children["down2"] = Linear(HIDDEN, 16)
        else:
            layer._parameters["scale"] = tensor(HIDDEN)
        return Module(norm=Norm(HIDDEN), mlp=layer)

    plan = derived(model(block), {**MLP, f"{BLOCK}.mlp.down2": ROW})
    assert plan[f"{BLOCK}.mlp"] == DOOR
    assert plan[f"{BLOCK}.mlp.down"] == ROW


def test_a_recurrence_has_a_door_and_its_neighbours_do_without():
    plan = derived(model(lambda: Module(norm=Norm(HIDDEN), mixer=Recurrence(), mlp=mlp())), MLP)
    assert plan[f"{BLOCK}.mixer"] == DOOR
    assert plan[f"{BLOCK}.norm"] == NORM
    assert plan[f"{BLOCK}.mlp"] == PrepareModuleInput()


def test_layers_that_differ_get_rules_of_their_own():
    tree = model()
    tree.children["model"].children["layers"].children["1"].children["mlp"] = Recurrence()
    plan = derived(tree, {"model.layers.0.mlp.up": COLUMN, "model.layers.0.mlp.down": ROW})
    assert plan["model.layers.0.mlp"] == PrepareModuleInput()
    assert plan["model.layers.1.mlp"] == DOOR
    assert plan[f"{BLOCK}.norm"] == NORM


def parameters_of_its_own():
    block = Module(norm=Norm(HIDDEN), mlp=mlp())
    block._parameters = {"scale": tensor(1)}
    return block


BLOCKS_WITH_DOORS = {
    "a layer of the block's own": lambda: Module(norm=Norm(HIDDEN), mlp=mlp(), skip=Linear(HIDDEN, HIDDEN)),
    "parameters of its own": parameters_of_its_own,
    "a list of layers": lambda: Module(norm=Norm(HIDDEN), mlp=mlp(), parts=Module(**{"0": Norm(HIDDEN)})),
    "several streams": lambda: Module(norm=Norm(HIDDEN), mlp=mlp(), hyper_connection=mlp()),
}


@pytest.mark.parametrize("kind", BLOCKS_WITH_DOORS)
def test_a_block_whose_own_code_computes_has_the_door_itself(kind):
    plan = derived(model(BLOCKS_WITH_DOORS[kind]))
    assert plan[BLOCK] == DOOR
    assert {name: plan[name] for name in MLP} == MLP
    assert f"{BLOCK}.norm" not in plan
    assert plan["model.embed"] == TABLE
    assert "model" not in plan
    assert plan["model.norm"] == NORM


def test_experts_that_the_block_feeds_put_the_door_at_the_block():
    def block():
        return Module(norm=Norm(HIDDEN), experts=Module(parameters={"weight": tensor(4, 16, HIDDEN)}))

    plan = derived(model(block), {f"{BLOCK}.experts": ExpertsParallel()})
    assert (plan[BLOCK], plan[f"{BLOCK}.experts"]) == (DOOR, ExpertsParallel())


def test_one_odd_block_puts_the_doors_at_all_blocks():
    tree = model()
    tree.children["model"].children["layers"].children["1"]._parameters = {"scale": tensor(1)}
    assert derived(tree)[BLOCK] == DOOR


def test_a_rule_that_has_no_place_behind_a_door_is_refused():
    with pytest.raises(PlanError, match=r"layers\.0\.mlp is NoParallel, .*sharded on the sequence.*plan yourself"):
        derived(model(), {f"{BLOCK}.mlp": NoParallel()})


def test_an_embedding_that_the_model_above_writes_into_stays_whole():
    tree = Module(outer=model(vision=Recurrence()))
    # The language model sits beside a vision tower, whose features take the place of some tokens.
    rules = {f"outer.{name}": style for name, style in {"model.embed": TABLE, **MLP}.items()}
    plan = derived(tree, rules)
    assert plan["outer.model.embed"] == TABLE
    assert plan["outer.model"] == PrepareModuleInput(layout=Shard(1), argument="inputs_embeds", position=None)


def test_an_embedding_of_another_style_stays_as_it_is():
    plan = derived(model(), {"model.embed": NoParallel(), **MLP})
    assert plan["model.embed"] == NoParallel()
    assert plan["model"].layout == Shard(1)


def test_a_norm_before_the_blocks_is_taken_where_there_is_none_behind_them():
    tree = model(beside={"norm": Recurrence()})
    tree.children["model"].children = {"first_norm": Norm(HIDDEN), **tree.children["model"].children}
    assert derived(tree)["model.first_norm"] == NORM


@pytest.mark.parametrize("empty", [{"blocks": 0}, {"make_block": lambda: Norm(HIDDEN)}])
def test_a_model_without_blocks_is_refused(empty):
    with pytest.raises(
        PlanError, match=r"no list of blocks for the token embedding model\.embed: write the .* plan yourself"
    ):
        derived(model(**empty))


def test_deriving_changes_nothing_in_the_plan_that_it_is_derived_from():
    rules = {"model.embed": TABLE, **MLP, **HEAD}
    plan = Plan(rules)
    with_sequence_parallelism(plan, model())
    assert dict(plan) == rules


@pytest.mark.parametrize("top", [False, True], ids=["in a trunk", "at the top"])
def test_sequence_parallel_shards_input_of_first_block_without_embeddings_argument(top):
    tree, prefix = model(trunk=Module), "" if top else "model."
    if top:
        inner = tree.children.pop("model")
        tree.children = {**inner.children, **tree.children}
    rules = {f"{prefix}embed": TABLE, f"{prefix}layers.*.mlp.up": COLUMN, f"{prefix}layers.*.mlp.down": ROW}
    plan = derived(tree, rules)
    assert plan[f"{prefix}embed"] == TABLE
    assert plan[f"{prefix}layers.0"] == PrepareModuleInput(layout=Shard(1))
    assert plan[f"{prefix}layers.*.mlp.down"] == SCATTERED
    assert "model" not in plan
    assert f"{prefix}layers.1" not in plan


def test_a_linear_layer_after_the_blocks_reads_them_in_any_layout():
    plan = derived(model(value=Linear(1, HIDDEN)))
    assert plan["value"] == RowwiseParallel(input_layouts=Replicate())


def test_the_final_norm_is_found_by_its_shape():
    class Rms(Module):
        """Named otherwise than a norm."""

    tree = model()
    tree.children["model"].children["norm"] = Rms(parameters={"gain": tensor(HIDDEN)})
    assert derived(tree)["model.norm"] == NORM


class Block(Module):
    """One class of blocks for two decoders."""


def test_two_decoders_of_one_class_of_blocks_are_refused():
    def decoder():
        return Module(layers=Module(**{str(place): Block(norm=Norm(HIDDEN), mlp=mlp()) for place in range(2)}))

    tree = Module(embed=Embedding(50, HIDDEN), low=decoder(), high=decoder(), norm=Norm(HIDDEN))
    with pytest.raises(PlanError, match=r"blocks of one class in low\.layers and high\.layers: .* plan yourself"):
        derived(tree, {})


def test_blocks_in_two_lists_side_by_side_share_one_form():
    tree = model(beside={"more_layers": Module(**{"0": Module(norm=Norm(HIDDEN), mlp=mlp())})})
    plan = derived(tree, {**MLP, "model.more_layers.*.mlp.up": COLUMN, "model.more_layers.*.mlp.down": ROW})
    assert plan["model.more_layers.*.mlp.down"] == SCATTERED
    assert plan["model.more_layers.*.norm"] == NORM
