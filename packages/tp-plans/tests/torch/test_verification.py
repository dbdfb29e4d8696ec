"""Plans that are run: the right one, and errors that only the model's code can tell."""

import copy
import logging
import os
import time
from collections import OrderedDict

import pytest
import torch
import transformers
from torch import nn

import tp_plans
from coverage.table import coverage_entries
from coverage.table import tiny_model as small
from harness.parity import mesh_for
from tp_plans import (
    ColwiseParallel,
    NoParallel,
    Plan,
    RowwiseParallel,
    UnknownArchitectureError,
    VocabParallelEmbedding,
    check,
    plan_for,
    verify_plan,
)
from tp_plans.cli import main
from tp_plans.errors import ModelError
from tp_plans.infer import suggest
from tp_plans.model_tree import ModelTree
from tp_plans.styles import ParallelAttention
from tp_plans.verification import ranks
from tp_plans.verification.compare import first_reference_run
from tp_plans.verification.shrink import shrunk_config
from tp_plans.verification.tiny import tiny_model

WIDTH, HEADS, SIZE, INNER = 24, 4, 8, 40


class Sharpen(nn.Module):
    """A norm of the first half of each head."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(SIZE // 2))

    def forward(self, x):
        half, rest = x.chunk(2, -1)
        half = half * torch.rsqrt(half.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        return torch.cat([half, rest], -1)


class Mix(nn.Module):
    """Attention with fused queries, keys and values, one after another or head by head, and a norm of each head."""

    def __init__(self, head_by_head):
        super().__init__()
        self.heads, self.head_by_head = HEADS, head_by_head
        self.packed, self.back = nn.Linear(WIDTH, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.sharpen = Sharpen()

    def forward(self, x):
        packed = self.packed(x)
        if self.head_by_head:
            q, k, v = packed.unflatten(-1, (self.heads, 3, SIZE)).unbind(-2)
        else:
            q, k, v = (part.unflatten(-1, (self.heads, SIZE)) for part in packed.chunk(3, -1))
        q, k, v = (each.transpose(1, 2) for each in (self.sharpen(q), k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(mixed.transpose(1, 2).flatten(-2))


class Gate(nn.Module):
    """A gated MLP whose gate and up features stand one after another, or in turn."""

    def __init__(self, in_turn):
        super().__init__()
        self.in_turn = in_turn
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        both = self.wide(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.in_turn else both.chunk(2, -1)
        return self.narrow(nn.functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, head_by_head, in_turn):
        super().__init__()
        self.one, self.two = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mix, self.gate = Mix(head_by_head), Gate(in_turn)

    def forward(self, x):
        x = x + self.mix(self.one(x))
        return x + self.gate(self.two(x))


class Own(nn.Module):
    def __init__(self, head_by_head=False, in_turn=False):
        super().__init__()
        self.words = nn.Embedding(33, WIDTH)
        self.tower = nn.ModuleList(Block(head_by_head, in_turn) for _ in range(2))
        self.finish, self.speak = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 33, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.tower:
            x = block(x)
        return self.speak(self.finish(x))


FUSED_IN_HEADS = ColwiseParallel(multiple_of=SIZE, fused_sizes=(1, 1, 1))


def plan(**changes):
    rules = {
        "words": VocabParallelEmbedding(),
        "tower.*.mix": ParallelAttention(argument="x", head_count_attrs=("heads",)),
        "tower.*.mix.packed": FUSED_IN_HEADS,
        "tower.*.mix.sharpen": NoParallel(gradient="partial"),
        "tower.*.mix.back": RowwiseParallel(multiple_of=SIZE),
        "tower.*.gate.wide": ColwiseParallel(fused_sizes=(1, 1)),
        "tower.*.gate.narrow": RowwiseParallel(),
        "speak": ColwiseParallel(use_local_output=False),
    }
    return Plan(rules | {name.replace("__", ".").replace("all", "*"): style for name, style in changes.items()})


def test_a_plan_that_is_right_is_right_to_rounding():
    report = verify_plan(Own(), plan())
    assert report.right
    assert max(report.output_error, *report.gradient_errors.values()) < 1e-12
    assert report.gradient_errors.keys() == dict(Own().named_parameters()).keys()


class Silent(Own):
    """A model whose outputs and gradients are zeros, as those of width 0 are."""

    def forward(self, ids):
        return super().forward(ids) * 0


def test_outputs_and_gradients_of_zeros_are_compared_too():
    report = verify_plan(Silent(), plan())
    assert report.right
    assert max(report.output_error, *report.gradient_errors.values()) == 0


def test_ranks_that_hang_at_their_start_are_forked_anew(monkeypatch, tmp_path):
    real = ranks.dist.init_process_group

    def hang_once(*arguments, rank, **options):
        if rank == 1 and not (tmp_path / "hung").exists():
            (tmp_path / "hung").touch()
            time.sleep(600)
        real(*arguments, rank=rank, **options)

    monkeypatch.setattr(ranks.dist, "init_process_group", hang_once)
    monkeypatch.setattr(ranks, "_START_TIMEOUT", 2)
    assert verify_plan(Own(), plan()).right
    assert (tmp_path / "hung").exists()


def test_ranks_that_never_start_and_ranks_that_end_are_errors(monkeypatch):
    monkeypatch.setattr(ranks, "_START_TIMEOUT", 0.2)
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda *_, **__: time.sleep(600))
    with pytest.raises(ModelError, match=r"2 forked ranks did not start in 3 times 0\.2 seconds"):
        verify_plan(Own(), plan())
    end_or_hang = {0: lambda: time.sleep(600), 1: lambda: os._exit(1)}
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda *_, rank, **__: end_or_hang[rank]())
    monkeypatch.setattr(ranks, "_START_TIMEOUT", 60)
    with pytest.raises(ModelError, match="rank 1 ended without a result"):
        verify_plan(Own(), plan())


PLANTED = {
    "a fused weight split down the middle": (
        {},
        {"tower__all__gate__wide": ColwiseParallel()},
        "tower.*.gate",
        ("tower.*.gate.wide", "tower.*.gate.narrow"),
    ),
    "a gate paired with the wrong half": (
        {"in_turn": True},
        {},
        "tower.*.gate",
        ("tower.*.gate.wide", "tower.*.gate.narrow"),
    ),
    "heads interleaved the other way": (
        {"head_by_head": True},
        {},
        "tower.*.mix",
        ("tower.*.mix", "tower.*.mix.packed", "tower.*.mix.sharpen", "tower.*.mix.back"),
    ),
    "no rule for the gradient of a norm of heads": (
        {},
        {"tower__all__mix__sharpen": NoParallel()},
        "tower.*.mix",
        ("tower.*.mix.sharpen",),
    ),
}


def reports_of_planted_errors():
    """What two ranks that there are find of each; new ones would each derive the layouts of every operator again."""
    found = {}
    for name, (options, changes, _, _) in PLANTED.items():
        model, wrong = Own(**options), plan(**changes)
        assert check(wrong, model, tp=2).errors == ()
        found[name] = verify_plan(model, wrong, mesh=mesh_for({"tp": 2})["tp"])
    return found


def test_planted_errors_that_check_cannot_see_are_found_and_named(two_ranks):
    for found in two_ranks.run(reports_of_planted_errors):
        assert found.keys() == PLANTED.keys()
        for name, report in found.items():
            _, _, where, rules = PLANTED[name]
            assert not report.right
            assert [(part.where, set(part.rules)) for part in report.wrong] == [(where, set(rules))], name
            with pytest.raises(tp_plans.CheckFailedError, match=r"tower\.\*"):
                report.raise_on_error()


class Handing(Mix):
    """Attention that returns a list, with a bias that the block adds."""

    def __init__(self):
        super().__init__(head_by_head=False)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return [super().forward(x), self.shift]


class Adding(Block):
    def __init__(self):
        super().__init__(head_by_head=False, in_turn=False)
        self.mix = Handing()

    def forward(self, x):
        mixed, shift = self.mix(self.one(x))
        x = x + mixed + shift.expand_as(x)
        return x + self.gate(self.two(x))


def fused_in_turn():
    return Own(head_by_head=True, in_turn=True)


def adding():
    model = Own()
    model.tower = nn.ModuleList(Adding() for _ in range(2))
    return model


def parallelized_with_automatic_plan(build, sequence_parallel):
    """The errors of output and gradients of a model that only inference has a plan for, on one rank."""
    torch.manual_seed(0)
    whole = build().double()
    mesh = mesh_for({"tp": 2})["tp"]
    found = plan_for(whole, sequence_parallel=sequence_parallel, mesh=mesh)
    split = torch.distributed.tensor.parallel.parallelize_module(copy.deepcopy(whole), mesh, found.to_torch())
    ids = torch.arange(14).view(2, 7)
    expected, actual = whole(ids), split(ids).full_tensor()
    expected.square().sum().backward()
    actual.square().sum().backward()
    wanted = dict(whole.named_parameters())
    grads = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in split.named_parameters()}
    errors = [(grads[name] - wanted[name].grad).abs().max().item() for name in wanted]
    return max([*errors, (expected - actual).abs().max().item()]), sorted(found)


@pytest.mark.parametrize(
    "sequence_parallel", [pytest.param(False, id="TP", marks=pytest.mark.slow), pytest.param(True, id="SP")]
)
def test_parts_that_are_split_wrongly_are_gathered_until_the_plan_is_right(two_ranks, sequence_parallel):
    model = Own(head_by_head=True, in_turn=True)
    assert suggest(model).plan["tower.*.gate.wide"].fused_sizes == (1, 1)  # a wrong guess, with its doubt
    for error, patterns in two_ranks.run(parallelized_with_automatic_plan, fused_in_turn, sequence_parallel):
        assert error < 1e-10
        assert "tower.*.gate" in patterns
        assert "tower.*.gate.wide" not in patterns


def test_plan_for_gathers_the_sequence_for_blocks_that_mix_it_with_other_tensors(two_ranks):
    """The derived form gathers it for each sub-layer, and torch refuses to add a plain tensor to a sharded one."""
    assert "tower.*" not in suggest(adding(), sequence_parallel=True).plan
    for error, patterns in two_ranks.run(parallelized_with_automatic_plan, adding, sequence_parallel=True):
        assert error < 1e-10
        assert "tower.*" in patterns


def test_automatic_says_once_that_a_plan_was_verified(caplog):
    with caplog.at_level(logging.WARNING, logger="tp_plans"):
        found = plan_for(Own())
        plan_for(Own())
    said = [record.message for record in caplog.records if "no plan is known for Own" in record.message]
    assert len(said) == 1
    assert "verified on 2 ranks" in said[0]
    assert verify_plan(Own(), found).right


class Stubborn(Own):
    """A model that cannot be run on token ids alone."""

    def forward(self, ids, image):
        return super().forward(ids) + image


def test_doubts_that_cannot_be_decided_are_listed_with_the_way_to_accept_them(caplog):
    with pytest.raises(UnknownArchitectureError, match=r"(?s)Doubts: .*tower.*cannot be run.*plan=\"inferred\""):
        plan_for(Stubborn())
    with caplog.at_level(logging.WARNING, logger="tp_plans"):
        assert plan_for(Stubborn(), "inferred") == suggest(Stubborn()).plan
    assert any("was not run, and may be wrong" in record.message for record in caplog.records)


class AcrossHeads(nn.Module):
    """Attention whose weights are normalized over the heads too."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out_proj = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (-1, SIZE)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        shares = scores.flatten(1).softmax(-1).view_as(scores)
        return self.out_proj(torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(-2))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Seeing(nn.Module):
    """A language model next to a tower whose attention cannot be split in heads, and a part that no image reaches."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(OrderedDict(attention=AcrossHeads(), mlp=Plain()))
        self.eye = nn.ModuleDict({"patches": nn.Conv2d(3, WIDTH, 16, 16), "blocks": nn.ModuleList([block])})
        self.ear = nn.ModuleList([nn.Sequential(OrderedDict(mlp=Plain()))])
        self.text = Own(in_turn=True)

    def forward(self, input_ids, pixel_values=None, sound=None):
        x = self.text.words(input_ids)
        if pixel_values is not None:
            seen = self.eye["patches"](pixel_values).flatten(2).transpose(1, 2)
            x = x + self.eye["blocks"][0](seen).mean(1, keepdim=True)
        if sound is not None:
            x = x + self.ear[0](sound)
        for block in self.text.tower:
            x = block(x)
        return self.text.speak(self.text.finish(x))


def automatic_plan_of_towers():
    return dict(plan_for(Seeing(), towers_tp=2, mesh=mesh_for({"tp": 2})["tp"]))


def test_parts_of_towers_are_split_where_a_run_with_images_verifies_it(two_ranks):
    model = Seeing()
    guessed = plan_for(model, "inferred", towers_tp=2)
    parts = ("eye.blocks.*.attention.out_proj", "eye.blocks.*.mlp.fc2", "ear.*.mlp.fc2")
    assert all(guessed[path].input_layouts == tp_plans.Shard(-1) for path in parts)
    stored = ColwiseParallel(output_layouts=tp_plans.Replicate())
    for found in two_ranks.run(automatic_plan_of_towers):
        assert [found[path] for path in parts] == [stored, RowwiseParallel(), stored]


class Writing(Own):
    """A model that writes into its logits, and whose blocks have a part that token ids do not reach."""

    def __init__(self):
        super().__init__()
        for block in self.tower:
            block.mlp = Plain()

    def forward(self, ids, sound=None):
        if sound is not None:
            self.tower[0].mlp(sound)
        logits = super().forward(ids)
        logits[..., torch.tensor([1, 5])] = -9.0
        return logits


def automatic_plan_of_writing():
    return dict(plan_for(Writing(), mesh=mesh_for({"tp": 2})["tp"]))


def test_plan_for_gathers_heads_with_changed_logits_and_parts_that_no_run_reaches(two_ranks):
    assert suggest(Writing()).plan["tower.*.mlp.fc2"] == RowwiseParallel()
    for found in two_ranks.run(automatic_plan_of_writing):
        assert found["speak"] == ColwiseParallel(output_layouts=tp_plans.Replicate())
        assert found["tower.*.mlp"] == tp_plans.styles.GatheredParameters(names=("fc1.weight", "fc2.weight"))
        assert found["tower.*.gate.narrow"] == RowwiseParallel()


def test_a_model_on_the_meta_device_is_run_with_random_weights():
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(words=nn.Embedding(9, 8), up=nn.Linear(8, 16), down=nn.Linear(16, 8)))
    rules = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    assert verify_plan(model, Plan(rules)).right
    assert not verify_plan(model, Plan({**rules, "down": RowwiseParallel(output_layouts=tp_plans.Partial())})).right
    assert model.up.weight.is_meta


def test_a_large_model_without_a_config_keeps_one_block_of_each_kind(monkeypatch):
    model = Own()
    monkeypatch.setattr("tp_plans.verification.tiny.MAX_PARAMETERS", 12_000)
    small_model = tiny_model(model, tp=2).model
    assert (len(model.tower), len(small_model.tower)) == (2, 1)
    assert small_model.words.weight.dtype == torch.float64
    assert not torch.equal(small_model.words.weight, model.words.weight.double())
    monkeypatch.setattr("tp_plans.verification.tiny.MAX_PARAMETERS", 100)
    with pytest.raises(ModelError, match="parameters, more than 100"):
        tiny_model(model, tp=2)


def test_a_model_without_an_embedding_needs_inputs():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    rules = Plan({"0": ColwiseParallel(), "1": RowwiseParallel()})
    with pytest.raises(ModelError, match="give inputs"):
        verify_plan(model, rules)
    assert verify_plan(model, rules, inputs={"input": torch.randn(3, 8, dtype=torch.float64)}).right


def test_a_config_of_a_large_model_becomes_a_small_one_with_the_same_modules():
    from transformers import CodeGenConfig, CodeGenForCausalLM

    with torch.device("meta"):
        large = CodeGenForCausalLM(CodeGenConfig(n_layer=3))
        tiny = CodeGenForCausalLM(shrunk_config(large.config, tp=2))
    assert sum(p.numel() for p in tiny.parameters()) < 1e6
    assert tiny.config.n_head == 8
    assert suggest(tiny).plan.keys() == suggest(large).plan.keys()


OWN_DECODER = """
from torch import nn

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.wide, self.narrow = nn.Embedding(16, 8), nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, ids):
        gate, up = self.wide(self.words(ids)).chunk(2, -1)
        return self.narrow(gate.sigmoid() * up)
