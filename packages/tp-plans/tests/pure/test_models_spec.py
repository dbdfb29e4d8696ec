import pytest

from tp_plans import (
    ColwiseParallel,
    GatherSequence,
    NoParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
    architectures,
    plan_for,
)
from tp_plans.models import DecoderSpec, SublayerSpec, decoder_plan
from tp_plans.styles import ParallelAttention, parameter_layout

BLOCK = "model.layers.*"

# Written out once, so that a change of the mechanics is seen as a change of the plan.
LLAMA_TP = {
    "model.embed_tokens": VocabParallelEmbedding(),
    f"{BLOCK}.input_layernorm": NoParallel(),
    f"{BLOCK}.post_attention_layernorm": NoParallel(),
    f"{BLOCK}.self_attn": ParallelAttention(),
    f"{BLOCK}.self_attn.q_proj": ColwiseParallel(multiple_of="head_dim"),
    f"{BLOCK}.self_attn.k_proj": ColwiseParallel(multiple_of="head_dim", replicate_kv_heads=True),
    f"{BLOCK}.self_attn.v_proj": ColwiseParallel(multiple_of="head_dim", replicate_kv_heads=True),
    f"{BLOCK}.self_attn.o_proj": RowwiseParallel(multiple_of="head_dim"),
    f"{BLOCK}.mlp": PrepareModuleInput(),
    f"{BLOCK}.mlp.gate_proj": ColwiseParallel(),
    f"{BLOCK}.mlp.up_proj": ColwiseParallel(),
    f"{BLOCK}.mlp.down_proj": RowwiseParallel(),
    "model.norm": NoParallel(),
    "lm_head": ColwiseParallel(use_local_output=False),
}
LLAMA_SP = LLAMA_TP | {
    "model": PrepareModuleInput(layout=Shard(1), argument="inputs_embeds", position=None),
    "model.embed_tokens": VocabParallelEmbedding(output_layouts=Shard(1), use_local_output=False),
    f"{BLOCK}.input_layernorm": SequenceParallel(),
    f"{BLOCK}.post_attention_layernorm": SequenceParallel(),
    f"{BLOCK}.self_attn.o_proj": RowwiseParallel(
        output_layouts=Shard(1), use_local_output=False, multiple_of="head_dim"
    ),
    f"{BLOCK}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "model.norm": SequenceParallel(),
}

CUT = pytest.mark.parametrize(
    "entry", [entry for entry in architectures() if entry.sequence_parallel], ids=lambda entry: entry.class_name
)
EVERY = pytest.mark.parametrize("entry", architectures(), ids=lambda entry: entry.class_name)


def test_the_plan_of_llama():
    assert dict(plan_for("llama")) == LLAMA_TP


def test_the_sequence_parallel_plan_of_llama():
    assert dict(plan_for("llama", sequence_parallel=True)) == LLAMA_SP


@EVERY
def test_tensor_parallelism_alone_leaves_the_stream_whole(entry):
    for style in entry.plan().values():
        assert not isinstance(style, SequenceParallel)
        if isinstance(style, (RowwiseParallel, VocabParallelEmbedding)):
            assert style.output_layouts == Replicate()
        if isinstance(style, PrepareModuleInput):
            assert style.layout == Replicate()


@CUT
def test_sequence_parallelism_only_adds_doors_of_the_stream(entry):
    tp, sp = entry.plan(), entry.plan(sequence_parallel=True)
    added = {pattern: sp[pattern] for pattern in set(sp) - set(tp)}
    entrance = PrepareModuleInput(layout=Shard(1), argument="inputs_embeds", position=None)
    assert (added.pop(entry.decoder.root, None) == entrance) is not entry.decoder.gather_at_block_boundary
    assert set(map(type, added.values())) <= {GatherSequence}
    assert (f"{entry.decoder.root}.{entry.decoder.blocks}" in added) is entry.decoder.gather_at_block_boundary


