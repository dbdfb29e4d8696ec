"""Engine layouts filled by a plan equal what the engines' loaders make of the full tensors."""

import pytest
import torch

import tp_plans
from tp_plans import Replicate, Shard
from tp_plans.transfer import CheckpointTensor, EngineRule, EngineSize, TransferError

HEADS, HEAD, HIDDEN, VOCAB, WIDTH, EXPERTS, EXPERT_WIDTH = 8, 4, 16, 70, 24, 6, 8
LAYER = "model.layers.0"


def dense(kv_heads, bias=True):
    rows = {"q": HEADS * HEAD, "k": kv_heads * HEAD, "v": kv_heads * HEAD}
    shapes = {f"{LAYER}.self_attn.{n}_proj.weight": (r, HIDDEN) for n, r in rows.items()}
    shapes |= {f"{LAYER}.self_attn.{n}_proj.bias": (r,) for n, r in rows.items() if bias}
    shapes |= {f"{LAYER}.mlp.{n}_proj.weight": (WIDTH, HIDDEN) for n in ("gate", "up")}
    return shapes | {
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{LAYER}.mlp.down_proj.weight": (HIDDEN, WIDTH),
        f"{LAYER}.input_layernorm.weight": (HIDDEN,),
        f"{LAYER}.self_attn.q_norm.weight": (HEAD,),
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }


def mixture():
    shapes = {f"{LAYER}.mlp.gate.weight": (EXPERTS, HIDDEN), f"{LAYER}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
    for expert in range(EXPERTS):
        prefix = f"{LAYER}.mlp.experts.{expert}"
        shapes |= {f"{prefix}.{n}_proj.weight": (EXPERT_WIDTH, HIDDEN) for n in ("gate", "up")}
        shapes[f"{prefix}.down_proj.weight"] = (HIDDEN, EXPERT_WIDTH)
    return shapes | {f"{LAYER}.mlp.shared_experts.up_proj.weight": (WIDTH, HIDDEN)}


def latent():
    return {
        f"{LAYER}.self_attn.q_a_proj.weight": (12, HIDDEN),
        f"{LAYER}.self_attn.q_a_layernorm.weight": (12,),
        f"{LAYER}.self_attn.q_b_proj.weight": (HEADS * 6, 12),
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": (10, HIDDEN),
        f"{LAYER}.self_attn.kv_b_proj.weight": (HEADS * 8, 8),
    }


def filled(shapes, size, engine="vllm", **options):
    """The engine's local tensors after a transfer from a trainer of three ranks, sharded on dim 0."""
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors = {name: CheckpointTensor(shape, "float32") for name, shape in shapes.items()}
    trainer = tp_plans.transfer.mesh_layout(
        tensors, (3,), {n: [Shard(0) if t.shape else Replicate()] for n, t in tensors.items()}
    )
    layout = tp_plans.transfer.engine_layout(tensors, size, engine=engine, **options)
    local = {}
    for each in tp_plans.transfer.plan_transfer(trainer, layout.shifted(3)).transfers:
        for part, block in layout.within(each.destination - 3, each.tensor, each.box):
            values = full[each.tensor][tuple(slice(*side) for side in part)]
            target = local.setdefault((each.destination - 3, block.local), {})
            target[block.local_box(part)] = values.permute([block.dims.index(dim) for dim in sorted(block.dims)])
    return full, local


def assembled(parts, shape):
    """The local tensor that boxes of values make; NaN where nothing was written."""
    tensor = torch.full(shape, float("nan"))
    for box, values in parts.items():
        where = tuple(slice(*side) for side in box)
        assert tensor[where].isnan().all()
        tensor[where] = values.reshape(tensor[where].shape)
    return tensor


def equal(local, key, expected):
    return torch.equal(assembled(local[key], expected.shape), expected)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_attention_mlp_and_vocabulary_are_cut_and_fused_as_by_the_loaders(kv_heads, tp):
    shapes = dense(kv_heads)
    full, local = filled(shapes, EngineSize(num_attention_heads=HEADS, num_key_value_heads=kv_heads, tp=tp))
    for rank in range(tp):
        own_kv = max(1, kv_heads // tp) * HEAD
        kv_start = rank * own_kv if kv_heads >= tp else rank // (tp // kv_heads) * HEAD
        for kind in ("weight", "bias"):
            q, k, v = (full[f"{LAYER}.self_attn.{n}_proj.{kind}"] for n in "qkv")
            parts = [q.chunk(tp)[rank], k[kv_start : kv_start + own_kv], v[kv_start : kv_start + own_kv]]
            assert equal(local, (rank, f"{LAYER}.self_attn.qkv_proj.{kind}"), torch.cat(parts))
        gate, up = (full[f"{LAYER}.mlp.{n}_proj.weight"].chunk(tp)[rank] for n in ("gate", "up"))
        assert equal(local, (rank, f"{LAYER}.mlp.gate_up_proj.weight"), torch.cat([gate, up]))
        for name in (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"):
            assert equal(local, (rank, name), full[name].chunk(tp, 1)[rank])
        for name in (f"{LAYER}.input_layernorm.weight", f"{LAYER}.self_attn.q_norm.weight", "model.norm.weight"):
            assert equal(local, (rank, name), full[name])
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = full[name].split(128 // tp)[rank:][:1]  # 70 rows, padded to 128
            assert equal(local, (rank, name), rows[0]) if rows else (rank, name) not in local


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (4, 2), (8, 2)])
def test_experts_are_stacked_and_dealt_over_expert_and_tensor_ranks(tp, ep):
    full, local = filled(mixture(), EngineSize(num_attention_heads=8, tp=tp, ep=ep), "sglang")
    cut = tp // ep
    for rank in range(tp):
        held = [[0, 1, 2, 3, 4, 5], [[0, 1, 2], [3, 4, 5]], 0, [[0, 1], [2, 3], [4], [5]]][ep - 1]
        own = held if ep == 1 else held[rank // cut]
        experts = [f"{LAYER}.mlp.experts.{expert}" for expert in own]
        w13 = [[full[f"{e}.{n}_proj.weight"].chunk(cut)[rank % cut] for n in ("gate", "up")] for e in experts]
        w2 = [full[f"{e}.down_proj.weight"].chunk(cut, 1)[rank % cut] for e in experts]
        assert equal(local, (rank, f"{LAYER}.mlp.experts.w13_weight"), torch.stack([torch.cat(pair) for pair in w13]))
        assert equal(local, (rank, f"{LAYER}.mlp.experts.w2_weight"), torch.stack(w2))
        assert equal(local, (rank, f"{LAYER}.mlp.gate.weight"), full[f"{LAYER}.mlp.gate.weight"])
        shared = full[f"{LAYER}.mlp.shared_experts.up_proj.weight"].chunk(tp)[rank]
        assert equal(local, (rank, f"{LAYER}.mlp.shared_experts.gate_up_proj.weight"), shared)


@pytest.mark.parametrize(
    ("split", "rows", "columns"),
    [
        ("replicated", [(0, 8), (0, 8)], [(0, 6), (0, 6)]),
        ("rows", [(0, 4), (4, 8)], [(0, 6), (0, 6)]),
        ("row_pairs", [(0, 4), (4, 8)], [(0, 6), (0, 6)]),
        ("columns", [(0, 8), (0, 8)], [(0, 3), (3, 6)]),
        ("first_rank", [(0, 8)], [(0, 6)]),
    ],
)
def test_a_rule_for_numbered_experts_cuts_them_as_it_says(split, rows, columns):
    name = f"{LAYER}.mlp.experts.0.proj.weight"
    rule = EngineRule(pattern="*.proj.weight", split=split, fused_into="w", expert=True)
    layout = tp_plans.transfer.engine_layout(
        {name: CheckpointTensor((8, 6))}, EngineSize(num_attention_heads=2, tp=2), rules=[rule]
    )
    assert [block.box for block in layout.blocks(name)] == list(zip(rows, columns, strict=True))


def stacked(parent):
    return {
        f"{LAYER}.{parent}.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * EXPERT_WIDTH),
        f"{LAYER}.{parent}.experts.down_proj": (EXPERTS, EXPERT_WIDTH, HIDDEN),
        f"{LAYER}.{parent}.router.weight": (EXPERTS, HIDDEN),
    }


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("parent", ["mlp", "feed_forward"])
def test_experts_that_the_checkpoint_stacks_are_transposed_dealt_and_cut(parent, tp, ep):
    shapes = stacked(parent)
    if parent == "mlp":  # gpt-oss: gate and up alternate, biases and sinks
        shapes[f"{LAYER}.mlp.experts.gate_up_proj_bias"] = (EXPERTS, 2 * EXPERT_WIDTH)
        shapes[f"{LAYER}.mlp.experts.down_proj_bias"] = (EXPERTS, HIDDEN)
        shapes[f"{LAYER}.self_attn.sinks"] = (HEADS,)
        shapes[f"{LAYER}.mlp.router.bias"] = (EXPERTS,)
    full, local = filled(shapes, EngineSize(num_attention_heads=HEADS, tp=tp, ep=ep), "sglang")
    cut = tp // ep
    for rank in range(tp):
        own, part = slice(rank // cut * EXPERTS // ep, (rank // cut + 1) * EXPERTS // ep), rank % cut
        gate_up = full[f"{LAYER}.{parent}.experts.gate_up_proj"][own].transpose(1, 2)
        down = full[f"{LAYER}.{parent}.experts.down_proj"][own].transpose(1, 2)
        halves = [gate_up] if parent == "mlp" else gate_up.chunk(2, 1)
        w13 = torch.cat([half.chunk(cut, 1)[part] for half in halves], 1)
        assert equal(local, (rank, f"{LAYER}.{parent}.experts.w13_weight"), w13)
        assert equal(local, (rank, f"{LAYER}.{parent}.experts.w2_weight"), down.chunk(cut, 2)[part])
        router = f"{LAYER}.{parent}.router.weight"
        assert equal(local, (rank, router), full[router])
        if parent == "mlp":
            biases = [full[f"{LAYER}.mlp.experts.{name}_proj_bias"][own] for name in ("gate_up", "down")]
            assert equal(local, (rank, f"{LAYER}.mlp.experts.w13_bias"), biases[0].chunk(cut, 1)[part])
            key = (rank, f"{LAYER}.mlp.experts.w2_bias")
            assert equal(local, key, biases[1]) if part == 0 else key not in local
            sinks = f"{LAYER}.self_attn.sinks"
            assert equal(local, (rank, sinks), full[sinks].chunk(tp)[rank])


def test_pairs_of_gate_and_up_that_alternate_are_not_split():
    shapes = {f"{LAYER}.mlp.experts.gate_up_proj": CheckpointTensor((2, 4, 12))}
    tp_plans.transfer.engine_layout(shapes, EngineSize(num_attention_heads=4, tp=2))
    with pytest.raises(TransferError, match="12 features cannot be split evenly over 4 ranks, each of a multiple of 2"):
        tp_plans.transfer.engine_layout(shapes, EngineSize(num_attention_heads=4, tp=4))


def test_latent_attention_without_compressed_queries_fuses_nothing():
    shapes = latent()
    for name in ("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"):
        del shapes[f"{LAYER}.self_attn.{name}"]
    shapes[f"{LAYER}.self_attn.q_proj.weight"] = (HEADS * 6, HIDDEN)
    full, local = filled(shapes, EngineSize(num_attention_heads=HEADS, tp=4))
    for rank in range(4):
        for name, parts in (("q_proj", 4), ("kv_b_proj", 4), ("kv_a_proj_with_mqa", 1)):
            weight = f"{LAYER}.self_attn.{name}.weight"
            assert equal(local, (rank, weight), full[weight].chunk(parts)[rank % parts])


def scaled(scales):
    """A layer with weights of 256 and 512 features, and scales of the shapes that a function of a weight's gives."""
    shapes = {f"{LAYER}.self_attn.{n}_proj.weight": (256, 512) for n in "qkv"}
    shapes |= {f"{LAYER}.self_attn.o_proj.weight": (512, 256)}
    for expert in range(4):
        prefix = f"{LAYER}.mlp.experts.{expert}"
        shapes |= {f"{prefix}.{n}_proj.weight": (256, 512) for n in ("gate", "up")}
        shapes[f"{prefix}.down_proj.weight"] = (512, 256)
    suffix, shape_of = scales
    return shapes | {name + suffix: shape_of(shape) for name, shape in shapes.items()}


BLOCKS = ("_scale_inv", lambda shape: (shape[0] // 128, shape[1] // 128))
GROUPS = ("_scale", lambda shape: (shape[0], shape[1] // 32))


@pytest.mark.parametrize(("suffix", "shape_of"), [BLOCKS, GROUPS], ids=["blocks", "groups"])
def test_scales_are_cut_and_fused_as_their_weights(suffix, shape_of):
    shapes = scaled((suffix, shape_of))
    full, local = filled(shapes, EngineSize(num_attention_heads=HEADS, tp=2), "sglang")
    for rank in range(2):
        for kind in ("", suffix):
            qkv = [full[f"{LAYER}.self_attn.{n}_proj.weight{kind}"].chunk(2)[rank] for n in "qkv"]
            assert equal(local, (rank, f"{LAYER}.self_attn.qkv_proj.weight{kind}"), torch.cat(qkv))
            o_proj = full[f"{LAYER}.self_attn.o_proj.weight{kind}"].chunk(2, 1)[rank]
            assert equal(local, (rank, f"{LAYER}.self_attn.o_proj.weight{kind}"), o_proj)
            experts = [f"{LAYER}.mlp.experts.{expert}" for expert in range(4)]
            w13 = [[full[f"{e}.{n}_proj.weight{kind}"].chunk(2)[rank] for n in ("gate", "up")] for e in experts]
            w13 = torch.stack([torch.cat(pair) for pair in w13])
            assert equal(local, (rank, f"{LAYER}.mlp.experts.w13_weight{kind}"), w13)
            w2 = torch.stack([full[f"{e}.down_proj.weight{kind}"].chunk(2, 1)[rank] for e in experts])
            assert equal(local, (rank, f"{LAYER}.mlp.experts.w2_weight{kind}"), w2)


def test_one_scale_per_matrix_lies_at_the_place_of_its_matrix():
    full, local = filled(scaled(("_scale", lambda _: ())), EngineSize(num_attention_heads=HEADS, tp=2, ep=2), "sglang")
    for rank in range(2):
        qkv = torch.stack([full[f"{LAYER}.self_attn.{n}_proj.weight_scale"] for n in "qkv"])
        assert equal(local, (rank, f"{LAYER}.self_attn.qkv_proj.weight_scale"), qkv)
        experts = [f"{LAYER}.mlp.experts.{2 * rank + expert}" for expert in range(2)]
        w13 = [[full[f"{e}.{n}_proj.weight_scale"] for n in ("gate", "up")] for e in experts]
        w13 = torch.tensor(w13)
        assert equal(local, (rank, f"{LAYER}.mlp.experts.w13_weight_scale"), w13)
        w2 = torch.stack([full[f"{e}.down_proj.weight_scale"] for e in experts])
        assert equal(local, (rank, f"{LAYER}.mlp.experts.w2_weight_scale"), w2)


def test_a_cut_inside_of_a_block_with_one_scale_is_refused_with_numbers():
    tensors = {f"{LAYER}.mlp.up_proj.weight": CheckpointTensor((384, 128), "float8_e4m3fn")}
    tensors[f"{LAYER}.mlp.up_proj.weight_scale_inv"] = CheckpointTensor((3, 1), "float32")
    with pytest.raises(TransferError, match=r"up_proj\.weight is cut at 0 to 192 of 384, inside of the 128 elements"):
        tp_plans.transfer.engine_layout(tensors, EngineSize(num_attention_heads=8, tp=2))
    tensors[f"{LAYER}.mlp.up_proj.weight_scale_inv"] = CheckpointTensor((2, 1), "float32")
    with pytest.raises(TransferError, match=r"weight_scale_inv has shape \(2, 1\) and its weight \(384, 128\)"):
        tp_plans.transfer.engine_layout(tensors, EngineSize(num_attention_heads=8))


@pytest.mark.parametrize(("engine", "stack"), [("vllm", "experts.routed_experts."), ("sglang", "experts.")])
def test_stacked_experts_have_the_engines_own_names(engine, stack):
    _, local = filled(mixture(), EngineSize(num_attention_heads=8, tp=2), engine)
    assert {name for _, name in local if "experts." in name and "shared" not in name} == {
        f"{LAYER}.mlp.{stack}{name}_weight" for name in ("w13", "w2")
    }


@pytest.mark.parametrize(("engine", "fused"), [("vllm", "fused_qkv_a_proj"), ("sglang", "fused_qkv_a_proj_with_mqa")])
def test_latent_attention_keeps_its_compressed_projections_whole_and_cuts_heads(engine, fused):
    full, local = filled(latent(), EngineSize(num_attention_heads=HEADS, tp=4), engine)
    for rank in range(4):
        pair = [full[f"{LAYER}.self_attn.{n}.weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa")]
        assert equal(local, (rank, f"{LAYER}.self_attn.{fused}.weight"), torch.cat(pair))
        for name in ("q_b_proj", "kv_b_proj"):
            weight = full[f"{LAYER}.self_attn.{name}.weight"]
            assert equal(local, (rank, f"{LAYER}.self_attn.{name}.weight"), weight.chunk(4)[rank])


def test_replicas_of_an_engine_store_the_same_on_later_ranks():
    shapes = dense(8)
    _, local = filled(shapes, EngineSize(num_attention_heads=HEADS, tp=2), replicas=2)
    assert len(local) == 4 * len({name for _, name in local})
    for rank, name in local:
        assert local[rank, name].keys() == local[(rank + 2) % 4, name].keys()


def test_a_rule_of_the_users_own_comes_first():
    tensors = {"model.layers.0.mixer.in_proj.weight": CheckpointTensor((12, 4))}
    size = EngineSize(num_attention_heads=4, tp=2)
    with pytest.raises(TransferError, match=r"no rule says how the engine stores model\.layers\.0\.mixer\.in_proj"):
        tp_plans.transfer.engine_layout(tensors, size)
    rules = [EngineRule(pattern="*.mixer.in_proj.weight", split="rows"), *tp_plans.transfer.engine_rules("vllm")]
    boxes = [b.box for b in tp_plans.transfer.engine_layout(tensors, size, rules=rules).blocks(next(iter(tensors)))]
    assert boxes == [((0, 6), (0, 4)), ((6, 12), (0, 4))]


def test_sizes_that_no_engine_has_are_refused_with_numbers():
    for message, options in (
        ("8 heads and tp=3: use a tp that divides", {"tp": 3}),
        ("3 key/value heads and tp=8", {"tp": 8, "num_key_value_heads": 3}),
        ("ep=3 does not divide tp=4", {"tp": 4, "ep": 3}),
        ("tp is 0", {"tp": 0}),
    ):
        with pytest.raises(TransferError, match=message):
            EngineSize(**{"num_attention_heads": 8, **options})
    shape = {"model.layers.0.mlp.up_proj.weight": CheckpointTensor((25, 4))}
    with pytest.raises(TransferError, match="25 features cannot be split evenly over 2 ranks"):
        tp_plans.transfer.engine_layout(shape, EngineSize(num_attention_heads=8, tp=2))
    with pytest.raises(TransferError, match="engine is 'tgi'"):
        tp_plans.transfer.engine_rules("tgi")
    with pytest.raises(TransferError, match="split is 'diagonal'"):
        EngineRule(pattern="*", split="diagonal")