"""


def test_a_large_multimodal_model_is_run_at_small_sizes_with_images():
    from transformers import BlipConfig, BlipForConditionalGeneration

    with torch.device("meta"):
        model = BlipForConditionalGeneration(BlipConfig())
    tiny = tiny_model(model, tp=2)
    assert sum(parameter.numel() for parameter in tiny.model.parameters()) < 2e6
    assert {tree.decoder for tree in map(ModelTree.of, (model, tiny.model))} == {"text_decoder.bert.encoder.layer"}
    reference = first_reference_run(tiny.model, None, device="cpu")
    assert {"pixel_values", "input_ids"} <= reference.inputs.keys()
    reached = [path for path, gradient in reference.gradients.items() if gradient is not None]
    assert any(path.startswith("vision_model") for path in reached)


def test_a_recognizer_of_speech_is_run_on_a_spectrogram_and_a_speaker_on_codes():
    import transformers

    layers = {
        f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = transformers.WhisperConfig(vocab_size=9, d_model=4, max_source_positions=6, pad_token_id=0, **layers)
    run = first_reference_run(transformers.WhisperForConditionalGeneration(config).double(), None, device="cpu")
    assert run.inputs["input_features"].shape == (2, 80, 12)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4, "vocab_size": 9}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    cross = {"cross_num_attention_heads": 2, "cross_num_key_value_heads": 2, "cross_head_dim": 4}
    decoder = {**sizes, **heads, **cross, "cross_hidden_size": 16, "num_channels": 3}
    config = transformers.DiaConfig(encoder_config=sizes | heads, decoder_config=decoder, delay_pattern=[0, 1, 2])
    run = first_reference_run(transformers.DiaForConditionalGeneration(config).double(), None, device="cpu")
    assert run.inputs["decoder_input_ids"].shape == (2, 5, 3)


def test_the_command_line_verifies_a_model_of_a_dotted_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_decoder.py").write_text(OWN_DECODER)
    monkeypatch.syspath_prepend(tmp_path)
    for style, code, told in (
        (ColwiseParallel(fused_sizes=(1, 1)), 0, "right"),
        (ColwiseParallel(), 1, "wide, narrow"),
    ):
        (tmp_path / "plan.json").write_text(Plan({"wide": style, "narrow": RowwiseParallel()}).to_json())
        assert main(["verify", "own_decoder.Decoder", "--plan", str(tmp_path / "plan.json")]) == code
        assert told in capsys.readouterr().out


def test_a_fused_key_value_head_that_cannot_be_split_is_gathered():
    model = small(coverage_entries()["gpt_bigcode"])
    with pytest.raises(tp_plans.CheckFailedError, match="1 heads of 8"):
        check(suggest(model).plan, model, tp=2).raise_on_error()
    found = plan_for(model)
    assert check(found, model, tp=2).errors == ()


@pytest.mark.parametrize("blocks", [2, 5])
def test_tiny_model_of_the_default_config_of_latent_attention_runs(blocks):
    config = transformers.DeepseekV3Config(num_hidden_layers=blocks)  # groups of experts, a rotated part of each head
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(14).view(2, 7)
    logits = tiny_model(model, tp=1, all_blocks=True).model(input_ids=ids, use_cache=False).logits
    assert logits.isfinite().all()