@CUT
def test_sequence_parallelism_splits_the_same_weights_in_the_same_units(entry):
    tp, sp = entry.plan(), entry.plan(sequence_parallel=True)
    for pattern, style in tp.items():
        cut = sp[pattern]
        if isinstance(cut, GatherSequence):
            assert cut.inner == style
        elif isinstance(cut, SequenceParallel):
            assert style == NoParallel()
        else:
            assert type(cut) is type(style)
            assert parameter_layout(cut, 2) == parameter_layout(style, 2)
            for name in ("unit", "pieces", "shared", "counts", "gradient", "input"):
                assert getattr(cut, name, None) == getattr(style, name, None)


@CUT
def test_every_norm_of_a_cut_stream_works_on_its_own_tokens(entry):
    plan = entry.plan(sequence_parallel=True)
    assert plan[f"{entry.decoder.root}.{entry.decoder.final_norm}"] == SequenceParallel()
    for norm in entry.decoder.norms:
        inside = NoParallel() if entry.decoder.gather_at_block_boundary else SequenceParallel()
        assert plan[f"{entry.decoder.root}.{entry.decoder.blocks}.{norm}"] == inside


@CUT
def test_decoder_plan_outputs_dtensors_to_a_sharded_stream(entry):
    for style in entry.plan(sequence_parallel=True).values():
        if isinstance(style, (RowwiseParallel, VocabParallelEmbedding)) and style.output_layouts == Shard(1):
            assert not style.use_local_output


@EVERY
def test_logits_stay_cut_on_the_vocabulary(entry):
    for sequence_parallel in {False, entry.sequence_parallel}:
        plan = entry.plan(sequence_parallel=sequence_parallel)
        assert plan[entry.decoder.lm_head] == ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


@EVERY
def test_attention_is_split_in_whole_heads(entry):
    alone = {name for mixer in entry.decoder.sublayers for name in getattr(mixer, "replacement_linears", ())}
    for pattern, style in entry.plan().items():
        in_heads = "self_attn." in pattern and pattern.rpartition(".")[2] not in alone
        if in_heads and isinstance(style, (ColwiseParallel, RowwiseParallel)):
            assert style.multiple_of == "head_dim"


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_over_heads_get_their_gradients_summed(name, sequence_parallel):
    plan = plan_for(name, sequence_parallel=sequence_parallel)
    norms = {pattern: style for pattern, style in plan.items() if pattern.endswith(("q_norm", "k_norm"))}
    assert len(norms) == 2
    assert set(norms.values()) == {NoParallel(gradient="partial")}


def test_embeddings_that_are_edited_outside_arrive_whole():
    plan = plan_for("Gemma3ForConditionalGeneration", sequence_parallel=True)
    assert plan["model.language_model.embed_tokens"] == VocabParallelEmbedding()
    assert plan["model.language_model"].layout == Shard(1)


def test_the_vision_tower_is_in_no_rule():
    for pattern in plan_for("Gemma3ForConditionalGeneration"):
        assert pattern.startswith("model.language_model") or pattern == "lm_head"


def test_the_names_given_are_the_names_used():
    decoder = DecoderSpec(
        root="transformer",
        embedding="wte",
        blocks="h.*",
        final_norm="ln_f",
        lm_head="out",
        norms=("ln_1",),
        sublayers=(SublayerSpec(path="attn", colwise=("qkv",), rowwise="proj", multiple_of=8, norms=("qn",)),),
    )
    plan = decoder_plan(decoder, name="tiny")
    assert dict(plan) == {
        "transformer.wte": VocabParallelEmbedding(),
        "transformer.h.*.ln_1": NoParallel(),
        "transformer.h.*.attn": PrepareModuleInput(),
        "transformer.h.*.attn.qkv": ColwiseParallel(multiple_of=8),
        "transformer.h.*.attn.qn": NoParallel(gradient="partial"),
        "transformer.h.*.attn.proj": RowwiseParallel(multiple_of=8),
        "transformer.ln_f": NoParallel(),
        "out": ColwiseParallel(use_local_output=False),
    }
    assert plan.name == "tiny"
