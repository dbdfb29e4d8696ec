"""The parts of the GRPO example in one process: split and reward, objective, layout of batches, sampling."""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_runtime
import rl_logprobs

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "grpo"
MODULES = ("batch", "checkpoint", "objective", "rollout", "run", "settings", "task")


@pytest.fixture(scope="module")
def grpo() -> Iterator[SimpleNamespace]:
    """The example's modules; their short names leave ``sys.modules`` again afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in set(sys.modules) - before:
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(grpo: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint, on disk."""
    return grpo.checkpoint.write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.fixture
def generator(grpo: SimpleNamespace, folder: Path) -> Any:
    """A generator that read the small checkpoint, with weights spread so that its distributions are not flat."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return grpo.rollout.Generator(model, AutoTokenizer.from_pretrained(folder))


# The task


def test_no_held_out_answer_is_ever_drawn_for_training(grpo: SimpleNamespace) -> None:
    draw = grpo.task.draw_questions
    held_out = {question.answer for question in draw(2000, random.Random(0), held_out=True)}
    training = {question.answer for question in draw(20000, random.Random(1), held_out=False)}
    assert len(held_out) > 200
    assert not held_out & training


def test_the_same_seed_draws_the_same_questions(grpo: SimpleNamespace) -> None:
    first, second = (grpo.task.draw_questions(50, random.Random(3), held_out=False) for _ in range(2))
    assert first == second


def test_only_the_exact_answer_is_rewarded(grpo: SimpleNamespace) -> None:
    question = grpo.task.Question("4027")
    assert question.prompt == "order 4027 ="
    assert grpo.task.reward(question, " 0247") == 1.0
    for wrong in ("0247", " 0247 ", " 02477", " 7420", " 4027", "", " 0247" + grpo.rollout.UNFINISHED):
        assert grpo.task.reward(question, wrong) == 0.0


def test_warmup_text_mixes_three_habits_in_the_stated_shares(grpo: SimpleNamespace) -> None:
    question, rng = grpo.task.Question("4027"), random.Random(0)
    answers = [grpo.task.warmup_answer(question, rng) for _ in range(4000)]
    assert set(answers) == {" 0247", " 7420", " 4027"}
    assert answers.count(" 0247") / 4000 == pytest.approx(grpo.task.ASCENDING_TEXTS, abs=0.03)
    assert answers.count(" 7420") / 4000 == pytest.approx((1 - grpo.task.ASCENDING_TEXTS) / 2, abs=0.03)


# The objective


def test_advantages_compare_within_a_group_only(grpo: SimpleNamespace) -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    advantages = grpo.objective.advantages_of(rewards).view(3, 4)
    torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(3), atol=1e-6, rtol=0)
    assert (advantages[1] == 0).all()
    assert advantages[2, 3] > advantages[0, 1]  # the rarer success counts for more


def _batch(grpo: SimpleNamespace, mask: torch.Tensor, generated: torch.Tensor) -> Any:
    targets = torch.where(mask, 1, -100)
    return grpo.batch.Batch(tokens=torch.ones_like(targets), targets=targets, logprobs=generated)


def test_first_update_is_the_plain_policy_gradient_over_all_tokens(grpo: SimpleNamespace) -> None:
    logprobs = torch.randn(3, 5, requires_grad=True)
    mask = torch.rand(3, 5) > 0.3
    advantages, old = torch.tensor([1.0, -0.5, 0.0]), logprobs.detach().clone()
    weights = rl_logprobs.mean_weights([mask, torch.ones(2, 4)])
    grpo.objective.policy_loss(logprobs, old, _batch(grpo, mask, old), advantages, weights).backward()
    torch.testing.assert_close(logprobs.grad, -(advantages[:, None] * mask) / (mask.sum() + 8))


def test_a_generator_that_differs_is_corrected_up_to_the_bound(grpo: SimpleNamespace) -> None:
    old, mask = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
    batch = _batch(grpo, mask, torch.tensor([[-1.0, -1.5, -9.0]]))
    new = old.clone().requires_grad_()
    grpo.objective.policy_loss(new, old, batch, torch.tensor([3.0]), rl_logprobs.mean_weights(mask)).backward()
    torch.testing.assert_close(new.grad, -torch.tensor([[1.0, math.exp(0.5), grpo.objective.LARGEST_CORRECTION]]))


# Batches


def test_targets_are_the_next_tokens_of_the_completion_only(grpo: SimpleNamespace) -> None:
    samples = [grpo.batch.Sample([5, 6, 7], [8, 9], [-0.1, -0.2]), grpo.batch.Sample([5], [6], [-0.3])]
    batch = grpo.batch.collate(samples, length=6, pad_id=0, device=torch.device("cpu"))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 0], [5, 6, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [[-100, -100, 8, 9, -100, -100], [6, *[-100] * 5]]
    torch.testing.assert_close(batch.logprobs[batch.mask], torch.tensor([-0.1, -0.2, -0.3]))
    assert grpo.batch.padded_length(samples) == 8
    assert batch.kept_tokens is None


def test_kept_sets_lie_at_the_targets_that_were_chosen_from_them(grpo: SimpleNamespace) -> None:
    samples = [
        grpo.batch.Sample([5, 6, 7], [8, 9], [-0.1, -0.2], [[8, 2], [9]]),
        grpo.batch.Sample([5], [6], [-0.3], [[6, 1, 4]]),
    ]
    batch = grpo.batch.collate(samples, length=6, pad_id=0, device=torch.device("cpu"))
    rows = batch.kept_tokens.ids.split(batch.kept_tokens.offsets.diff().tolist())
    expected = [[], [], [8, 2], [9], [], [], [6, 1, 4], [], [], [], [], []]
    assert [row.tolist() for row in rows] == expected


def test_uneven_parts_are_refused(grpo: SimpleNamespace) -> None:
    assert grpo.batch.chunks([1, 2, 3, 4, 5, 6], 3) == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="5 items cannot be dealt evenly into 2 parts"):
        grpo.batch.chunks([1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 30}, "--prompts 30 must divide by the 4 ranks"),
        ({"prompts": 4, "group": 1, "updates": 3}, "4 samples, which must divide by 6"),
        ({"warmup_batch": 3}, "--warmup-batch 3 must divide by 2"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_the_numbers(
    grpo: SimpleNamespace, changes: dict[str, int], message: str
) -> None:
    settings = grpo.settings.Settings(**changes)
    with pytest.raises(ValueError, match=message):
        grpo.run.check_divisible(settings, world_size=4, dp_size=2)


def test_every_setting_is_an_option_with_its_default(grpo: SimpleNamespace) -> None:
    settings = grpo.settings
    assert settings.parse_settings([]) == settings.Settings()
    changed = settings.parse_settings(["--no-sequence-parallel", "--lr", "1e-6", "--model", "a", "--output", "b"])
    assert changed == settings.Settings(sequence_parallel=False, lr=1e-6, model="a", output=Path("b"))
    assert all(isinstance(getattr(changed, option.name), type(option.default)) for option in fields(changed)[1:])


# The generator


def test_any_text_survives_the_tokenizer_on_disk(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("order 4027 =", " 0247", "ordne 7 für Ærø, 順", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_a_forward_without_cache_and_padding(generator: Any, temperature: float) -> None:
    rng = torch.Generator().manual_seed(0)
    samples = generator.sample(["order 1 =", "order 98765 ="], 6, temperature, rng)
    for sample in samples:
        with torch.no_grad():
            logits = generator.model(torch.tensor([sample.prompt + sample.completion])).logits[0]
        scores = (logits / temperature).log_softmax(dim=-1)[len(sample.prompt) - 1 : -1]
        expected = scores.gather(1, torch.tensor(sample.completion)[:, None])[:, 0]
        # The spread weights make logits of several tens; this is some roundings of float32 at that size.
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=5e-5, rtol=0)


def test_top_p_returns_the_kept_sets_and_log_probs_over_them(grpo: SimpleNamespace, generator: Any) -> None:
    samples = generator.sample(["order 1 =", "order 98765 ="], 6, 3.0, torch.Generator().manual_seed(0), 0.7)
    batch = grpo.batch.collate(samples, grpo.batch.padded_length(samples), 0, torch.device("cpu"))
    assert any(len(kept) > 1 for sample in samples for kept in sample.kept)
    with torch.no_grad():
        logits = generator.model(batch.tokens).logits
    scored = rl_logprobs.token_logprobs(logits, batch.targets, temperature=3.0, kept_tokens=batch.kept_tokens)
    torch.testing.assert_close(scored, batch.logprobs, atol=5e-5, rtol=0)
    biased = rl_logprobs.token_logprobs(logits, batch.targets, temperature=3.0)
    assert (biased - batch.logprobs)[batch.mask].mean() < -0.05


def test_a_mixture_returns_the_experts_of_every_token_at_its_place(grpo: SimpleNamespace, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = grpo.checkpoint.write_checkpoint(tmp_path, seed=0, mixture=True)
    mixture = grpo.rollout.Generator(
        AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    )
    samples = mixture.sample(["order 1 =", "order 98765 ="], 6, 1.0, torch.Generator().manual_seed(0))
    batch = grpo.batch.collate(samples, grpo.batch.padded_length(samples), 0, torch.device("cpu"))
    with torch.no_grad(), fsdp_runtime.record_routes(mixture.model) as routes:
        mixture.model(batch.tokens, use_cache=False)
    ran = batch.routes >= 0
    lengths = [len(sample.prompt) + len(sample.completion) for sample in samples]
    assert ran.all(2).sum(1).tolist() == [sum(lengths) - len(samples)] * len(batch.routes)  # no last token was run
    assert torch.equal(batch.routes[ran], routes.stacked()[ran].to(batch.routes.dtype))


def test_samples_follow_the_distribution(generator: Any) -> None:
    samples = generator.sample(["order 1 ="] * 4000, 1, 1.0, torch.Generator().manual_seed(0))
    first = torch.tensor([sample.completion[0] for sample in samples])
    with torch.no_grad():
        expected = generator.model(torch.tensor([samples[0].prompt])).logits[0, -1].softmax(dim=-1)
    found = torch.bincount(first, minlength=len(expected)) / 4000
    likeliest = expected.topk(5).indices
    # Three standard deviations of a share from 4000 draws.
    bound = 3 * (expected[likeliest] * (1 - expected[likeliest]) / 4000).sqrt()
    assert ((found - expected)[likeliest].abs() <= bound + 1e-3).all()


def test_temperature_zero_takes_the_likeliest_token(generator: Any) -> None:
    (sample,) = generator.sample(["order 31 ="], 1, 0.0)
    with torch.no_grad():
        logits = generator.model(torch.tensor([sample.prompt])).logits[0, -1]
    assert sample.completion == [logits.argmax().item()]


def test_sampling_stops_behind_the_end_of_text(grpo: SimpleNamespace, generator: Any) -> None:
    eos = generator.tokenizer.eos_token_id
    samples = generator.sample(
        [f"order {digit} =" for digit in range(10)] * 20, 12, 3.0, torch.Generator().manual_seed(0)
    )
    ended = [sample for sample in samples if eos in sample.completion]
    assert ended
    assert all(sample.completion.index(eos) == len(sample.completion) - 1 for sample in ended)
    assert all(len(sample.completion) == 12 for sample in samples if eos not in sample.completion)


def test_text_shows_a_missing_end_and_special_tokens(grpo: SimpleNamespace, generator: Any) -> None:
    tokenizer, sample = generator.tokenizer, grpo.batch.Sample
    answer = tokenizer(" 0247")["input_ids"]
    assert generator.completion_text(sample([1], [*answer, tokenizer.eos_token_id], [])) == " 0247"
    assert generator.completion_text(sample([1], answer, [])) != " 0247"
    inside = [*answer[:2], tokenizer.bos_token_id, *answer[2:], tokenizer.eos_token_id]
    assert generator.completion_text(sample([1], inside, [])) != " 0247"


def test_streamed_weights_must_be_exactly_the_models(generator: Any) -> None:
    weights = {name: parameter.clone() for name, parameter in generator.model.named_parameters()}
    assert "lm_head.weight" not in weights  # tied: the embedding's value fills both
    generator.load(iter(weights.items()))
    with pytest.raises(KeyError, match="the stream holds 'other'"):
        generator.load([("other", torch.zeros(1))])
    del weights["model.norm.weight"]
    with pytest.raises(KeyError, match=r"left out 1 of \d+ weights, first 'model.norm.weight'"):
        generator.load(iter(weights.items()))
