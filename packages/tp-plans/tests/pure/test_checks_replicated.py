from stub_modules import Embedding, Linear, Module, Norm, decoder, tensor

from tp_plans import ColwiseParallel, NoParallel, Plan, RowwiseParallel, check, plan_for


def warnings(plan, model, tp=2):
    return [found for found in check(plan, model, tp=tp).findings if found.severity == "warning"]


def with_tower(**options):
    tower = Module(**{str(index): Module(fc1=Linear(64, 32), fc2=Linear(32, 64)) for index in range(3)})
    return Module(vision=tower, **decoder(**options).children)


def test_a_part_that_the_plan_splits_nothing_of_is_told_as_one():
    (found,) = warnings(plan_for("llama"), with_tower())
    assert found.where == "vision"
    size = 3 * 4 * (2 * 64 * 32 + 64 + 32)
    total = sum(parameter.nbytes for _, m in with_tower().named_modules() for parameter in m._parameters.values())
    share = f"{size / total:.1%}"
    assert found.message.startswith(
        f"{size / 1000:.3g} kB, {share} of the model, replicated on every rank (12 parameters"
    )
    assert "largest vision.0.fc1.weight [64, 32]" in found.message
    assert found.fix == "no rule splits it: add one, or accept it"


def test_check_finds_no_replicated_part_on_a_single_rank():
    assert warnings(plan_for("llama"), with_tower(), tp=1) == []


def test_equal_parts_of_the_blocks_count_together_and_the_largest_comes_first():
    plan = plan_for("llama").override({"lm_head": NoParallel(), "model.layers.*.mlp.down_proj": None})
    plan = plan.override({f"model.layers.*.mlp.{name}": None for name in ("gate_proj", "up_proj")})
    found = warnings(plan, decoder(layers=4))
    assert [each.where for each in found] == ["model.layers.*.mlp", "lm_head"]
    assert "(24 parameters" in found[0].message
    assert found[1].fix == "its rule says so: accept it, or split it"


def test_check_leaves_out_small_replicated_parts():
    model = Module(norm=Norm(9), up=Linear(100, 9), down=Linear(9, 100))
    assert warnings(Plan({"up": ColwiseParallel(), "down": RowwiseParallel()}), model) == []


def test_check_finds_no_replicated_part_of_empty_parameters():
    assert warnings(Plan({"up": NoParallel()}), Module(up=Norm(0), down=Norm(0))) == []


def test_a_tied_weight_counts_once_and_by_its_split_place():
    assert warnings(plan_for("llama"), decoder(tied=True)) == []


def test_a_plan_of_no_rules_leaves_the_whole_model():
    (found,) = warnings(Plan({}), Module(parameters={"a": tensor(4)}, e=Embedding(3, 2)))
    assert found.where == ""
    assert "100.0% of the model" in found.message
