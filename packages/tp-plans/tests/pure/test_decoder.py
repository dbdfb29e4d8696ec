import pytest

from tp_plans import (
    ColwiseParallel,
    Decoder,
    Mixer,
    ParallelAttention,
    PrepareInput,
    Replicate,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    VocabParallelEmbedding,
    WholeSequence,
    architectures,
    decoder_plan,
    plan_for,
)
from tp_plans.styles import parameter_layout

BLOCK = "model.layers.*"

# Written out once, so that a change of the mechanics is seen as a change of the plan.
LLAMA_TP = {
    "model.embed_tokens": VocabParallelEmbedding(),
    f"{BLOCK}.input_layernorm": Replicated(),
    f"{BLOCK}.post_attention_layernorm": Replicated(),
    f"{BLOCK}.self_attn": ParallelAttention(),
    f"{BLOCK}.self_attn.q_proj": ColwiseParallel(unit="head_dim"),
    f"{BLOCK}.self_attn.k_proj": ColwiseParallel(unit="head_dim", shared=True),
    f"{BLOCK}.self_attn.v_proj": ColwiseParallel(unit="head_dim", shared=True),
    f"{BLOCK}.self_attn.o_proj": RowwiseParallel(unit="head_dim"),
    f"{BLOCK}.mlp": PrepareInput(),
    f"{BLOCK}.mlp.gate_proj": ColwiseParallel(),
    f"{BLOCK}.mlp.up_proj": ColwiseParallel(),
    f"{BLOCK}.mlp.down_proj": RowwiseParallel(),
    "model.norm": Replicated(),
    "lm_head": ColwiseParallel(use_local_output=False),
}
LLAMA_SP = LLAMA_TP | {
    "model": PrepareInput(layout=Shard(1), argument="inputs_embeds", position=None),
    "model.embed_tokens": VocabParallelEmbedding(output=Shard(1), use_local_output=False),
    f"{BLOCK}.input_layernorm": SequenceParallel(),
    f"{BLOCK}.post_attention_layernorm": SequenceParallel(),
    f"{BLOCK}.self_attn.o_proj": RowwiseParallel(output=Shard(1), use_local_output=False, unit="head_dim"),
    f"{BLOCK}.mlp.down_proj": RowwiseParallel(output=Shard(1), use_local_output=False),
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
            assert style.output == Replicate()
        if isinstance(style, PrepareInput):
            assert style.layout == Replicate()


@CUT
def test_sequence_parallelism_only_adds_doors_of_the_stream(entry):
    tp, sp = entry.plan(), entry.plan(sequence_parallel=True)
    added = {pattern: sp[pattern] for pattern in set(sp) - set(tp)}
    entrance = PrepareInput(layout=Shard(1), argument="inputs_embeds", position=None)
    assert (added.pop(entry.decoder.root, None) == entrance) is not entry.decoder.door_at_blocks
    assert set(map(type, added.values())) <= {WholeSequence}
    assert (f"{entry.decoder.root}.{entry.decoder.blocks}" in added) is entry.decoder.door_at_blocks


@CUT
def test_sequence_parallelism_splits_the_same_weights_in_the_same_units(entry):
    tp, sp = entry.plan(), entry.plan(sequence_parallel=True)
    for pattern, style in tp.items():
        cut = sp[pattern]
        if isinstance(cut, WholeSequence):
            assert cut.around == style
        elif isinstance(cut, SequenceParallel):
            assert style == Replicated()
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
        inside = Replicated() if entry.decoder.door_at_blocks else SequenceParallel()
        assert plan[f"{entry.decoder.root}.{entry.decoder.blocks}.{norm}"] == inside


@CUT
def test_what_writes_to_a_cut_stream_hands_on_a_dtensor_that_knows_the_full_length(entry):
    for style in entry.plan(sequence_parallel=True).values():
        if isinstance(style, (RowwiseParallel, VocabParallelEmbedding)) and style.output == Shard(1):
            assert not style.use_local_output


@EVERY
def test_logits_stay_cut_on_the_vocabulary(entry):
    for sequence_parallel in {False, entry.sequence_parallel}:
        plan = entry.plan(sequence_parallel=sequence_parallel)
        assert plan[entry.decoder.head] == ColwiseParallel(output=Shard(-1), use_local_output=False)


@EVERY
def test_attention_is_split_in_whole_heads(entry):
    alone = {name for mixer in entry.decoder.mixers for name in getattr(mixer, "alone", ())}
    for pattern, style in entry.plan().items():
        in_heads = "self_attn." in pattern and pattern.rpartition(".")[2] not in alone
        if in_heads and isinstance(style, (ColwiseParallel, RowwiseParallel)):
            assert style.unit == "head_dim"


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_over_heads_get_their_gradients_summed(name, sequence_parallel):
    plan = plan_for(name, sequence_parallel=sequence_parallel)
    norms = {pattern: style for pattern, style in plan.items() if pattern.endswith(("q_norm", "k_norm"))}
    assert len(norms) == 2
    assert set(norms.values()) == {Replicated(gradient="partial")}


def test_embeddings_that_are_edited_outside_arrive_whole():
    plan = plan_for("Gemma3ForConditionalGeneration", sequence_parallel=True)
    assert plan["model.language_model.embed_tokens"] == VocabParallelEmbedding()
    assert plan["model.language_model"].layout == Shard(1)


def test_the_vision_tower_is_in_no_rule():
    for pattern in plan_for("Gemma3ForConditionalGeneration"):
        assert pattern.startswith("model.language_model") or pattern == "lm_head"


def test_the_names_given_are_the_names_used():
    decoder = Decoder(
        root="transformer",
        embedding="wte",
        blocks="h.*",
        final_norm="ln_f",
        head="out",
        norms=("ln_1",),
        mixers=(Mixer(path="attn", columns=("qkv",), row="proj", unit=8, norms=("qn",)),),
    )
    plan = decoder_plan(decoder, name="tiny")
    assert dict(plan) == {
        "transformer.wte": VocabParallelEmbedding(),
        "transformer.h.*.ln_1": Replicated(),
        "transformer.h.*.attn": PrepareInput(),
        "transformer.h.*.attn.qkv": ColwiseParallel(unit=8),
        "transformer.h.*.attn.qn": Replicated(gradient="partial"),
        "transformer.h.*.attn.proj": RowwiseParallel(unit=8),
        "transformer.ln_f": Replicated(),
        "out": ColwiseParallel(use_local_output=False),
    }
    assert plan.name == "tiny"
